"""The page of a replay: whole in itself, true to the result, and harmless whatever a trace is called."""

import base64
import hashlib
import html
import json
import re
import sys
from pathlib import Path

import pytest

from pagetable.memory import EVICTION_POLICIES
from pagetable.replay.blocks import Workload
from pagetable.replay.cost import CostModel
from pagetable.replay.readers import Trace
from pagetable.replay.replay import replay_cache, replay_timed
from pagetable.replay.report import report_html, write_report
from pagetable.replay.report_figures import bytes_for_people, share_for_people
from pagetable.replay.report_page import COLOURS
from pagetable.replay.timed_replay import Limits
from pagetable.replay.trace import TraceError

HOSTILE = "</script><script>alert(1)</script>.jsonl"


def a_row(policy: str, blocks: int, rate: float, **more: object) -> dict:
    misses = {"never_seen": 500, "evicted": 460 - int(1000 * rate), "partial_tail": 40}
    return {
        "policy": policy,
        "capacity_blocks": blocks,
        "capacity_share": blocks / 400,
        "capacity_bytes": None,
        "block_hit_rate": rate,
        "token_hit_rate": rate + 0.011,
        "min_block_hit_rate": 0.4444,
        "share_of_min": rate / 0.4444,
        "prefill_amplification": 1.23,
        "evictions": 98_765,
        "misses": misses,
        "refused_requests": 0,
        "block_lifetime_s": {"p10": 1.0, "p50": 12.0, "p90": 7200.0},
        "seconds": 3.21,
        **more,
    }


def a_result(rows: list[dict], **trace: object) -> dict:
    return {
        "mode": "cache",
        "trace": {
            "path": "traces/monday.jsonl",
            "format": "mooncake",
            "block_size": 16,
            "requests": 1234,
            "sessions": 77,
            "seconds": 600.0,
            "prompt_tokens": 16_000,
            "output_tokens": 2_000,
            "accesses": 1000,
            "unique_blocks": 400,
            "infinite_block_hit_rate": 0.46,
            "infinite_token_hit_rate": 0.471,
            "waste": 0.025,
            "skipped_lines": 0,
            "out_of_order": 0,
            "inconsistent_lengths": 0,
            **trace,
        },
        "memory": {"goal": 0.9, "block_hit_rate": 0.42, "blocks": 123, "tokens": 1968, "share": 0.3075, "bytes": None},
        "rows": rows,
        "curve": [
            {"capacity_blocks": size, "capacity_share": size / 400, "lru": size / 1000, "min": min(0.46, size / 500)}
            for size in (1, 20, 400)
        ],
        "reuse": {
            "distance_blocks": {"edges": [0, 1, 2, 20, 400], "counts": [100, 0, 60, 300]},
            "interval_s": {"edges": [0.0, 0.1, 1.0, 600.6], "counts": [0, 160, 300]},
        },
        "over_time": {
            "edges_s": [0.0, 200.0, 400.0, 600.0],
            "infinite": [0.1, None, 0.5],
            "rows": [[0.05, None, 0.4] for _ in rows],
        },
    }


def without_plotly(page: str) -> str:
    """All of a page but the source of plotly.js, which is full of addresses that it never asks for here."""
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert [len(script) > 1_000_000 for script in scripts] == [True, False]
    return page.replace(scripts[0], "")


def figures_of(page: str) -> dict:
    (text,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)["figures"]


def cells_of(page: str) -> list[list[str]]:
    """The texts of all lines of all tables."""
    lines = re.findall(r"<tr[^>]*>(.*?)</tr>", page, re.DOTALL)
    cells = [re.findall(r"<td>(.*?)</td>", line, re.DOTALL) for line in lines]
    return [[html.unescape(re.sub(r"<[^>]*>", "", cell)).replace("\u00a0", " ") for cell in line] for line in cells]


@pytest.fixture(scope="module")
def page() -> str:
    rows = [a_row("lru", 20, 0.2), a_row("arc", 20, 0.25), a_row("lru", 40, 0.4), a_row("arc", 40, 0.3)]
    return report_html(a_result(rows))


def test_a_page_fetches_nothing(page: str):
    own = without_plotly(page)
    assert "http:" not in own
    assert "https:" not in own
    assert not re.search(r"<(link|img|iframe|object|embed|base)\b|\bsrc\s*=|\bhref\s*=|@import|url\(|\bfetch\(", own)
    assert "import(" not in own
    assert "default-src 'none'" in own  # the browser sees to it for plotly.js


def test_a_browser_runs_the_two_scripts_of_a_page_and_no_others(page: str):
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    allowed = re.findall(r"'sha256-([^']+)'", policy)
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert allowed == [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert not re.search(r"script-src[^;]*'unsafe", policy)


def test_a_page_says_how_much_memory_is_needed(page: str):
    (answer,) = re.findall(r'<p class="answer">(.*?)</p>', page, re.DOTALL)
    for fact in ("90\u00a0% of what is possible takes 123 blocks", "30.8\u00a0%", "1,968 tokens", "46.0\u00a0%"):
        assert fact in answer
    assert "iB" not in answer


def test_a_page_has_the_figures_of_each_row(page: str):
    line = ["arc", "10 %", "40", "30.0 %", "31.1 %", "44.4 %", "67.5 %", "1.23 ×", "98,765", "12 s 1 s – 2 h", "3.2 s"]
    assert line in cells_of(page)
    assert ["arc", "10 %", "40", "", "30.0 %", "16.0 %", "4.0 %", "50.0 %"] in cells_of(page)
    for best in ("25.0", "40.0"):
        assert f"<b>{best}\u00a0%</b>" in page
    for figure in ("1,234", "77", "16,000", "2,000", "10 min", "2.5\u00a0%"):
        assert f"<dd>{figure}</dd>" in page


def test_the_charts_have_what_was_measured(page: str):
    figures = figures_of(page)
    lines = {trace["name"]: trace for trace in figures["hit-rate"]["traces"]}
    assert (lines["arc"]["x"], lines["arc"]["y"]) == ([20, 40], [0.25, 0.3])
    assert lines["best possible (MIN)"]["y"] == [1 / 500, 20 / 500, 0.46]
    assert "40 blocks<br>10\u00a0% of all distinct ones<br>640 tokens" in lines["arc"]["hovertext"][1]
    over_time = figures["over-time"]["traces"]
    assert [trace["y"] for trace in over_time] == [[0.1, None, 0.5]] + [[0.05, None, 0.4]] * 4
    assert [trace["meta"]["capacity"] for trace in over_time[1:]] == ["0", "0", "1", "1"]
    assert figures["distance"]["traces"][0]["y"] == [100, 0, 60, 300]
    assert figures["interval"]["traces"][0]["y"] == [0, 160, 300]


def test_a_policy_has_one_colour_and_a_capacity_one_dash(page: str):
    figures = figures_of(page)
    drawn = [trace for name in ("hit-rate", "over-time") for trace in figures[name]["traces"] if "meta" in trace]
    colours = {(trace["meta"]["policy"], trace["line"]["color"]) for trace in drawn}
    assert len(colours) == 2
    dashes = {(trace["meta"]["capacity"], trace["line"]["dash"]) for trace in figures["over-time"]["traces"][1:]}
    assert len(dashes) == len({dash for _, dash in dashes}) == 2
    assert {colour for _, colour in colours} <= set(COLOURS)


def test_every_policy_has_a_colour_of_its_own():
    page = report_html(a_result([a_row(policy, 20, 0.2) for policy in EVICTION_POLICIES]))
    traces = [trace for trace in figures_of(page)["hit-rate"]["traces"] if "meta" in trace]
    assert len({trace["line"]["color"] for trace in traces}) == len(EVICTION_POLICIES)
    assert len({trace["marker"]["symbol"] for trace in traces}) == len(EVICTION_POLICIES)


def test_a_hostile_name_does_nothing():
    page = report_html(a_result([a_row(HOSTILE, 20, 0.2)], path=f"/data/{HOSTILE}", format=HOSTILE))
    own = without_plotly(page)
    assert own.count("<script") == own.count("</script") == 3
    assert not re.search(r"<script>\s*alert", own)
    assert f"<td>{HOSTILE}" not in own
    assert html.escape(f"/data/{HOSTILE}") in own
    assert figures_of(page)["over-time"]["traces"][1]["meta"]["policy"] == HOSTILE
    assert "alert(1)&lt;/script&gt;" in figures_of(page)["hit-rate"]["traces"][-1]["name"]  # plotly reads some HTML


def test_a_name_that_is_no_text_is_written(tmp_path: Path):
    write_report(a_result([a_row("lru", 20, 0.2)], path="traces/\udcff$name.jsonl"), tmp_path / "report.html")
    assert "<title>?$name.jsonl: KV cache replay</title>" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_without_plotly_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(TraceError, match=r"--report needs plotly: pip install 'pagetable\[replay\]'"):
        write_report(a_result([a_row("lru", 20, 0.2)]), tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


def test_bytes_are_shown_when_they_are_known():
    result = a_result([a_row("lru", 20, 0.2, capacity_bytes=20 << 30)])
    result["memory"]["bytes"] = 123 << 30
    page = report_html(result)
    assert "<b>123\u00a0GiB</b>" in page
    assert cells_of(page)[-1][:5] == ["lru", "5 %", "20", "20 GiB", "20.0 %"]
    assert "<dd>400\u00a0GiB</dd>" in page  # all distinct blocks
    assert "20\u00a0GiB" in figures_of(page)["hit-rate"]["traces"][-1]["hovertext"][0]


def test_what_was_never_evicted_has_no_lifetime_and_what_was_refused_is_told():
    page = report_html(a_result([a_row("lru", 20, 0.2, block_lifetime_s=None, refused_requests=17)], skipped_lines=8))
    assert cells_of(page)[-1][-3:] == ["–", "3.2 s", "17"]
    assert "<dt>lines skipped</dt><dd>8</dd>" in page
    assert "requests out of order" not in page


def test_a_trace_without_any_reuse():
    result = a_result([a_row("lru", 800, 0.0)], infinite_block_hit_rate=0.0, infinite_token_hit_rate=0.0, seconds=0.0)
    result["memory"] |= {"blocks": 0, "tokens": 0, "share": 0.0, "block_hit_rate": 0.0}
    result["over_time"] = {"edges_s": [0.0, 0.001], "infinite": [None], "rows": [[None]]}
    page = report_html(result)
    assert "No block of this trace is used twice" in page
    assert cells_of(page)[-1][1] == "200 %"


def test_a_replay_in_time_has_latencies():
    times = {f"{name}_s": {"p50": 0.25, "p90": 1.0, "p99": 3.5} for name in ("queue", "ttft", "tpot", "itl")}
    rows = [
        a_row("lru", 20, 0.2, **times, e2e_s=None, preemptions=4321, output_tokens=9000, clock_s=100.0),
        a_row("arc", 20, 0.2, **times, e2e_s=None, preemptions=0, output_tokens=0, clock_s=0.0),
    ]
    for row, misses in zip(rows, ({"in_flight": 30, "evicted": 70}, {}), strict=True):
        row["misses"] = misses  # admissions
        del row["block_lifetime_s"]
    limits = {"speed": 2.0, "max_num_seqs": 128, "max_num_batched_tokens": 2048}
    page = report_html(a_result(rows) | {"mode": "timed", "limits": limits})
    assert ["lru", "5 %", "20", "", "70.0 %", "30.0 %"] in cells_of(page)
    assert ["arc", "5 %", "20", "", "0.0 %", "0.0 %"] in cells_of(page)
    time = "250 ms 3.5 s"
    assert cells_of(page)[-2][6:] == ["98,765", time, time, time, "–", "4,321", "90", "3.2 s"]
    assert "in time at speed 2, at most 128 requests" in page


@pytest.mark.parametrize("num_capacities", [1, 9])
def test_one_capacity_is_shown_at_first(num_capacities: int):
    page = report_html(a_result([a_row("lru", 10 + number, 0.2) for number in range(num_capacities)]))
    boxes = re.findall(r'<input type="checkbox" name="capacity" value="(\d+)"( checked)?>', page)
    assert [int(value) for value, checked in boxes if checked] == [num_capacities // 2]
    assert len(boxes) == num_capacities


@pytest.mark.parametrize("mode", ["cache", "timed"])
def test_a_real_replay(tmp_path: Path, mode: str):
    """What `replay_cache` and `replay_timed` give is what the page wants."""
    trace = tmp_path / "trace.jsonl"
    lines = (
        {"timestamp": 1000 * n, "input_length": 1500, "output_length": 10, "hash_ids": [0, n % 3 + 1, n % 7 + 10]}
        for n in range(40)
    )
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = (Workload(Trace(trace)), ["lru", "arc"], ["4", "50%"])
    if mode == "cache":
        result = replay_cache(*asked, block_bytes=1 << 20)
    else:
        cost = CostModel(0.01, 0.0001, 0.0, 0.001, 0.0, about={"model": HOSTILE})
        result = replay_timed(*asked, cost, Limits(), block_bytes=1 << 20)
    write_report(result, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<title>trace.jsonl: KV cache replay</title>" in page
    assert [line[0] for line in cells_of(page) if line] == ["lru", "arc"] * 4
    assert sum(figures_of(page)["distance"]["traces"][0]["y"]) == sum(result["reuse"]["distance_blocks"]["counts"])


def test_numbers_for_people():
    assert [share_for_people(share) for share in (0.000996, 0.05, 0.172, 1.0, 12.5)] == [
        f"{text}\u00a0%" for text in ("0.0996", "5", "17.2", "100", "1,250")
    ]
    assert [bytes_for_people(size) for size in (512, 1.5 * 2**30, 345.4 * 2**30, 1023.9 * 2**20)] == [
        f"{text}" for text in ("512\u00a0B", "1.5\u00a0GiB", "345\u00a0GiB", "1024\u00a0MiB")
    ]
