"""The exported numbers: vLLM's names and labels, counters that only rise, a dashboard that finds all it asks for."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.parser import text_string_to_metric_families

from pagetable.memory import CacheStats
from pagetable.serving.messages import Delta, EngineStats, Report, StepStats
from pagetable.serving.metrics import CONTENT_TYPE, ENDPOINTS, ServerMetrics
from pagetable.serving.record import RequestRecord

ROOT = Path(__file__).parents[2]
MODEL = "my/model"
LABELS = {"model_name": MODEL, "engine": "0"}

VLLM_TYPES = {
    "gauge": "num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info",
    "counter": "prefix_cache_queries prefix_cache_hits num_preemptions prompt_tokens prompt_tokens_cached "
    "generation_tokens request_success",
    "histogram": "iteration_tokens_total request_prompt_tokens request_generation_tokens request_params_n "
    "request_params_max_tokens request_max_num_generation_tokens request_prefill_kv_computed_tokens "
    "time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds "
    "e2e_request_latency_seconds request_queue_time_seconds request_inference_time_seconds "
    "request_prefill_time_seconds request_decode_time_seconds",
}
# What the dashboard in vLLM's examples/observability/prometheus_grafana asks for.
VLLM_DASHBOARD = """
    vllm:e2e_request_latency_seconds_bucket vllm:e2e_request_latency_seconds_sum vllm:e2e_request_latency_seconds_count
    vllm:prompt_tokens_total vllm:generation_tokens_total vllm:inter_token_latency_seconds_bucket
    vllm:inter_token_latency_seconds_sum vllm:inter_token_latency_seconds_count vllm:num_requests_running
    vllm:num_requests_waiting vllm:time_to_first_token_seconds_bucket vllm:time_to_first_token_seconds_sum
    vllm:time_to_first_token_seconds_count vllm:kv_cache_usage_perc vllm:request_prompt_tokens_bucket
    vllm:request_generation_tokens_bucket vllm:request_success_total vllm:request_queue_time_seconds_sum
    vllm:request_prefill_time_seconds_sum vllm:request_decode_time_seconds_sum
    vllm:request_max_num_generation_tokens_sum
"""


def report(deltas: int = 0, step: StepStats | None = None, num_blocks: int = 100, **counters: int) -> Report:
    blocks = {"blocks_in_use": 25, "blocks_cached_idle": 15, "blocks_empty": num_blocks - 40, "wasted_slots": 7}
    cache = CacheStats(num_blocks=num_blocks, block_size=16, **blocks, **counters)
    return Report(EngineStats(3, 4, cache), [Delta("r", 0, "ab", [1, 2])] * deltas, step=step, step_seconds=0.025)


def finished(**changes: object) -> RequestRecord:
    usual = {
        "num_prompt_tokens": 100,
        "max_tokens": 50,
        "arrival_time": 10.0,
        "first_scheduled_time": 11.0,
        "first_token_time": 13.0,
        "last_token_time": 17.0,
        "finished_time": 18.0,
        "num_cached_tokens": 32,
        "num_output_tokens": 5,
        "finish_reason": "stop",
    }
    return RequestRecord("r", "/v1/completions", MODEL, **(usual | changes))


def samples(metrics: ServerMetrics) -> dict[str, dict[str, float]]:
    """By name, then by the labels beside the usual ones, such as `source=a`."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            rest = {key: value for key, value in sample.labels.items() if LABELS.get(key) != value}
            found.setdefault(sample.name, {})[",".join(f"{key}={rest[key]}" for key in sorted(rest))] = sample.value
    return found


def value(metrics: ServerMetrics, name: str, labels: str = "") -> float:
    return samples(metrics)[name][labels]


def exercised() -> ServerMetrics:
    """Metrics in which everything has happened once."""
    metrics = ServerMetrics(MODEL)
    metrics.set_engine_up(True)
    metrics.observe_report(report(1, StepStats(2, 30, 1, 0.001, 0.02, 0.002), query_tokens=9))
    metrics.observe_first_token(0.1)
    metrics.observe_inter_token(0.02, 1)
    metrics.observe_request(finished())
    metrics.http_response("/v1/completions", 200)
    metrics.event_loop_lag(0.001)
    return metrics


# ---------------------------------------------------------------- names


def test_vllm_names_are_there_with_their_types_and_labels():
    families = {f.name: f for f in text_string_to_metric_families(exercised().render().decode())}
    for kind, names in VLLM_TYPES.items():
        for name in names.split():
            family = families[f"vllm:{name}"]
            assert family.type == kind, name
            assert family.samples, name
            for sample in family.samples:
                assert LABELS.items() <= sample.labels.items(), sample


def test_vllms_own_dashboard_finds_its_series():
    assert set(VLLM_DASHBOARD.split()) <= samples(ServerMetrics(MODEL)).keys()


def test_buckets_for_tokens_end_at_the_longest_sequence():
    def bounds(metrics: ServerMetrics) -> list[str]:
        return list(samples(metrics)["vllm:request_prompt_tokens_bucket"])

    assert bounds(ServerMetrics(MODEL, max_model_len=100)) == [f"le={n}.0" for n in (1, 2, 5, 10, 20, 50, 100)] + [
        "le=+Inf"
    ]
    assert bounds(ServerMetrics(MODEL, max_model_len=2048))[-2] == "le=2000.0"


def test_two_servers_in_one_process_do_not_disturb_each_other():
    first, second = ServerMetrics(MODEL), ServerMetrics(MODEL)
    first.observe_first_token(1)
    assert value(second, "vllm:time_to_first_token_seconds_count") == 0


def test_the_process_is_described_as_well():
    found = samples(ServerMetrics(MODEL))
    assert "python_info" in found
    if sys.platform == "linux":
        assert found["process_resident_memory_bytes"][""] > 0


def test_the_content_type_is_that_of_the_format():
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")
    assert CONTENT_TYPE.split(";")[0] == CONTENT_TYPE_LATEST.split(";")[0]


# ---------------------------------------------------------------- the engine


def test_a_report_shows_the_engine_as_of_now():
    metrics = ServerMetrics(MODEL)
    metrics.observe_report(report())
    found = samples(metrics)
    assert found["vllm:num_requests_running"] == {"": 3}
    assert found["vllm:num_requests_waiting"] == {"": 4}
    assert found["vllm:kv_cache_usage_perc"] == {"": 0.25}
    assert found["pagetable:kv_blocks"] == {"state=in_use": 25, "state=cached_idle": 15, "state=empty": 60}
    assert found["pagetable:wasted_slots"] == {"": 7}
    assert found["vllm:cache_config_info"] == {"block_size=16,num_gpu_blocks=100": 1}


def test_an_engine_that_is_down_runs_nothing():
    metrics = exercised()
    assert value(metrics, "pagetable:engine_up") == 1
    metrics.set_engine_up(False)
    found = samples(metrics)
    assert (
        found["pagetable:engine_up"]
        == found["vllm:num_requests_running"]
        == found["vllm:kv_cache_usage_perc"]
        == {"": 0}
    )
    assert set(found["pagetable:kv_blocks"].values()) == {0}


def test_counters_grow_by_what_came_since_the_last_report():
    metrics = ServerMetrics(MODEL)
    metrics.observe_report(report(2, query_tokens=100, hit_tokens=30, evictions=5, preemptions=1, recomputed_tokens=40))
    metrics.observe_report(report(1, query_tokens=150, hit_tokens=70, evictions=5, preemptions=2, recomputed_tokens=40))
    expected = {
        "vllm:prefix_cache_queries": 150,
        "vllm:prefix_cache_hits": 70,
        "vllm:prompt_tokens": 150,
        "vllm:prompt_tokens_cached": 70,
        "vllm:num_preemptions": 2,
        "vllm:generation_tokens": 6,
        "pagetable:evictions": 5,
        "pagetable:recomputed_tokens": 40,
        "pagetable:engine_restarts": 0,
    }
    assert {name: value(metrics, f"{name}_total") for name in expected} == expected


@pytest.mark.parametrize("queries_after", [20, 100, 300], ids=["fewer", "as many", "more"])
def test_a_restart_does_not_make_a_counter_fall_or_stand_still(queries_after: int):
    metrics = ServerMetrics(MODEL)
    metrics.observe_report(report(query_tokens=100, evictions=8))
    metrics.set_engine_up(False)
    metrics.engine_restarted()
    metrics.observe_report(report(query_tokens=queries_after, evictions=8, num_blocks=80))
    assert value(metrics, "vllm:prefix_cache_queries_total") == 100 + queries_after
    assert value(metrics, "pagetable:evictions_total") == 16
    assert value(metrics, "pagetable:engine_restarts_total") == 1
    assert samples(metrics)["vllm:cache_config_info"] == {"block_size=16,num_gpu_blocks=80": 1}


def test_a_restart_that_was_not_announced_raises_nothing_and_loses_nothing():
    metrics = ServerMetrics(MODEL)
    metrics.observe_report(report(query_tokens=100, hit_tokens=50))
    metrics.observe_report(report(query_tokens=30, hit_tokens=0))
    assert value(metrics, "vllm:prefix_cache_queries_total") == 130
    assert value(metrics, "vllm:prefix_cache_hits_total") == 50


def test_a_step_is_seen_with_its_parts():
    metrics = ServerMetrics(MODEL)
    metrics.observe_report(report(step=StepStats(5, 30, 4, 0.001, 0.02, 0.002)))
    found = samples(metrics)
    assert found["vllm:iteration_tokens_total_sum"] == {"": 34}
    assert found["pagetable:step_prefill_tokens_sum"] == {"": 30}
    assert found["pagetable:step_decode_tokens_sum"] == {"": 4}
    assert found["pagetable:step_seqs_sum"] == {"": 5}
    assert found["pagetable:step_seconds_sum"] == {"": 0.025}
    parts = found["pagetable:step_part_seconds_sum"]
    assert parts == pytest.approx(
        {"part=schedule": 0.001, "part=execute": 0.02, "part=commit": 0.002, "part=rest": 0.002}
    )


def test_a_report_without_a_step_counts_none():
    metrics = ServerMetrics(MODEL)
    metrics.observe_report(report())
    assert value(metrics, "pagetable:step_seconds_count") == 0


# ---------------------------------------------------------------- requests


def test_a_request_leaves_its_sizes_and_times():
    metrics = ServerMetrics(MODEL)
    metrics.observe_request(finished())
    expected = {
        "request_prompt_tokens": 100,
        "request_prefill_kv_computed_tokens": 68,
        "request_generation_tokens": 5,
        "request_max_num_generation_tokens": 5,
        "request_params_n": 1,
        "request_params_max_tokens": 50,
        "e2e_request_latency_seconds": 8,
        "request_queue_time_seconds": 1,
        "request_prefill_time_seconds": 2,
        "request_decode_time_seconds": 4,
        "request_inference_time_seconds": 6,
        "request_time_per_output_token_seconds": 1,
    }
    assert {name: value(metrics, f"vllm:{name}_sum") for name in expected} == expected
    assert value(metrics, "vllm:request_success_total", "finished_reason=stop") == 1


def test_answers_that_are_computed_side_by_side_share_the_time():
    metrics = ServerMetrics(MODEL)
    metrics.observe_request(finished(n=2, num_answers=2, num_output_tokens=10))
    assert value(metrics, "vllm:request_time_per_output_token_seconds_sum") == 1


def test_a_refused_request_is_counted_and_no_fast_answer():
    metrics = ServerMetrics(MODEL)
    metrics.observe_request(RequestRecord("r", "/v1/completions", MODEL, 9, finished_time=1e9, finish_reason="error"))
    found = samples(metrics)
    assert found["vllm:request_success_total"]["finished_reason=error"] == 1
    assert found["vllm:e2e_request_latency_seconds_count"] == found["vllm:request_prompt_tokens_count"] == {"": 0}


def test_a_request_that_gave_up_waiting_shows_how_long_it_waited():
    metrics = ServerMetrics(MODEL)
    waited = dict.fromkeys(("first_scheduled_time", "first_token_time", "last_token_time"))
    metrics.observe_request(finished(finish_reason="abort", num_output_tokens=0, **waited))
    assert value(metrics, "vllm:request_queue_time_seconds_sum") == 8
    assert value(metrics, "vllm:request_prefill_time_seconds_count") == 0


def test_a_reason_that_nobody_knows_makes_no_label():
    metrics = ServerMetrics(MODEL)
    metrics.observe_request(finished(finish_reason="boredom"))
    metrics.observe_request(finished(finish_reason=None))
    assert samples(metrics)["vllm:request_success_total"] == {
        f"finished_reason={reason}": 2 * (reason == "error")
        for reason in ("stop", "length", "abort", "cache_full", "error")
    }


def test_tokens_that_came_together_share_the_time_between_them():
    metrics = ServerMetrics(MODEL)
    metrics.observe_inter_token(0.2, 4)
    metrics.observe_inter_token(0.02, 1)
    metrics.observe_inter_token(0.02, 0)
    found = samples(metrics)
    assert found["vllm:inter_token_latency_seconds_count"][""] == 5
    assert found["vllm:inter_token_latency_seconds_sum"][""] == pytest.approx(0.22)
    assert found["vllm:inter_token_latency_seconds_bucket"]["le=0.05"] == 5


# ---------------------------------------------------------------- HTTP


def test_unknown_paths_and_statuses_share_a_label():
    metrics = ServerMetrics(MODEL)
    for i in range(50):
        metrics.http_response(f"/wp-admin/{i}.php", 404)
    metrics.http_response("/v1/models", 200)
    metrics.http_response("/v1/models", 7000)
    assert samples(metrics)["pagetable:http_responses_total"] == {
        "path=other,status=404": 50,
        "path=/v1/models,status=200": 1,
        "path=/v1/models,status=other": 1,
    }


def test_a_server_may_name_its_own_paths():
    metrics = ServerMetrics(MODEL, endpoints=[*ENDPOINTS, "/mine"])
    metrics.http_response("/mine", 200)
    assert value(metrics, "pagetable:http_responses_total", "path=/mine,status=200") == 1


# ---------------------------------------------------------------- what is built on the names


def dashboard() -> dict:
    return json.loads((ROOT / "dashboards" / "grafana.json").read_text())


def expressions() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]


def test_the_dashboard_asks_only_for_what_is_exported():
    asked = {name for expr in expressions() for name in re.findall(r"\b(?:vllm|pagetable|process):?\w+", expr)}
    assert len(asked) > 30
    assert asked <= samples(exercised()).keys()


def test_the_dashboard_is_one_that_grafana_can_place():
    board = dashboard()
    assert board["schemaVersion"] >= 39
    assert {variable["name"]: variable["type"] for variable in board["templating"]["list"]} == {
        "DS_PROMETHEUS": "datasource",
        "model_name": "query",
    }
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    taken = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    for expr in expressions():
        assert expr.count("(") == expr.count(")")
        assert '{model_name="$model_name"' in expr


def test_the_documentation_lists_every_metric_and_its_type():
    rows = re.findall(r"^\| `((?:vllm|pagetable):\w+)` \| (\w+) \|", (ROOT / "docs" / "metrics.md").read_text(), re.M)
    exported = {
        family.name: family.type
        for family in text_string_to_metric_families(exercised().render().decode())
        if ":" in family.name and not family.name.endswith("_created")
    }
    assert dict(rows) == exported
    assert len(rows) == len(exported)


def test_the_metrics_need_no_torch():
    code = "import sys; sys.modules['torch'] = None; import pagetable.serving.metrics"
    subprocess.run([sys.executable, "-c", code], check=True)
