"""The figures of a trace against hand-made ones, against a plain count, and against those published."""

import json
import math
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from click.testing import CliRunner

from pagetable.replay.blocks import Workload
from pagetable.replay.readers import Trace
from pagetable.replay.stats import describe_stats, trace_stats
from pagetable.replay.synth import TraceShape, synthesize
from pagetable.replay.trace import TraceError
from pagetable.replay.trace_command import trace

SHAPE = TraceShape(
    sessions=25,
    agents=0.3,
    agent_turns=6,
    fan_out=0.3,
    prefixes=4,
    prefix_tokens=100,
    new_tokens=60,
    output_tokens=40,
    max_length=2000,
    block_size=32,
)


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def stats_of(path, block_size=None, **options):
    return trace_stats(Workload(Trace(path), block_size, **options))


def request(timestamp, input_length, hash_ids, session=0, output_length=1):
    lengths = {"input_length": input_length, "output_length": output_length}
    return {"timestamp": timestamp, **lengths, "hash_ids": hash_ids, "session_id": session, "block_size": 10}


# -------------------------------------------------------------------- a plain count


def percentile(values, percent):
    ordered = sorted(values)
    return ordered[math.ceil(percent * len(ordered) / 100) - 1]


def summary(values):
    percentiles = {f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)}
    return {"total": sum(values), "mean": sum(values) / len(values), **percentiles, "max": max(values)}


def plain_reuse(records):
    """(LRU distance, seconds since the last use) of each access that an infinite cache hits: a list moved to front."""
    recent, used, found = [], {}, []
    for record in records:
        path = record["hash_ids"]
        found += [
            (recent.index(block) + 1, record["timestamp"] / 1000 - used[block]) for block in path if block in used
        ]
        recent = path + [block for block in recent if block not in set(path)]  # the head of a path is used last
        used |= dict.fromkeys(path, record["timestamp"] / 1000)
    return found


def plain_stats(records, block_size):
    accesses = [block for record in records for block in record["hash_ids"]]
    sessions, seen, hit_tokens = defaultdict(set), set(), 0
    for record in records:
        hits = sum(block in seen for block in record["hash_ids"])
        hit_tokens += min(hits * block_size, record["input_length"])
        seen.update(record["hash_ids"])
        for block in record["hash_ids"]:
            sessions[block].add(record["session_id"])
    reuse = plain_reuse(records)
    shared = {block for block in sessions if len(sessions[block]) > 1}
    seconds = (records[-1]["timestamp"] - records[0]["timestamp"]) / 1000
    prompts = [record["input_length"] for record in records]
    longest = max(len(record["hash_ids"]) for record in records)
    return {
        "requests": len(records),
        "seconds": pytest.approx(seconds),
        "requests_per_second": pytest.approx(len(records) / seconds),
        "sessions": len({record["session_id"] for record in records}),
        "turns": summary(list(Counter(record["session_id"] for record in records).values())),
        "prompt_tokens": summary(prompts),
        "output_tokens": summary([record["output_length"] for record in records]),
        "block_size": block_size,
        "accesses": len(accesses),
        "unique_blocks": len(set(accesses)),
        "infinite_block_hit_rate": len(reuse) / len(accesses),
        "infinite_token_hit_rate": hit_tokens / sum(prompts),
        "shared_blocks": len(shared),
        "shared_access_share": sum(block in shared for block in accesses) / len(accesses),
        "reuse_seconds": {
            f"p{p}": pytest.approx(percentile([since for _, since in reuse], p), abs=1e-6) for p in (50, 90, 99)
        },
        "lru_blocks": {  # no fewer than the longest prompt needs
            f"{p}%": max(longest, percentile([distance for distance, _ in reuse], p)) for p in (50, 90, 99)
        },
        "skipped_lines": 0,
        "out_of_order": 0,
        "inconsistent_lengths": 0,
    }


# -------------------------------------------------------------------- the figures


@pytest.mark.parametrize("seed", range(3))
def test_figures_are_those_of_a_plain_count(tmp_path, seed):
    records = list(synthesize(SHAPE, seed))
    stats = stats_of(write(tmp_path / "trace.jsonl", records))
    assert stats["infinite_block_hit_rate"] > 0.5
    assert stats == {"path": str(tmp_path / "trace.jsonl"), "format": "mooncake", **plain_stats(records, 32)}


def test_figures_of_a_trace_by_hand(tmp_path):
    records = [
        request(1000, 25, [0, 1, 2], "a", output_length=4),  # three misses
        request(2000, 20, [0, 3], "b"),  # hits 0, which two sessions have from here on
        request(5000, 30, [0, 1, 4], "a"),  # hits 0 and 1
        request(9000, 30, [0, 1, 4], "a"),  # hits all of it
    ]
    stats = stats_of(write(tmp_path / "trace.jsonl", records))
    assert stats["seconds"] == 8.0
    assert stats["requests_per_second"] == 0.5
    assert (stats["requests"], stats["sessions"], stats["turns"]["max"]) == (4, 2, 3)
    assert stats["prompt_tokens"] == {"total": 105, "mean": 26.25, "p50": 25, "p90": 30, "p99": 30, "max": 30}
    assert stats["output_tokens"] == {"total": 7, "mean": 1.75, "p50": 1, "p90": 4, "p99": 4, "max": 4}
    assert (stats["accesses"], stats["unique_blocks"]) == (11, 5)
    assert stats["infinite_block_hit_rate"] == 6 / 11
    assert stats["infinite_token_hit_rate"] == 60 / 105
    assert (stats["shared_blocks"], stats["shared_access_share"]) == (1, 4 / 11)
    assert stats["reuse_seconds"] == {"p50": 4.0, "p90": 4.0, "p99": 4.0}  # 1, 3, 4, 4, 4, 4
    assert stats["lru_blocks"] == {"50%": 3, "90%": 3, "99%": 3}  # distances 1, 1, 3, 1, 2, 3; a prompt of 3


def test_blocks_of_tokens_include_those_of_known_answers(tmp_path):
    records = [
        {"prompt_token_ids": [1, 2, 3, 4, 5], "output_token_ids": [6, 7, 8, 9], "timestamp": 0, "session_id": "x"},
        {"prompt_token_ids": [1, 2, 3, 4, 5, 6, 7, 8, 0], "output_token_ids": [0], "timestamp": 3, "session_id": "y"},
    ]
    stats = stats_of(write(tmp_path / "trace.jsonl", records), 4)
    assert (stats["format"], stats["block_size"]) == ("tokens", 4)
    assert (stats["accesses"], stats["unique_blocks"]) == (3, 2)
    assert stats["infinite_block_hit_rate"] == 2 / 3  # the second block was filled by the answer
    assert stats["infinite_token_hit_rate"] == 8 / 14
    assert (stats["shared_blocks"], stats["shared_access_share"]) == (1, 2 / 3)
    assert stats["reuse_seconds"] == {"p50": 3.0, "p90": 3.0, "p99": 3.0}


def test_both_formats_of_a_trace_have_the_same_requests_and_sessions(tmp_path):
    shape = replace(SHAPE, sessions=20)
    hashed = stats_of(write(tmp_path / "hashes.jsonl", synthesize(shape, 1)))
    plain = stats_of(write(tmp_path / "tokens.jsonl", synthesize(shape, 1, "tokens")), 32)
    for name in ("requests", "sessions", "turns", "prompt_tokens", "output_tokens", "shared_blocks"):
        assert plain[name] == hashed[name]
    assert plain["seconds"] == pytest.approx(hashed["seconds"])
    # What an engine knows of the answer is more than what the next prompts tell.
    assert plain["infinite_token_hit_rate"] >= hashed["infinite_token_hit_rate"] > 0.5


def test_lines_that_cannot_be_read_and_times_that_go_back_are_counted(tmp_path):
    records = [request(5000, 5, [0]), {"timestamp": 1}, request(4000, 5, [0]), request(6000, 5, [0])]
    file = write(tmp_path / "trace.jsonl", records)
    with pytest.raises(TraceError, match="line 2"):
        stats_of(file)
    stats = trace_stats(Workload(Trace(file, skip_bad=True)))
    assert (stats["requests"], stats["skipped_lines"], stats["out_of_order"]) == (3, 1, 1)
    text = describe_stats(stats)
    assert "1 lines cannot be read" in text
    assert "1 requests come before the one they stand behind" in text


def test_an_empty_stretch_has_no_figures_rather_than_wrong_ones(tmp_path):
    file = write(tmp_path / "trace.jsonl", [request(5000, 5, [0])])
    stats = stats_of(file, sample=1e-12)
    assert (stats["requests"], stats["seconds"], stats["prompt_tokens"]["total"]) == (0, 0.0, 0)
    nothing = [stats["requests_per_second"], stats["infinite_block_hit_rate"], stats["prompt_tokens"]["mean"]]
    assert {*nothing, *stats["reuse_seconds"].values(), *stats["lru_blocks"].values()} == {None}
    assert "0 requests of 0 sessions" in describe_stats(stats)
    alone = stats_of(file)
    assert (alone["infinite_block_hit_rate"], alone["requests_per_second"]) == (0.0, None)


# -------------------------------------------------------------------- the command


def run(*arguments):
    return CliRunner().invoke(trace, ["stats", *map(str, arguments)], catch_exceptions=False)


def test_the_command_prints_a_table_or_json(tmp_path):
    file = write(tmp_path / "trace.jsonl", synthesize(SHAPE, 0))
    expected = stats_of(file)
    assert json.loads(run(file, "--json").stdout) == expected
    table = run(file).stdout
    assert table == describe_stats(expected) + "\n"
    lines = {line[:20].strip(): line[20:].split() for line in table.splitlines()}
    tokens = expected["prompt_tokens"]
    figures = [float(cell.replace(",", "")) for cell in lines["prompt tokens"]]
    assert figures == [pytest.approx(tokens[name], abs=0.005) for name in ("total", "mean", "p50", "p90", "p99", "max")]
    assert lines["accesses"][0] == f"{expected['shared_access_share']:.2%}"
    assert lines["infinite hit rate"][0] == f"{expected['infinite_block_hit_rate']:.2%}"
    assert lines["blocks for LRU"] == [f"{blocks:,}" for blocks in expected["lru_blocks"].values()]
    assert max(map(len, table.splitlines()[1:])) <= 120


def test_options_choose_block_size_time_and_sessions(tmp_path):
    file = write(tmp_path / "trace.jsonl", synthesize(SHAPE, 0))
    merged = json.loads(run(file, "--json", "--block-size", 64).stdout)
    assert merged == stats_of(file, 64)
    assert merged["accesses"] < stats_of(file)["accesses"]
    some = json.loads(run(file, "--json", "--until", 30, "--sample", 0.5, "--seed", 3).stdout)
    assert some == stats_of(file, until=30.0, sample=0.5, seed=3)
    assert 0 < some["sessions"] < stats_of(file, until=30.0)["sessions"]


def test_a_text_trace_needs_a_model_and_is_cut_by_its_tokenizer(tmp_path):
    pytest.importorskip("tokenizers")
    from pagetable.checkpoint import open_checkpoint
    from pagetable.text import load_tokenizer, render_chat, resolve_model

    messages = [{"role": "user", "content": "Hi there"}]
    file = write(tmp_path / "trace.jsonl", [{"prompt": "The quick brown fox jumps"}, {"messages": messages}])
    with pytest.raises(TraceError, match="--model"):
        run(file)
    stats = json.loads(run(file, "--json", "--model", "smollm2").stdout)
    tokenizer = load_tokenizer(open_checkpoint(resolve_model("smollm2")))
    chat = tokenizer.encode(render_chat(tokenizer, messages), add_special_tokens=False)
    assert stats["prompt_tokens"]["total"] == len(tokenizer.encode("The quick brown fox jumps")) + len(chat)
    assert stats["prompt_tokens"]["max"] == len(chat)


def test_a_users_mistake_is_named(tmp_path):
    file = write(tmp_path / "trace.jsonl", [request(0, 5, [0])])
    assert "'nothing.jsonl' does not exist" in run("nothing.jsonl").stderr
    assert "Invalid value for '--sample'" in run(file, "--sample", 0).stderr
    with pytest.raises(TraceError, match="only multiples of it are possible"):
        run(file, "--block-size", 16)
