"""Traces made by a seed: what they look like is what was asked for, in either format."""

import gzip
import json
import math
import tracemalloc
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import islice, pairwise
from statistics import mean, median

import numpy as np
import pytest
from click.testing import CliRunner

from pagetable.memory.hints import NO_HINTS
from pagetable.replay.readers import Trace
from pagetable.replay.synth import TraceShape, synthesize
from pagetable.replay.trace import PrefixTree
from pagetable.replay.trace_command import trace

MIX = TraceShape(sessions=150, agents=0.3, block_size=64)
CHATS = TraceShape(sessions=3000, agents=0.0, new_sigma=0.5, output_sigma=0.5, think_sigma=0.5)
SMALL = TraceShape(
    sessions=40, agents=0.5, fan_out=0.5, prefixes=3, prefix_tokens=70, new_tokens=40, output_tokens=30, block_size=16
)
AGENTS = replace(SMALL, agents=1.0, sessions=25, agent_turns=4, sub_agents=3, sub_agent_turns=2)


def by_session(records):
    sessions = defaultdict(list)
    for record in records:
        sessions[record["session_id"]].append(record)
    return sessions


def new_tokens(turns):
    """Of each turn but the first what its prompt adds to the one before and its answer."""
    return [b["input_length"] - a["input_length"] - a["output_length"] for a, b in pairwise(turns)]


# -------------------------------------------------------------------- the records


@pytest.mark.parametrize("format", ["mooncake", "tokens"])
def test_the_same_seed_makes_the_same_trace_and_another_one_another(format):
    records = list(synthesize(SMALL, 7, format))
    assert list(synthesize(SMALL, 7, format)) == records
    assert list(synthesize(SMALL, 8, format)) != records
    assert {record["session_id"] for record in records} == set(range(40))


def test_records_come_in_order_of_time_with_the_fields_of_mooncake():
    records = list(synthesize(MIX, 0))
    assert all(a["timestamp"] <= b["timestamp"] for a, b in pairwise(records))
    fields = ["timestamp", "input_length", "output_length", "hash_ids", "session_id", "turn", "block_size"]
    for record in records:
        assert list(record) == fields
        assert all(type(record[name]) is int for name in fields if name != "hash_ids")
        assert len(record["hash_ids"]) == math.ceil(record["input_length"] / 64)


def test_hashes_are_chained_and_numbered_as_they_appear():
    """A tree of prefixes numbers its nodes as they appear: so each id is the number of its own node."""
    tree = PrefixTree()
    for record in synthesize(MIX, 0):
        assert tree.path(record["hash_ids"]).tolist() == record["hash_ids"]


def test_a_partial_block_has_an_id_of_its_own():
    records = list(synthesize(MIX, 0))
    uses = Counter(hash_id for record in records for hash_id in record["hash_ids"])
    partial = [record["hash_ids"][-1] for record in records if record["input_length"] % 64]
    assert len(partial) > 0.9 * len(records)
    assert {uses[hash_id] for hash_id in partial} == {1}
    assert max(uses.values()) > 40  # while the most popular system prompt is in many


def test_prompts_of_a_chat_grow_as_prefixes_of_each_other():
    for turns in by_session(synthesize(replace(MIX, agents=0.0), 3)).values():
        assert [record["turn"] for record in turns] == list(range(1, len(turns) + 1))
        for before, after in pairwise(turns):
            full = before["input_length"] // 64
            assert after["hash_ids"][:full] == before["hash_ids"][:full]
            assert after["hash_ids"][full:] != before["hash_ids"][full:]
            assert after["input_length"] > before["input_length"] + before["output_length"]


def test_an_answer_is_part_of_the_next_prompt():
    for turns in by_session(synthesize(replace(SMALL, agents=0.0), 3, "tokens")).values():
        for before, after in pairwise(turns):
            known = before["prompt_token_ids"] + before["output_token_ids"]
            assert after["prompt_token_ids"][: len(known)] == known
            assert len(after["prompt_token_ids"]) > len(known)


def test_both_formats_tell_of_the_same_requests():
    """Times and lengths are equal, and two prompts share a block by its id exactly if they do by its tokens."""
    tree, nodes, ids = PrefixTree(), {}, {}
    for hashed, plain in zip(synthesize(SMALL, 5), synthesize(SMALL, 5, "tokens"), strict=True):
        prompt = plain["prompt_token_ids"]
        assert hashed["timestamp"] == round(plain["timestamp"] * 1000)
        assert hashed["session_id"] == plain["session_id"]
        assert (hashed["input_length"], hashed["output_length"]) == (len(prompt), len(plain["output_token_ids"]))
        path = tree.path([tuple(prompt[i : i + 16]) for i in range(0, len(prompt) - 15, 16)]).tolist()
        for node, hash_id in zip(path, hashed["hash_ids"], strict=False):
            assert nodes.setdefault(hash_id, node) == node
            assert ids.setdefault(node, hash_id) == hash_id
    assert len(ids) > 1000


def test_token_ids_are_below_the_vocabulary_and_use_all_of_it():
    seen = set()
    for record in synthesize(replace(SMALL, vocab_size=11), 0, "tokens"):
        seen.update(record["prompt_token_ids"], record["output_token_ids"])
    assert seen == set(range(11))


# -------------------------------------------------------------------- the shape


def test_sessions_arrive_at_their_rate():
    starts = [
        turns[0]["timestamp"] / 1000 for turns in by_session(synthesize(replace(CHATS, session_rate=5), 1)).values()
    ]
    gaps = np.diff(sorted(starts))
    assert mean(gaps) == pytest.approx(1 / 5, rel=0.1)
    assert np.std(gaps) == pytest.approx(1 / 5, rel=0.15)  # of an exponential distribution


def test_lengths_turns_and_pauses_are_those_of_the_shape():
    sessions = by_session(synthesize(CHATS, 1)).values()
    assert mean(map(len, sessions)) == pytest.approx(4, rel=0.1)
    assert sum(len(turns) == 1 for turns in sessions) / 3000 == pytest.approx(1 / 4, rel=0.15)  # geometric
    added = [num_tokens for turns in sessions for num_tokens in new_tokens(turns)]
    added += [turns[0]["input_length"] - 2048 for turns in sessions]
    outputs = [record["output_length"] for turns in sessions for record in turns]
    pauses = [
        (after["timestamp"] - before["timestamp"]) / 1000 - before["output_length"] * 0.02
        for turns in sessions
        for before, after in pairwise(turns)
    ]
    for values, middle in ((added, 300), (outputs, 200), (pauses, 60)):
        assert median(values) == pytest.approx(middle, rel=0.05)
        assert np.std(np.log(values)) == pytest.approx(0.5, rel=0.05)
        assert mean(values) == pytest.approx(middle * math.exp(0.5**2 / 2), rel=0.05)


def test_prefixes_are_popular_by_their_rank():
    firsts = [turns[0]["hash_ids"][0] for turns in by_session(synthesize(CHATS, 2)).values()]
    shares = [count / 3000 for _, count in Counter(firsts).most_common()]
    assert len(shares) == 20
    harmonic = sum(1 / rank for rank in range(1, 21))
    assert shares[0] == pytest.approx(1 / harmonic, rel=0.15)
    assert shares[1] == pytest.approx(1 / 2 / harmonic, rel=0.2)
    even = Counter(
        turns[0]["hash_ids"][0] for turns in by_session(synthesize(replace(CHATS, prefix_zipf=0), 2)).values()
    )
    assert max(even.values()) < 2 * min(even.values())


def test_sessions_share_the_full_blocks_of_a_system_prompt_and_no_more():
    shape = replace(CHATS, sessions=50, prefixes=1, prefix_tokens=1500, block_size=512)
    first, *others = by_session(synthesize(shape, 0)).values()
    for turns in others:
        assert turns[0]["hash_ids"][:2] == first[0]["hash_ids"][:2]
        assert not set(turns[0]["hash_ids"][2:]) & set(first[0]["hash_ids"])


def test_agents_have_their_share_turns_and_tools():
    shape = replace(CHATS, agents=0.25, fan_out=0.0, tool_time=1.0, tool_sigma=0.1)
    agents, chats = [], []
    for turns in by_session(synthesize(shape, 4)).values():
        if len(turns) > 1:
            pause = (turns[1]["timestamp"] - turns[0]["timestamp"]) / 1000 - turns[0]["output_length"] * 0.02
            (agents if pause < 3 else chats).append(len(turns))
    share = len(agents) / (14 / 15) / (len(agents) / (14 / 15) + len(chats) / (3 / 4))  # those of one turn are not seen
    assert share == pytest.approx(0.25, rel=0.15)
    assert mean(agents) == pytest.approx(1 + 15, rel=0.1)  # the mean of those that are above 1
    assert mean(chats) == pytest.approx(1 + 4, rel=0.1)


def test_another_rate_or_block_size_leaves_the_sessions_as_they_are():
    def lengths(shape):
        turns = by_session(synthesize(shape, 0))
        return {session: [(r["input_length"], r["output_length"]) for r in turns[session]] for session in turns}

    chats = replace(MIX, agents=0.0)
    assert lengths(chats) == lengths(replace(chats, session_rate=50, block_size=16))


def test_no_prompt_with_its_answer_is_longer_than_allowed():
    shape = replace(MIX, max_length=4096)
    totals = [record["input_length"] + record["output_length"] for record in synthesize(shape, 0)]
    assert max(totals) == 4096
    assert min(record["output_length"] for record in synthesize(shape, 0)) >= 1


def test_a_duration_cuts_the_same_trace_off():
    whole = list(synthesize(MIX, 0))
    cut = list(synthesize(replace(MIX, duration=60), 0))
    assert cut == [record for record in whole if record["timestamp"] < 60_000]
    assert 0 < len(cut) < len(whole)
    endless = replace(MIX, sessions=0, duration=600)
    assert len(by_session(synthesize(endless, 0))) == pytest.approx(600, rel=0.15)


def test_memory_does_not_grow_with_the_requests():
    shape = replace(SMALL, sessions=0, duration=1e9, think_time=1, tool_time=1, vocab_size=100)
    records = synthesize(shape, 0, "tokens")
    tracemalloc.start()
    try:
        sizes = []
        for _ in range(2):
            for _ in islice(records, 4000):
                pass
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert sizes[1] < 1.5 * sizes[0]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"turns": 0.5}, r"turns=0.5: it must be from 1 to 1,000,000,000"),
        ({"agents": 1.1}, "agents=1.1: it must be from 0 to 1"),
        ({"think_time": math.nan}, "think_time=nan"),
        ({"sub_agents": 2.5}, "sub_agents=2.5: a whole number is expected"),
        ({"block_size": True}, "block_size=True: a whole number is expected"),
        ({"token_time": "x"}, "token_time='x': a number is expected"),
        ({"sessions": 0}, "without a number of sessions needs a duration"),
        ({"max_length": 2049}, "no room behind prefix_tokens=2048"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        TraceShape(**numbers)


def test_an_unknown_format_is_refused_at_once():
    with pytest.raises(ValueError, match="format='csv': there are mooncake, tokens"):
        synthesize(SMALL, 0, "csv")


# -------------------------------------------------------------------- agents


def tree_of(turns):
    """(request, those that go on from it) for each request of a session, by what their prompts begin with."""
    contents = [tuple(record["prompt_token_ids"] + record["output_token_ids"]) for record in turns]
    numbers = {content: number for number, content in enumerate(contents)}
    children = defaultdict(list)
    lengths = sorted(set(map(len, contents)), reverse=True)
    for record in turns:
        prompt = tuple(record["prompt_token_ids"])
        parent = next((numbers.get(prompt[:n]) for n in lengths if n < len(prompt) and prompt[:n] in numbers), None)
        children[parent].append(record)
    return [(record, children[number]) for number, record in enumerate(turns)]


def ends(record):
    return record["timestamp"] + len(record["output_token_ids"]) * AGENTS.token_time


def test_sub_agents_go_on_from_the_agents_prefix_side_by_side_and_the_agent_after_them():
    num_fan_outs = 0
    for turns in by_session(synthesize(AGENTS, 0, "tokens")).values():
        tree = tree_of(turns)
        following = {id(record): children for record, children in tree}
        assert sum(len(children) for _, children in tree) == len(turns) - 1  # all but the first go on from another

        def last_end(record, following=following):
            return max([ends(record), *(last_end(child) for child in following[id(record)])])

        for record, children in tree:
            assert len(children) in (0, 1, 4)
            if len(children) == 4:
                num_fan_outs += 1
                *subs, agent = children  # in order of time
                assert all(sub["timestamp"] == pytest.approx(ends(record), abs=0.002) for sub in subs)
                assert agent["timestamp"] >= max(map(last_end, subs)) - 0.002
                known = len(record["prompt_token_ids"] + record["output_token_ids"])
                assert len({tuple(child["prompt_token_ids"][known:]) for child in children}) == 4
    assert num_fan_outs > 20


def test_sub_agents_overlap_in_time_and_share_their_blocks():
    overlaps = 0
    for turns in by_session(synthesize(AGENTS, 0)).values():
        for before, after in pairwise(turns):
            if before["turn"] == after["turn"] and before["timestamp"] == after["timestamp"]:
                overlaps += 1
                length = min(before["input_length"], after["input_length"])
                shared = [a == b for a, b in zip(before["hash_ids"], after["hash_ids"], strict=False)]
                assert shared == sorted(shared, reverse=True)
                assert 70 // 16 < sum(shared) <= length // 16
    assert overlaps > 40


def test_a_share_of_the_turns_fans_out():
    def num_turns(fan_out):
        shape = replace(AGENTS, sessions=300, fan_out=fan_out, agent_turns=6, sub_agent_turns=1)
        return sum(1 for _ in synthesize(shape, 0))

    assert num_turns(0.0) == pytest.approx(300 * 6, rel=0.1)
    assert num_turns(0.4) == pytest.approx(300 * (6 + 5 * 0.4 * 3), rel=0.1)  # after any turn but the last


@pytest.mark.parametrize("format", ["mooncake", "tokens"])
def test_only_the_last_record_of_a_session_ends_it(format):
    records = list(synthesize(AGENTS, 0, format, session_ends=True))
    for turns in by_session(records).values():
        assert [record["end_session"] for record in turns] == [False] * (len(turns) - 1) + [True]
    bare = [{name: value for name, value in record.items() if name != "end_session"} for record in records]
    assert bare == list(synthesize(AGENTS, 0, format))


def test_a_session_that_the_duration_cuts_off_has_no_end():
    whole = list(synthesize(SMALL, 0, session_ends=True))
    duration = whole[len(whole) // 2]["timestamp"] / 1000
    cut = list(synthesize(replace(SMALL, duration=duration), 0, session_ends=True))
    assert cut == whole[: len(cut)]
    assert 0 < sum(record["end_session"] for record in cut) < len(by_session(cut))


# -------------------------------------------------------------------- files


def run(*arguments):
    return CliRunner().invoke(trace, list(map(str, arguments)), catch_exceptions=False)


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst"])
def test_a_written_trace_is_read_as_it_was_made(tmp_path, ending):
    if ending.endswith("zst"):
        pytest.importorskip("zstandard")
    file = tmp_path / f"trace.{ending}"
    assert run("synth", "--sessions", 30, "--block-size", 128, "--seed", 3, "-o", file).output == ""
    found = Trace(file)
    assert (found.format.name, found.block_size) == ("mooncake", 128)
    requests = list(found)
    assert found.num_out_of_order == found.num_skipped == 0
    records = list(synthesize(TraceShape(sessions=30, block_size=128), 3))
    for request, record in zip(requests, records, strict=True):
        assert request.arrival == record["timestamp"] / 1000 - records[0]["timestamp"] / 1000
        assert request.num_prompt_tokens == record["input_length"]
        assert request.num_output_tokens == record["output_length"]
        assert request.hash_ids == record["hash_ids"]
        assert request.session == record["session_id"]


def test_written_tokens_are_read_as_they_were_made(tmp_path):
    file = tmp_path / "trace.jsonl"
    run("synth", "--sessions", 5, "--vocab-size", 100, "--format", "tokens", "-o", file)
    found = Trace(file)
    assert (found.format.name, found.block_size) == ("tokens", None)
    records = list(synthesize(TraceShape(sessions=5, vocab_size=100), 0, "tokens"))
    for request, record in zip(found, records, strict=True):
        assert request.arrival == record["timestamp"] - records[0]["timestamp"]
        assert request.token_ids.tolist() == record["prompt_token_ids"]
        assert request.output_token_ids.tolist() == record["output_token_ids"]
        assert request.session == record["session_id"]
    assert found.num_out_of_order == 0


def test_written_ends_are_read_as_hints(tmp_path):
    run("synth", "--sessions", 5, "--session-ends", "-o", tmp_path / "trace.jsonl")
    requests = list(Trace(tmp_path / "trace.jsonl"))
    assert {request.hints.session_id for request in requests} == set("01234")
    assert sum(request.hints.end_session for request in requests) == 5
    run("synth", "--sessions", 5, "-o", tmp_path / "trace.jsonl")
    assert {request.hints for request in Trace(tmp_path / "trace.jsonl")} == {NO_HINTS}


def test_packed_files_hold_what_the_standard_output_gets_and_are_the_same_each_time(tmp_path):
    first, second = tmp_path / "first.gz", tmp_path / "second.gz"
    for file in (first, second):
        run("synth", "--sessions", 5, "--output", file)
    printed = run("synth", "--sessions", 5).stdout
    assert gzip.decompress(first.read_bytes()).decode() == printed
    assert first.read_bytes() == second.read_bytes()
    assert [json.loads(line) for line in printed.splitlines()] == list(synthesize(TraceShape(sessions=5), 0))


def test_each_number_of_a_shape_is_an_option_with_its_default():
    shown = " ".join(run("synth", "--help").stdout.split())
    for text in ("--think-time FLOAT", "--sub-agents INTEGER", "[default: 131072]", "[default: inf]"):
        assert text in shown


def test_a_users_mistake_is_named():
    assert "Invalid value for '--turns': 'many' is not a valid float" in run("synth", "--turns", "many").stderr
    with pytest.raises(ValueError, match="turns=0.0: it must be from 1"):
        run("synth", "--turns", 0)
    with pytest.raises(FileNotFoundError):
        run("synth", "-o", "/no/such/folder/trace.jsonl")
