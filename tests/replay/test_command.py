"""`pagetable replay` as a person and as a program use it: JSON, the table, and what is refused."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pagetable.cli import cli
from pagetable.memory import EVICTION_POLICIES
from pagetable.replay.blocks import Workload
from pagetable.replay.cost import DEFAULT_COST, CostModel
from pagetable.replay.readers import Trace
from pagetable.replay.replay import replay_cache
from pagetable.replay.trace import TraceError
from tests.replay.small_traces import mooncake, random_paths, tokens, write_trace

FREE = CostModel(step=0.0, prefill_token=0.0, prefill_context=0.0, decode=0.0, decode_context=0.0)
TRACE_KEYS = {
    *("path", "format", "block_size", "requests", "sessions", "seconds", "prompt_tokens", "output_tokens", "accesses"),
    *("unique_blocks", "infinite_block_hit_rate", "infinite_token_hit_rate", "until_s", "sample", "seed"),
    *("skipped_lines", "out_of_order", "inconsistent_lengths"),
}
RATES = ("block_hit_rate", "token_hit_rate", "min_block_hit_rate", "share_of_min", "capacity_share")
ROW_KEYS = {"policy", "capacity_blocks", *RATES, "prefill_amplification", "evictions", "seconds"}
LATENCIES = ("queue_s", "ttft_s", "tpot_s", "itl_s", "e2e_s")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """80 requests of hashes over 60 seconds or so, with sessions."""
    rng = random.Random(1)
    paths = random_paths(rng, 120, 80, longest=8)
    records = (mooncake(i * 0.8, *path, block_size=512, session_id=i % 20) for i, path in enumerate(paths))
    return str(write_trace(tmp_path / "trace.jsonl", records))


def replay(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["replay", *map(str, arguments)])


def as_json(*arguments: object) -> dict[str, Any]:
    """What is on stdout: one JSON object, and no more."""
    result = replay(*arguments, "--json")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\n") == 1
    found = json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert isinstance(found, dict)
    return found


def as_text(*arguments: object) -> str:
    result = replay(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(*arguments: object) -> str:
    """The one line that says what is wrong; nothing is on stdout."""
    result = replay(*arguments)
    assert result.exit_code != 0
    assert result.stdout == ""
    if isinstance(result.exception, SystemExit):  # said by click
        line = result.stderr.splitlines()[-1]
        assert line.startswith("Error: ")
        assert sum(line.startswith("Error: ") for line in result.stderr.splitlines()) == 1
        return line
    assert isinstance(result.exception, ValueError | OSError), repr(result.exception)  # main() makes a line of these
    assert "\n" not in str(result.exception)
    return str(result.exception)


def lines_of(table: str, policy: str) -> list[str]:
    return [line for line in table.splitlines() if f"  {policy} " in line]


# ---------------------------------------------------------------- for machines


def test_json_tells_of_the_trace_and_of_each_policy_at_each_capacity(trace: str) -> None:
    result = as_json(trace, "--policy", "lru,arc", "--capacity", "5%,20,100%")
    facts, rows = result["trace"], result["rows"]
    assert facts.keys() >= TRACE_KEYS
    assert (facts["requests"], facts["block_size"], facts["format"]) == (80, 512, "mooncake")
    assert (facts["path"], facts["sessions"]) == (trace, 20)
    assert 0 < facts["infinite_block_hit_rate"] < 1
    assert 0 < facts["infinite_token_hit_rate"] < 1
    blocks = facts["unique_blocks"]
    assert facts["accesses"] - blocks == round(facts["infinite_block_hit_rate"] * facts["accesses"])
    expected = [(policy, size) for size in (round(blocks * 0.05), 20, blocks) for policy in ("lru", "arc")]
    assert [(row["policy"], row["capacity_blocks"]) for row in rows] == expected
    for row in rows:
        assert row.keys() >= ROW_KEYS
        assert all(0 <= row[name] <= 1 for name in RATES)
        assert row["block_hit_rate"] <= row["min_block_hit_rate"] <= facts["infinite_block_hit_rate"]
        assert row["prefill_amplification"] >= 1
        assert row["seconds"] >= 0
    for row in rows[-2:]:
        assert row["block_hit_rate"] == facts["infinite_block_hit_rate"]
        assert (row["evictions"], row["share_of_min"], row["prefill_amplification"]) == (0, 1, 1)


def test_json_in_time_has_latencies_as_well(trace: str, tmp_path: Path) -> None:
    cost = CostModel(step=0.1, prefill_token=1e-5, prefill_context=0.0, decode=1e-3, decode_context=0.0)
    cost.save(tmp_path / "cost.json")
    result = as_json(
        trace, "--timed", "--cost-model", tmp_path / "cost.json", "--capacity", "30%", "--policy", "lru,s3-fifo",
        "--speed", "4", "--max-num-seqs", "3", "--max-num-batched-tokens", "700",
    )  # fmt: skip
    assert result["mode"] == "timed"
    assert CostModel(**result["cost_model"]) == cost
    limits = {"speed": 4.0, "max_num_seqs": 3, "max_num_batched_tokens": 700}
    assert result["limits"].items() >= limits.items()
    for row in result["rows"]:
        assert row.keys() >= {*ROW_KEYS, *LATENCIES, "preemptions", "recomputed_tokens", "waste", "misses", "clock_s"}
        assert all(0 <= row[name] <= 1 for name in (*RATES, "waste"))
        assert 0 < row["ttft_s"]["p50"] <= row["ttft_s"]["p90"] <= row["ttft_s"]["p99"]
        assert row["busy_s"] <= row["clock_s"]


def test_in_time_without_a_cost_model_one_stands_in_and_is_named(trace: str) -> None:
    assert CostModel(**as_json(trace, "--timed", "--capacity", "10%")["cost_model"]) == DEFAULT_COST
    assert DEFAULT_COST.about["model"] in as_text(trace, "--timed", "--capacity", "10%")


def test_speed_brings_requests_closer_together(trace: str) -> None:
    slow, fast = (as_json(trace, "--timed", "--capacity", "50%", "--speed", speed)["rows"][0] for speed in (0.01, 100))
    assert slow["clock_s"] > 10 * fast["clock_s"]
    assert slow["queue_s"]["p99"] < fast["queue_s"]["p99"]


def test_json_says_which_part_of_the_trace_it_was(trace: str) -> None:
    whole = as_json(trace, "--capacity", "10")["trace"]
    assert (whole["until_s"], whole["sample"], whole["seed"]) == (None, 1, 0)
    part = as_json(trace, "--capacity", "10", "--until", "16", "--sample", "0.5", "--seed", "3")["trace"]
    assert (part["until_s"], part["sample"], part["seed"]) == (16, 0.5, 3)
    assert 0 < part["requests"] < 21
    assert part["seconds"] <= 16
    assert as_json(trace, "--capacity", "10", "--until", "16")["trace"]["requests"] == 21
    others = {as_json(trace, "--capacity", "10", "--sample", "0.5", "--seed", n)["trace"]["requests"] for n in range(6)}
    assert all(count % 4 == 0 and count < 80 for count in others)  # sessions are kept whole: there are 4 requests each
    assert len(others) > 1


def test_bytes_are_told_where_a_token_has_some(trace: str) -> None:
    none = as_json(trace, "--capacity", "10")
    assert (none["rows"][0]["capacity_bytes"], none["memory"]["bytes"]) == (None, None)
    some = as_json(trace, "--capacity", "10", "--bytes-per-token", "1000")
    assert some["rows"][0]["capacity_bytes"] == 10 * 512 * 1000
    assert some["memory"]["bytes"] == some["memory"]["blocks"] * 512 * 1000
    model = as_json(trace, "--capacity", "1GB", "--model", "smollm2")
    assert model["rows"][0]["capacity_blocks"] == 10**9 // (512 * 23_040)
    model = as_json(trace, "--capacity", "1GB", "--model", "smollm2", "--kv-cache-dtype", "float32")
    assert model["rows"][0]["capacity_blocks"] == 10**9 // (512 * 46_080)


def test_the_same_options_give_the_same_json_but_for_the_seconds_it_took(trace: str) -> None:
    options = (trace, "--policy", "all", "--capacity", "5%,20%")
    first, second = (as_json(*options) for _ in range(2))
    for row in (*first["rows"], *second["rows"]):
        del row["seconds"]
    assert first == second


def test_json_is_all_there_is_on_stdout_even_with_a_report(trace: str, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    as_json(trace, "--capacity", "10", "--report", tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size > 1000


# ---------------------------------------------------------------- for people


def test_the_table_names_every_policy_and_capacity(trace: str) -> None:
    result = as_json(trace, "--policy", "all", "--capacity", "5%,31")
    table = as_text(trace, "--policy", "all", "--capacity", "5%,31")
    assert [row["policy"] for row in result["rows"]] == 2 * list(EVICTION_POLICIES)
    for policy in EVICTION_POLICIES:
        rows = [row for row in result["rows"] if row["policy"] == policy]
        assert len(lines_of(table, policy)) == len(rows) == 2
        for line, row in zip(lines_of(table, policy), rows, strict=True):
            assert line.split()[:3] == [f"{row['capacity_share']:.2%}", str(row["capacity_blocks"]), policy]
            assert f"{row['block_hit_rate']:.2%}" in line
            assert f"{row['min_block_hit_rate']:.2%}" in line
    assert f"{result['trace']['infinite_block_hit_rate']:.2%}" in table
    assert "80 requests of 20 sessions" in table


def test_so_does_the_table_of_a_replay_in_time(trace: str) -> None:
    table = as_text(trace, "--timed", "--policy", "lru,2q", "--capacity", "20%,100%")
    assert "TTFT" in table
    assert [len(lines_of(table, policy)) for policy in ("lru", "2q", "arc")] == [2, 2, 0]


def test_the_table_says_which_part_of_the_trace_it_was(trace: str) -> None:
    assert "seed" not in as_text(trace, "--capacity", "10")
    part = as_text(trace, "--capacity", "10", "--sample", "0.5", "--seed", "3", "--until", "30")
    assert "0.5 of the sessions, seed 3, the first 30 s" in part


def test_the_table_says_how_many_requests_were_refused(trace: str) -> None:
    refused = as_json(trace, "--capacity", "2")["rows"][0]["refused_requests"]
    assert refused > 0
    assert f"{refused} requests need more blocks than there are" in as_text(trace, "--capacity", "2")


# ---------------------------------------------------------------- small traces


def test_a_trace_of_one_block(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [mooncake(i, 1) for i in range(4)])
    for capacity in ("1", "100%", "50"):
        result = as_json(path, "--capacity", capacity, "--policy", "all")
        assert (result["trace"]["unique_blocks"], result["trace"]["infinite_block_hit_rate"]) == (1, 0.75)
        assert all(row["block_hit_rate"] == row["min_block_hit_rate"] == 0.75 for row in result["rows"])
        assert all(row["share_of_min"] == row["prefill_amplification"] == 1 for row in result["rows"])
    assert "75.00%" in as_text(path, "--capacity", "1")
    assert as_json(path, "--capacity", "1", "--timed")["rows"][0]["block_hit_rate"] == 0


def test_a_trace_of_one_request(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [mooncake(7, 1, 2, 3)])
    for mode in ((), ("--timed",)):
        result = as_json(path, "--capacity", "4,100%", *mode)
        assert (result["trace"]["requests"], result["trace"]["seconds"]) == (1, 0)
        assert [row["block_hit_rate"] for row in result["rows"]] == [0, 0]
        assert [row["share_of_min"] for row in result["rows"]] == [None, None]  # of nothing
        assert len(lines_of(as_text(path, "--capacity", "4", *mode), "lru")) == 1


def test_a_trace_of_one_request_of_one_token(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [tokens(0, [5])])
    for mode in ((), ("--timed",)):
        assert as_json(path, "--capacity", "2", "--block-size", "1", *mode)["trace"]["prompt_tokens"] == 1
    assert "no request of it fills a block of 16 tokens" in refusal(path, "--capacity", "2")


def test_a_trace_without_time(tmp_path: Path) -> None:
    records = [mooncake(0, *path) for path in random_paths(random.Random(2), 20, 30, longest=5)]
    path = write_trace(tmp_path / "trace.jsonl", records)
    for mode in ((), ("--timed",)):
        result = as_json(path, "--capacity", "50%,100%", *mode)
        assert (result["trace"]["requests"], result["trace"]["seconds"]) == (30, 0)
        assert all(0 <= row[name] <= 1 for row in result["rows"] for name in RATES)
        as_text(path, "--capacity", "50%", *mode)


def test_the_usual_capacities_do_for_a_small_trace(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [mooncake(i, 1, i + 2) for i in range(10)])
    assert {row["capacity_blocks"] for row in as_json(path)["rows"]} == {1, 2}


def test_steps_that_cost_nothing_take_no_time(trace: str, tmp_path: Path) -> None:
    FREE.save(tmp_path / "free.json")
    options = (trace, "--timed", "--cost-model", tmp_path / "free.json", "--capacity", "50%")
    (row,) = as_json(*options)["rows"]
    assert (row["busy_s"], row["waste"], row["ttft_s"]["p99"]) == (0, 0, 0)
    as_text(*options)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--policy", "fifo"), "'fifo'"),
        (("--policy", "lru,,LRU"), "'LRU'"),
        (("--policy", ","), "choose among lru"),
        (("--capacity", ","), "no capacity is given"),
        (("--capacity", "lots"), "'lots'"),
        (("--capacity", "5%,-1"), "'-1'"),
        (("--capacity", "0"), "'0' means 0 blocks"),
        (("--capacity", "4GiB"), "--bytes-per-token"),
        (("--bytes-per-token", "0"), "--bytes-per-token"),
        (("--model", "nowhere"), "nowhere"),
        (("--kv-cache-dtype", "fp8"), "--kv-cache-dtype"),
        (("--kv-cache-dtype", "bfloat16"), "--kv-cache-dtype"),
        (("--kv-cache-dtype", "bfloat16", "--bytes-per-token", "9"), "--kv-cache-dtype"),
        (("--kv-cache-dtype", "int3", "--model", "smollm2"), "int3"),
        (("--speed", "2"), "--speed"),
        (("--speed", "1"), "--speed"),
        (("--max-num-seqs", "128"), "--max-num-seqs"),
        (("--max-num-batched-tokens", "2048"), "--max-num-batched-tokens"),
        (("--timed", "--speed", "0"), "--speed"),
        (("--timed", "--speed", "-1"), "--speed"),
        (("--timed", "--speed", "nan"), "--speed"),
        (("--timed", "--speed", "inf"), "--speed"),
        (("--timed", "--max-num-seqs", "0"), "--max-num-seqs"),
        (("--timed", "--check"), "--check"),
        (("--timed", "--cost-model", "nowhere.json"), "nowhere.json"),
        (("--timed", "--block-size", "1536"), "block_size=1536"),
        (("--block-size", "500"), "block_size=500"),
        (("--until", "-1"), "--until"),
        (("--sample", "0"), "--sample"),
        (("--sample", "1.5"), "--sample"),
        (("--sample", "1e-9"), "trace.jsonl"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_a_mistake_is_named_in_one_line(arguments: tuple[str, ...], says: str, trace: str) -> None:
    assert says in refusal(trace, *arguments)


def test_what_costs_is_for_replays_in_time(trace: str, tmp_path: Path) -> None:
    FREE.save(tmp_path / "cost.json")
    said = refusal(trace, "--cost-model", tmp_path / "cost.json")
    assert "--cost-model" in said
    assert "--timed" in said


def test_what_is_no_cost_model_is_named(trace: str, tmp_path: Path) -> None:
    (tmp_path / "cost.json").write_text('{"version": 1, "step": -1}')
    assert "cost.json: step=-1" in refusal(trace, "--timed", "--cost-model", tmp_path / "cost.json")
    assert "is no cost model" in refusal(trace, "--timed", "--cost-model", trace)
    assert "directory" in refusal(trace, "--timed", "--cost-model", tmp_path)


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "nowhere.jsonl" in refusal(tmp_path / "nowhere.jsonl")


def test_a_bad_line_is_named_or_left_out(trace: str) -> None:
    with Path(trace).open("a") as file:
        file.write("half a rec")
    assert "trace.jsonl, line 81" in refusal(trace)
    assert as_json(trace, "--capacity", "10", "--skip-bad")["trace"]["skipped_lines"] == 1
    assert "skipped" in as_text(trace, "--capacity", "10", "--skip-bad")


def test_a_mistake_ends_in_one_line_and_no_traceback(trace: str) -> None:
    command = [sys.executable, "-m", "pagetable", "replay", trace, "--capacity", "lots"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    assert run.stdout == ""
    assert len(run.stderr.splitlines()) == 1
    assert "'lots'" in run.stderr


# ---------------------------------------------------------------- what it takes


def test_no_replay_imports_torch(trace: str, tmp_path: Path) -> None:
    code = (
        "import sys; from pagetable.cli import cli\n"
        "for more in ([], ['--timed'], ['--model', 'smollm2', '--policy', 'all'], ['--check']):\n"
        f"    cli(['replay', {trace!r}, '--capacity', '10', *more], standalone_mode=False)\n"
        "found = {'torch', 'transformers', 'numba', 'fastapi', 'llama_cpp'} & {n.split('.')[0] for n in sys.modules}\n"
        "assert not found, found\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


# ---------------------------------------------------------------- what went wrong once


def test_a_report_does_not_overwrite_its_trace(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [mooncake(0, 1, 2)])
    before = path.read_bytes()
    result = CliRunner().invoke(cli, ["replay", str(path), "--capacity", "2", "--report", str(path)])
    assert result.exit_code != 0
    assert "is the trace itself" in result.output
    assert path.read_bytes() == before


def test_a_trace_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [mooncake(i, i, i + 1) for i in range(50)])
    workload, grown = Workload(Trace(path)), []

    def progress(what: str, count: int) -> None:
        if what == "replaying" and not grown:
            grown.append(path.write_text(path.read_text() + json.dumps(mooncake(99, 1)) + "\n"))

    with pytest.raises(TraceError, match="has changed while it was read"):
        replay_cache(workload, ["lru"], ["50%"], progress=progress)


def test_far_more_blocks_than_the_trace_fills_cost_nothing(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [mooncake(0, 1, 2), mooncake(1, 1, 2)])
    tracemalloc.start()
    try:
        (row,) = replay_cache(Workload(Trace(path)), ["lru"], ["100000000"])["rows"]
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
    assert (row["capacity_blocks"], row["block_hit_rate"]) == (100_000_000, 0.5)


def test_the_result_is_told_before_the_report_is_written(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [mooncake(0, 1, 2)])
    result = CliRunner().invoke(cli, ["replay", str(path), "--capacity", "2", "--json", "--report", "/dev/full"])
    assert result.exit_code != 0
    assert json.loads(result.stdout)["trace"]["requests"] == 1
