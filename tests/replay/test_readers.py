"""Traces of other people: what each format says, how it is cut into blocks, and what is wrong with bad ones."""

from __future__ import annotations

import gzip
import json
import math
import random
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagetable.memory.hints import NO_HINTS, CacheHints
from pagetable.replay.blocks import Workload
from pagetable.replay.readers import Trace
from pagetable.replay.trace import PrefixTree, SessionFinder, TraceError, TraceRequest
from tests.replay.small_traces import (
    Record,
    mooncake,
    qwen,
    reuse_of,
    sub_agent,
    tokens,
    weka,
    weka_request,
    write_trace,
)

HUGE = 10**400  # more than a float can hold
Line = Record | str | bytes  # a record, or what is none


def encode(prompt: str | list[Any]) -> list[int]:
    """A tokenizer: a token for each byte; a chat is its contents."""
    text = prompt if isinstance(prompt, str) else "".join(message["content"] for message in prompt)
    return list(text.encode())


def trace_of(folder: Path, *lines: Line, name: str = "trace.jsonl", **options: Any) -> Trace:
    """A trace of these lines: records, or what is no record."""
    raw = [line if isinstance(line, str | bytes) else json.dumps(line) for line in lines]
    content = b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in raw)
    (folder / name).write_bytes(content)
    return Trace(folder / name, **options)


def folder_of(folder: Path, **sessions: Record | list[Record]) -> Path:
    """A folder with a file for each session; of several sessions, one a line."""
    for name, records in sessions.items():
        write_trace(folder / f"{name}.json", records if isinstance(records, list) else [records])
    return folder


def told(requests: Iterable[TraceRequest]) -> list[dict[str, Any]]:
    """All that they hold, in a form that can be compared."""
    fields = [asdict(request) for request in requests]
    return [{k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in one.items()} for one in fields]


def paths_of(workload: Workload) -> list[list[int]]:
    return [access.path.tolist() for _, access in workload]


GOOD: dict[str, list[Record]] = {
    "mooncake": [mooncake(0, 0, 1), mooncake(3, 0, 2, 3), mooncake(3, 0, 1, 4)],
    "qwen": [qwen(7, -1, 0.0, 1, 2), qwen(8, -1, 0.5, 1, 3), qwen(9, 7, 2.25, 1, 2, 4)],
    "weka": [
        weka(weka_request(0, 1, 2), weka_request(5.5, 1, 2, 3), sub_agent(6, weka_request(0, 9))),
        weka(weka_request(0, 1), weka_request(4, 1, 2)),
    ],
    "tokens": [tokens(0, range(40), [1, 2, 3]), tokens(1.5, range(20)), tokens(2, [5] * 7, length=9)],
    "text": [{"prompt": "Once upon a time"}, {"messages": [{"role": "user", "content": "Hello"}], "timestamp": 1}],
}
every_format = pytest.mark.parametrize("kind", GOOD)


# ---------------------------------------------------------------- what each format says


def test_mooncake_tells_milliseconds_and_blocks_of_512_tokens(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": list(range(14))},
        {"timestamp": 27482, "input_length": 7322, "output_length": 490, "hash_ids": [0, *range(14, 28)]},
    ]
    trace = trace_of(tmp_path, *lines)
    assert (trace.format.name, trace.block_size) == ("mooncake", 512)
    first, second = trace
    assert (first.arrival, first.num_prompt_tokens, first.num_output_tokens) == (0.0, 6758, 500)
    assert (second.arrival, second.hash_ids) == (27.482, [0, *range(14, 28)])
    assert second.token_ids is None
    assert second.session is None


def test_the_first_record_may_say_how_many_tokens_a_block_has(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, mooncake(0, 1, input_length=100, block_size=128), mooncake(1, 1, input_length=128))
    assert trace.block_size == 128
    assert [request.num_prompt_tokens for request in trace] == [100, 128]


@pytest.mark.parametrize("kind", ["mooncake", "qwen", "weka", "tokens"])
def test_time_begins_with_the_first_request(kind: str, tmp_path: Path) -> None:
    make: dict[str, Callable[[float], Record]] = {
        "mooncake": lambda seconds: mooncake(seconds, 1),
        "qwen": lambda seconds: qwen(1, -1, seconds, 1),
        "weka": lambda seconds: weka(weka_request(seconds, 1)),
        "tokens": lambda seconds: tokens(seconds, [1]),
    }
    for start in (0.0, 100.5, 1.7e9):
        trace = trace_of(tmp_path, *(make[kind](start + seconds) for seconds in (0.0, 0.25, 7.0)))
        assert [request.arrival for request in trace] == [0, 0.25, 7]


def test_qwen_tells_seconds_and_whose_turn_it_is(tmp_path: Path) -> None:
    line = {
        "chat_id": 159,
        "parent_chat_id": 55,
        "timestamp": 61.114,
        "input_length": 521,
        "output_length": 132,
        "type": "text",
        "turn": 2,
        "hash_ids": list(range(33)),
    }
    trace = trace_of(tmp_path, qwen(55, -1, 0, 0, turn=1), line, qwen(160, -1, 62, 1), qwen(161, 159, 63, 2, turn=3))
    assert (trace.format.name, trace.block_size) == ("qwen", 16)
    requests = list(trace)
    assert (requests[1].arrival, requests[1].num_prompt_tokens, requests[1].num_output_tokens) == (61.114, 521, 132)
    assert [request.session for request in requests] == [55, 55, 160, 55]


def test_a_chat_whose_beginning_was_before_the_trace_is_one_session_all_the_same(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, qwen(2, 1, 0, 5), qwen(3, 2, 1, 5), qwen(4, 1, 2, 5))
    assert len({request.session for request in trace}) == 1


def test_weka_tells_a_session_a_record(tmp_path: Path) -> None:
    line = {
        "id": "f64a8d4c-12d",
        "models": ["claude-sonnet-4-20250514"],
        "block_size": 64,
        "tool_tokens": 11899,
        "system_tokens": 2926,
        "requests": [
            {
                "t": 0.0,
                "type": "s",
                "model": "claude-sonnet-4-20250514",
                "in": 259,
                "out": 86,
                "hash_ids": [1, 2, 3, 4],
                "input_types": ["text"],
                "output_types": ["text"],
                "stop": "",
            }
        ],
    }
    trace = trace_of(tmp_path, line)
    assert (trace.format.name, trace.block_size) == ("weka", 64)
    (request,) = trace
    assert (request.arrival, request.num_prompt_tokens, request.num_output_tokens) == (0.0, 259, 86)
    assert len(request.hash_ids or ()) == 4


def test_sessions_of_a_folder_lie_beside_each_other_in_time(tmp_path: Path) -> None:
    folder_of(
        tmp_path,
        a=weka(weka_request(0, 1), weka_request(10, 1, 2), weka_request(30, 1, 2, 3)),
        b=[weka(weka_request(5, 1), weka_request(20, 1, 2)), weka(weka_request(10, 1))],
    )
    (tmp_path / "README.md").write_text("not a trace")
    requests = list(Trace(tmp_path))
    assert [request.arrival for request in requests] == [0, 5, 10, 10, 20, 30]
    assert [request.session for request in requests] == [0, 1, 0, 2, 1, 0]


@pytest.mark.parametrize("scope", [{}, {"hash_id_scope": "local"}])
def test_hashes_of_a_session_are_its_own(scope: Record, tmp_path: Path) -> None:
    session = weka(weka_request(0, 1, 2), weka_request(1, 1, 2, 3))
    if not scope:
        del session["hash_id_scope"]
    folder_of(tmp_path, a=session, b=session)
    assert paths_of(Workload(Trace(tmp_path))) == [[0, 1], [2, 3], [0, 1, 4], [2, 3, 5]]


def test_hashes_with_global_scope_are_everybodys(tmp_path: Path) -> None:
    session = weka(weka_request(0, 1, 2), weka_request(1, 1, 2, 3), hash_id_scope="global")
    folder_of(tmp_path, a=session, b=session)
    assert paths_of(Workload(Trace(tmp_path))) == [[0, 1], [0, 1], [0, 1, 2], [0, 1, 2]]


def test_sub_agents_share_the_hashes_of_their_session(tmp_path: Path) -> None:
    inner = sub_agent(1, weka_request(0, 1, 2, 8))
    session = weka(weka_request(0, 1, 2), sub_agent(1, weka_request(0, 1, 2, 9), inner))
    (one,) = {request.session for request in Trace(folder_of(tmp_path, a=session))}
    assert one == 0
    assert paths_of(Workload(Trace(tmp_path))) == [[0, 1], [0, 1, 2], [0, 1, 3]]


def test_times_of_a_sub_agent_count_from_its_start(tmp_path: Path) -> None:
    inner = sub_agent(4.5, weka_request(0, 31), weka_request(1, 32))
    session = weka(
        weka_request(0, 1),
        sub_agent(134.25, weka_request(0, 21), inner, weka_request(6, 22)),
        weka_request(136, 2),
        weka_request(300, 3),
    )
    requests = list(Trace(folder_of(tmp_path, a=session)))
    assert [request.arrival for request in requests] == [0, 134.25, 136, 138.75, 139.75, 140.25, 300]
    assert [request.hash_ids[-1][-1] for request in requests if request.hash_ids] == [1, 21, 2, 31, 32, 22, 3]


def test_a_session_may_stand_on_many_lines(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(GOOD["weka"][0], indent=2))
    (tmp_path / "b.json").write_text(json.dumps(GOOD["weka"][1], indent=2))
    spread = list(Trace(tmp_path))
    assert told(spread) == told(trace_of(tmp_path, *GOOD["weka"], name="both.jsonl"))


def test_tokens_are_tokens(tmp_path: Path) -> None:
    lines = [
        {"prompt_token_ids": [1, 2, 3], "timestamp": 2.5, "output_length": 7, "session_id": "x"},
        {"token_ids": [1, 2], "timestamp": 3, "max_tokens": 4},
        {"prompt": [4, 2**31 - 1], "timestamp": 3, "output_token_ids": [5, 6], "output_length": 99},
        {"prompt_token_ids": [1], "timestamp": 4},
    ]
    trace = trace_of(tmp_path, *lines)
    assert (trace.format.name, trace.block_size) == ("tokens", None)
    requests = list(trace)
    assert [request.token_ids.tolist() for request in requests if request.token_ids is not None] == [
        [1, 2, 3],
        [1, 2],
        [4, 2**31 - 1],
        [1],
    ]
    assert [request.num_prompt_tokens for request in requests] == [3, 2, 2, 1]
    assert [request.num_output_tokens for request in requests] == [7, 4, 2, 1]
    assert [request.arrival for request in requests] == [0, 0.5, 0.5, 1.5]
    assert [request.session for request in requests] == ["x", None, None, None]
    assert requests[2].output_token_ids is not None
    assert requests[2].output_token_ids.tolist() == [5, 6]
    assert requests[0].output_token_ids is None


def test_texts_become_tokens(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, *GOOD["text"], encode=encode)
    assert trace.format.name == "text"
    assert [request.num_prompt_tokens for request in trace] == [16, 5]
    assert [request.arrival for request in trace] == [0, 1]


def test_texts_need_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"trace\.jsonl\b.*--model"):
        list(trace_of(tmp_path, *GOOD["text"]))


@every_format
def test_a_trace_read_twice_tells_the_same(kind: str, tmp_path: Path) -> None:
    trace = trace_of(tmp_path, *GOOD[kind], encode=encode)
    first, second = list(trace), list(trace)
    assert told(first) == told(second) == told(trace_of(tmp_path, *GOOD[kind], encode=encode, name="again.jsonl"))
    assert len(first) >= 2
    assert (trace.format.name, trace.num_skipped, trace.num_out_of_order) == (kind, 0, 0)
    workload = Workload(trace)
    assert paths_of(workload) == paths_of(workload)


@every_format
def test_order_of_arrival_is_kept_and_blank_lines_are_nothing(kind: str, tmp_path: Path) -> None:
    lines: list[Line] = []
    for record in GOOD[kind]:
        lines += [record, "", "  \t "]
    trace = trace_of(tmp_path, *lines, encode=encode)
    assert told(trace) == told(trace_of(tmp_path, *GOOD[kind], encode=encode, name="tight.jsonl"))
    assert trace.num_skipped == 0
    arrivals = [request.arrival for request in trace]
    assert arrivals == sorted(arrivals)


@every_format
def test_the_last_line_needs_no_end_and_lines_may_end_as_on_windows(kind: str, tmp_path: Path) -> None:
    expected = told(trace_of(tmp_path, *GOOD[kind], encode=encode))
    lines = [json.dumps(record) for record in GOOD[kind]]
    for separator in ("\n", "\r\n"):
        path = tmp_path / "other.jsonl"
        path.write_bytes(separator.join(lines).encode())
        assert told(Trace(path, encode=encode)) == expected


def test_a_byte_order_mark_is_no_harm(tmp_path: Path) -> None:
    first, *rest = (json.dumps(record) for record in GOOD["mooncake"])
    trace = trace_of(tmp_path, b"\xef\xbb\xbf" + first.encode(), *rest)
    assert len(list(trace)) == 3


# ---------------------------------------------------------------- packed files


def zst(content: bytes) -> bytes:
    packed: bytes = pytest.importorskip("zstandard").compress(content)
    return packed


@every_format
@pytest.mark.parametrize(("ending", "pack"), [("gz", gzip.compress), ("zst", zst)])
def test_packed_traces_are_read_as_plain_ones(
    kind: str, ending: str, pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    plain = trace_of(tmp_path, *GOOD[kind], encode=encode)
    packed = tmp_path / f"trace.jsonl.{ending}"
    packed.write_bytes(pack(plain.path.read_bytes()))
    assert told(Trace(packed, encode=encode)) == told(plain)
    twice = tmp_path / f"twice.jsonl.{ending}"  # as `cat` puts them together
    first, rest = plain.path.read_bytes().split(b"\n", 1)
    twice.write_bytes(pack(first + b"\n") + pack(rest))
    assert told(Trace(twice, encode=encode)) == told(plain)


def test_a_folder_may_be_packed_file_by_file(tmp_path: Path) -> None:
    plain = told(Trace(folder_of(tmp_path, a=GOOD["weka"][0], b=GOOD["weka"][1])))
    for name, pack in (("a", gzip.compress), ("b", zst)):
        content = (tmp_path / f"{name}.json").read_bytes()
        (tmp_path / f"{name}.json").unlink()
        (tmp_path / f"{name}.json.{'gz' if pack is gzip.compress else 'zst'}").write_bytes(pack(content))
    assert told(Trace(tmp_path)) == plain


@pytest.mark.parametrize(("ending", "pack"), [("gz", gzip.compress), ("zst", zst)])
@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_packed_file_is_an_error_that_names_it(
    ending: str, pack: Callable[[bytes], bytes], damage: str, tmp_path: Path
) -> None:
    rng = random.Random(0)
    records = [mooncake(i, *(rng.randrange(10**9) for _ in range(20))) for i in range(2000)]
    content = bytearray(pack(write_trace(tmp_path / "plain.jsonl", records).read_bytes()))
    if damage == "cut":
        del content[len(content) // 2 :]
    else:
        content[len(content) // 2 : len(content) // 2 + 64] = bytes(64)
    path = tmp_path / f"trace.jsonl.{ending}"
    path.write_bytes(content)
    with pytest.raises((TraceError, OSError), match=r"trace\.jsonl"):
        list(Trace(path))


# ---------------------------------------------------------------- into blocks


@pytest.mark.parametrize("seed", range(30))
def test_equal_nodes_are_equal_prefixes(seed: int) -> None:
    rng = random.Random(seed)
    tree = PrefixTree()
    node_of: dict[tuple[int, ...], int] = {}
    for _ in range(60):
        contents = [rng.randrange(rng.choice([2, 4, 50])) for _ in range(rng.randint(0, 7))]
        path = tree.path(contents)
        assert path.dtype == np.int32
        for end, node in enumerate(path.tolist(), 1):
            assert node_of.setdefault(tuple(contents[:end]), node) == node
    assert sorted(node_of.values()) == list(range(tree.num_nodes))  # one each, in no other number


def test_the_same_hash_behind_another_parent_is_another_node(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path, mooncake(0, 1, 2), mooncake(1, 3, 2), mooncake(2, 3, 2), mooncake(3, 2), mooncake(4, 1, 2)
    )
    workload = Workload(trace)
    assert paths_of(workload) == [[0, 1], [2, 3], [2, 3], [4], [0, 1]]
    assert reuse_of(workload).num_hits == 4


def test_the_same_hash_over_and_over_in_one_prompt(tmp_path: Path) -> None:
    assert paths_of(Workload(trace_of(tmp_path, mooncake(0, 7, 7, 7), mooncake(1, 7, 7)))) == [[0, 1, 2], [0, 1]]


def test_hashes_may_be_texts_and_numbers_of_any_size(tmp_path: Path) -> None:
    ids: list[Any] = [1, "1", -1, 10**400, 2**63, "\ud800", ""]
    assert paths_of(Workload(trace_of(tmp_path, mooncake(0, *ids), mooncake(1, *ids)))) == [list(range(7))] * 2


@pytest.mark.parametrize("times", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_larger_blocks_are_several_of_the_trace(times: int, seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    ids = [tuple(rng.randrange(2) for _ in range(rng.randint(1, 12))) for _ in range(50)]
    records = [mooncake(i, *path, input_length=512 * len(path) - rng.choice([0, 5])) for i, path in enumerate(ids)]
    workload = Workload(trace_of(tmp_path, *records), 512 * times)
    seen: set[tuple[int, ...]] = set()
    hits = num_accesses = 0
    node_of: dict[tuple[int, ...], int] = {}
    for path, (request, access) in zip(ids, workload, strict=True):
        prefixes = [path[: min(i + times, len(path))] for i in range(0, len(path), times)]
        hits += sum(prefix in seen for prefix in prefixes)
        seen.update(prefixes)
        num_accesses += len(prefixes)
        assert access.num_accesses == len(access.path) == -(-request.num_prompt_tokens // (512 * times))
        for prefix, node in zip(prefixes, access.path.tolist(), strict=True):
            assert node_of.setdefault(prefix, node) == node
    reuse = reuse_of(workload)
    assert (reuse.num_hits, reuse.num_accesses, reuse.num_nodes) == (hits, num_accesses, len(seen))
    assert len(set(node_of.values())) == len(seen)


@pytest.mark.parametrize("block_size", [1, 100, 256, 511, 513, 768])
def test_blocks_that_are_no_multiple_are_refused(block_size: int, tmp_path: Path) -> None:
    trace = trace_of(tmp_path, *GOOD["mooncake"])
    with pytest.raises(TraceError, match=rf"block_size={block_size}\b.*512"):
        Workload(trace, block_size)


@pytest.mark.parametrize("block_size", [3, 12])
def test_tokens_are_cut_into_blocks_of_a_power_of_two(block_size: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"block_size={block_size}"):
        Workload(trace_of(tmp_path, *GOOD["tokens"]), block_size)


@pytest.mark.parametrize("kind", ["mooncake", "tokens"])
@pytest.mark.parametrize("block_size", [0, -1, -512])
def test_a_block_of_no_tokens_is_refused(kind: str, block_size: int, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=f"block_size={block_size}"):
        Workload(trace_of(tmp_path, *GOOD[kind]), block_size)


@pytest.mark.parametrize("block_size", [1, 4, 16, 1024])
def test_tokens_are_cut_into_blocks_of_any_such_size(block_size: int, tmp_path: Path) -> None:
    workload = Workload(trace_of(tmp_path, *GOOD["tokens"]), block_size)
    lengths = [(40, 3), (20, 1), (7, 1)]  # of the prompt, and of what is known of the answer
    for (prompt, answer), (_, access) in zip(lengths, workload, strict=True):
        assert len(access.path) == (prompt + answer - 1) // block_size  # the last token is never computed
        assert access.num_accesses == prompt // block_size
        assert access.num_reusable == (prompt - 1) // block_size


def test_nothing_after_until_is_read(tmp_path: Path) -> None:
    late = [mooncake(11 + i, 3) for i in range(200)]
    trace = trace_of(tmp_path, mooncake(0, 1), mooncake(10, 1), mooncake(10, 2), *late, "not even JSON")
    assert len(list(Workload(trace, until=10.0))) == 3
    assert list(Workload(trace, until=-0.0)) != []
    with pytest.raises(TraceError):
        list(Workload(trace))


def chats(num_chats: int, turns: int) -> list[Record]:
    """Chats side by side, each a turn after the other."""
    records = []
    for turn in range(turns):
        for chat in range(num_chats):
            number, parent = 1000 * turn + chat, 1000 * (turn - 1) + chat if turn else -1
            blocks = [0, *range(100 * chat + 1, 100 * chat + 2 + turn)]
            records.append(qwen(number, parent, float(turn), *blocks, turn=turn + 1))
    return records


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_sample_is_whole_sessions(share: float, tmp_path: Path) -> None:
    trace = trace_of(tmp_path, *chats(400, 3))
    samples = []
    for seed in range(4):
        kept = [request.session for request, _ in Workload(trace, sample=share, seed=seed)]
        assert all(kept.count(session) == 3 for session in set(kept))
        assert len(set(kept)) == pytest.approx(400 * share, abs=60)
        assert kept == [request.session for request, _ in Workload(trace, sample=share, seed=seed)]
        samples.append(set(kept))
    others = [len(samples[0] & sample) for sample in samples[1:]]  # independent: neither the same nor the rest
    assert others == pytest.approx([400 * share**2] * 3, abs=50)
    larger = {request.session for request, _ in Workload(trace, sample=min(1.0, share + 0.1), seed=0)}
    assert samples[0] <= larger


def test_all_is_a_sample_too(tmp_path: Path) -> None:
    assert len(list(Workload(trace_of(tmp_path, *chats(20, 2)), sample=1.0))) == 40


@pytest.mark.parametrize(
    "options", [{"sample": share} for share in (0, -0.1, 1.1, math.nan)] + [{"until": end} for end in (-1, math.nan)]
)
def test_no_share_and_no_time_are_refused(options: dict[str, float], tmp_path: Path) -> None:
    (name,) = options
    with pytest.raises(TraceError, match=f"{name}={options[name]}"):
        Workload(trace_of(tmp_path, *GOOD["qwen"]), **options)


def test_what_a_sample_leaves_keeps_its_prefixes(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, *chats(50, 3))
    everything = {(request.session, len(access.path)): access.path.tolist() for request, access in Workload(trace)}
    for request, access in Workload(trace, sample=0.3, seed=1):
        assert everything[request.session, len(access.path)] == access.path.tolist()


def test_chats_are_told_apart_where_the_trace_does_not_say(tmp_path: Path) -> None:
    records: list[Record] = []
    truth: list[int] = []
    for turn in range(4):
        for chat in range(12):
            records.append(mooncake(turn, 0, *range(100 * chat + 1, 100 * chat + 3 + turn)))
            truth.append(chat)
    guessed = [request.session for request, _ in Workload(trace_of(tmp_path, *records))]
    assert None not in guessed
    for chat in range(12):
        assert len({guess for guess, true in zip(guessed, truth, strict=True) if true == chat}) == 1
    # The second one to use the common system prompt is taken for the first; all others are known to be others.
    assert len(set(guessed)) == 11


def test_a_prompt_that_is_shorter_than_a_block_is_a_session_of_its_own() -> None:
    finder = SessionFinder()
    nothing = np.array([], np.int32)
    assert [finder.find(nothing), finder.find(nothing)] == [0, 1]


# ---------------------------------------------------------------- hints


hinting_format = pytest.mark.parametrize("kind", ["mooncake", "qwen", "tokens", "text"])


def hints_of(folder: Path, *records: Record) -> list[CacheHints]:
    return [request.hints for request in trace_of(folder, *records, encode=encode)]


@hinting_format
def test_a_record_may_tell_the_cache_what_its_client_knows(kind: str, tmp_path: Path) -> None:
    told_by: Record = {
        "session_id": "s",
        "end_session": True,
        "expected_idle_s": 1.5,
        "cache_priority": 70,
        "ttl_s": 60,
    }
    plain = ONE_BLOCK[kind]
    (hints,) = hints_of(tmp_path, {**plain, **told_by})
    assert hints == CacheHints("s", True, 1.5, 70, 60)
    for name in ("end_session", "expected_idle_s", "cache_priority", "ttl_s"):
        (hints,) = hints_of(tmp_path, {**plain, "session_id": "s", name: told_by[name]})
        assert hints == CacheHints("s", **{name: told_by[name]})


@hinting_format
def test_a_session_alone_is_no_hint(kind: str, tmp_path: Path) -> None:
    plain = {**ONE_BLOCK[kind], "session_id": "s"}
    nothing = dict.fromkeys(("end_session", "expected_idle_s", "cache_priority", "ttl_s"))
    assert hints_of(tmp_path, ONE_BLOCK[kind], plain, {**plain, **nothing}) == [NO_HINTS] * 3
    assert hints_of(tmp_path, plain, {**plain, "end_session": False}) == [NO_HINTS, CacheHints("s")]


@hinting_format
def test_a_number_of_a_session_is_its_text(kind: str, tmp_path: Path) -> None:
    trace = trace_of(tmp_path, {**ONE_BLOCK[kind], "session_id": 7, "ttl_s": 0}, encode=encode)
    (request,) = trace
    assert request.hints == CacheHints("7", ttl_s=0)
    assert request.session == (1 if kind == "qwen" else 7)


def test_without_a_session_a_chat_of_qwen_is_one(tmp_path: Path) -> None:
    records = [qwen(5, -1, 0, 1), qwen(6, 5, 1, 1, end_session=False), qwen(7, 6, 2, 1, end_session=True)]
    assert hints_of(tmp_path, *records) == [NO_HINTS, CacheHints("5"), CacheHints("5", True)]
    other = qwen(7, -1, 2, 1, end_session=True, session_id="x")
    assert hints_of(tmp_path, other) == [CacheHints("x", True)]


def test_a_hint_without_a_session_has_none(tmp_path: Path) -> None:
    assert hints_of(tmp_path, mooncake(0, 1, ttl_s=5)) == [CacheHints(ttl_s=5)]


def test_sessions_of_weka_have_no_hints(tmp_path: Path) -> None:
    told_by = {"session_id": "s", "end_session": True, "ttl_s": -1}
    assert hints_of(tmp_path, weka(weka_request(0, 1, **told_by), **told_by)) == [NO_HINTS]


# ---------------------------------------------------------------- what is wrong, and where

NOT_NUMBERS: list[Any] = [None, "7", [], {}, True]
NOT_COUNTS = [*NOT_NUMBERS, 1.0, math.nan, math.inf, -1, 2**31, HUGE]
NOT_LENGTHS = [value for value in NOT_COUNTS if value is not None]  # of an answer: none is none
NOT_TIMES = [*NOT_NUMBERS, math.nan, math.inf, -math.inf, -0.001, -1, 1e300, HUGE]
NOT_SECONDS = ["7", [], {}, True, math.nan, math.inf, -0.001, -1, 1.1e9, HUGE]
NOT_HASHES: list[Any] = [None, 7, "7", {}, [1.0], [None], [[1]], [{}], [True], [math.nan]]
NOT_TOKENS: list[Any] = [None, 7, {}, [], [1.5], [True], ["1"], [None], [[1]], [-1], [2**31], [HUGE], [math.nan]]

WRONG_VALUES: dict[tuple[str, str], list[Any]] = {
    ("mooncake", "timestamp"): NOT_TIMES,
    ("mooncake", "input_length"): [*NOT_COUNTS, 0],
    ("mooncake", "output_length"): NOT_LENGTHS,
    ("mooncake", "hash_ids"): NOT_HASHES,
    ("qwen", "timestamp"): NOT_TIMES,
    ("qwen", "input_length"): [*NOT_COUNTS, 0],
    ("qwen", "output_length"): NOT_LENGTHS,
    ("qwen", "hash_ids"): NOT_HASHES,
    ("qwen", "chat_id"): [None, 1.5, [], {}, math.nan],
    ("qwen", "parent_chat_id"): [1.5, [], {}, math.nan],
    ("tokens", "prompt_token_ids"): NOT_TOKENS,
    ("tokens", "output_token_ids"): [7, {}, [1.5], [True], ["1"], [-1], [2**31], [HUGE]],
    ("tokens", "output_length"): NOT_LENGTHS,
    ("tokens", "timestamp"): NOT_TIMES,
    ("tokens", "session_id"): [1.5, [], {}],
    ("text", "prompt"): [None, 7, {}, True, ""],
    ("text", "messages"): [None, 7, "text", {}],
    ("text", "timestamp"): NOT_TIMES,
    **{
        (kind, name): values
        for kind in ("mooncake", "qwen", "tokens", "text")
        for name, values in {
            "end_session": [0, 1, "true", [], {}],
            "expected_idle_s": NOT_SECONDS,
            "ttl_s": NOT_SECONDS,
            "cache_priority": ["50", [], {}, True, 50.0, -1, 101, HUGE],
        }.items()
    },
    ("mooncake", "session_id"): [1.5, [], {}],
    ("qwen", "session_id"): [1.5, [], {}],
    ("text", "session_id"): [1.5, [], {}],
}
ONE_BLOCK: dict[str, Record] = {
    "mooncake": mooncake(1, 1, input_length=512),
    "qwen": qwen(1, -1, 1.0, 1),
    "tokens": tokens(1, [1, 2, 3], length=4),
    "text": {"prompt": "Hello", "timestamp": 1},
}
MISSING = [
    ("mooncake", "timestamp"),
    ("mooncake", "input_length"),
    ("mooncake", "hash_ids"),
    ("qwen", "timestamp"),
    ("qwen", "input_length"),
    ("qwen", "hash_ids"),
    ("qwen", "chat_id"),
    ("tokens", "prompt_token_ids"),
    ("text", "prompt"),
]


def assert_named_and_counted(folder: Path, good: Record, bad: Line, field: str = "") -> None:
    """The bad line in the middle is named with its field, and with `skip_bad` it is all that is missing."""
    with pytest.raises(TraceError, match=rf"trace\.jsonl, line 2: .*{field}.*--skip-bad") as caught:
        list(trace_of(folder, good, bad, good, encode=encode))
    assert len(str(caught.value)) < 1000
    left = trace_of(folder, good, bad, bad, good, bad, encode=encode, skip_bad=True)
    for _ in range(2):  # counted anew each time
        assert len(list(left)) == 2
        assert left.num_skipped == 3


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [(kind, field, value) for (kind, field), values in WRONG_VALUES.items() for value in values],
    ids=lambda value: repr(value)[:20],
)
def test_a_wrong_value_is_named_by_its_line(kind: str, field: str, value: Any, tmp_path: Path) -> None:
    shown = "" if field in ("prompt", "messages") else field
    assert_named_and_counted(tmp_path, ONE_BLOCK[kind], {**ONE_BLOCK[kind], field: value}, shown)


@pytest.mark.parametrize("kind", ["mooncake", "qwen", "tokens", "text"])
@pytest.mark.parametrize("session_id", ["", "x" * 257, 10**300])
def test_a_session_that_the_cache_cannot_be_told_is_wrong_where_it_is_told(
    kind: str, session_id: int | str, tmp_path: Path
) -> None:
    good = {**ONE_BLOCK[kind], "session_id": session_id}
    assert_named_and_counted(tmp_path, good, {**good, "ttl_s": 7}, "session_id")


@pytest.mark.parametrize(("kind", "field"), MISSING)
def test_a_missing_field_is_named_by_its_line(kind: str, field: str, tmp_path: Path) -> None:
    left = {name: value for name, value in ONE_BLOCK[kind].items() if name != field}
    assert_named_and_counted(tmp_path, ONE_BLOCK[kind], left)


SESSION = weka(weka_request(0, 1), weka_request(1, 1, 2))


@pytest.mark.parametrize(
    "changes",
    [
        *({"requests": value} for value in (None, 7, "x", {}, [1], [None], [[]], ["x"])),
        *({"block_size": value} for value in (None, 128, "64", 0, -64, 64.5, [])),
        *({"requests": [weka_request(0, 1, t=value)]} for value in NOT_TIMES),
        *({"requests": [weka_request(0, 1, **{"in": value})]} for value in [*NOT_COUNTS, 0]),
        *({"requests": [weka_request(0, 1, out=value)]} for value in NOT_LENGTHS),
        *({"requests": [weka_request(0, 1, hash_ids=value)]} for value in NOT_HASHES),
        {"requests": [{"t": 0, "in": 64, "out": 1}]},
        {"requests": [{"in": 64, "out": 1, "hash_ids": [1]}]},
        {"requests": [{"t": 0, "out": 1, "hash_ids": [1]}]},
        {"requests": [sub_agent(0, weka_request(-1, 1))]},
        {"requests": [{**sub_agent(0), "requests": [7]}]},
        {"requests": [sub_agent(-1, weka_request(0, 1))]},
        {"requests": [sub_agent(math.nan, weka_request(0, 1))]},
    ],
    ids=lambda changes: repr(changes)[:60],
)
def test_a_bad_session_is_named_by_its_line(changes: Record, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"trace\.jsonl, line 2: .*--skip-bad"):
        list(trace_of(tmp_path, SESSION, {**SESSION, **changes}, SESSION))
    left = trace_of(tmp_path, SESSION, {**SESSION, **changes}, SESSION, skip_bad=True)
    assert len(list(left)) == 4
    assert left.num_skipped == 1


def test_a_session_without_requests_is_named_by_its_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"line 2: .*requests"):
        list(trace_of(tmp_path, SESSION, {"id": "x", "block_size": 64}))


def test_a_bad_session_is_named_by_its_file(tmp_path: Path) -> None:
    bad = weka(weka_request(0, 1, out=-1))
    folder = folder_of(tmp_path, a=SESSION, b=bad, c=SESSION)
    with pytest.raises(TraceError, match=r"b\.json, line 1: out=-1"):
        list(Trace(folder))
    left = Trace(folder, skip_bad=True)
    assert len(list(left)) == 4
    assert left.num_skipped == 1


def test_a_sub_agent_without_requests_is_no_request(tmp_path: Path) -> None:
    (request,) = Trace(folder_of(tmp_path, a=weka(weka_request(0, 1), sub_agent(1))))
    assert request.arrival == 0


NOT_RECORDS: dict[str, str | bytes] = {
    "half a record": json.dumps(mooncake(0, 1, 2))[:-9],
    "two records": json.dumps(mooncake(0, 1)) * 2,
    "text": "hello",
    "a list": "[1, 2]",
    "a number": "7",
    "a string": '"mooncake"',
    "null": "null",
    "an empty object": "{}",
    "a comment": "# timestamp, input_length",
    "single quotes": "{'timestamp': 0}",
    "Latin-1": '{"timestamp": 0, "caf\u00e9": 1}'.encode("latin-1"),
    "no UTF-8": b"\xff\xfe\x80\x81",
    "zeros": bytes(50),
    "bytes": bytes(b for b in range(256) if b != ord("\n")),
    "a number of 5,000 digits": '{"timestamp": ' + "9" * 5000 + "}",
    "deep lists": "[" * 100_000,
    "deep lists, closed": "[" * 100_000 + "]" * 100_000,
    "deep objects": '{"requests": ' * 50_000,
    "a deep value": json.dumps(mooncake(0, 1))[:-1] + ', "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
}


@pytest.mark.parametrize("line", NOT_RECORDS)
def test_a_line_that_is_no_record_is_named(line: str, tmp_path: Path) -> None:
    assert_named_and_counted(tmp_path, ONE_BLOCK["mooncake"], NOT_RECORDS[line])


@pytest.mark.parametrize("bad", ["a list", "half a record", "no UTF-8", "deep lists"])
def test_a_bad_first_line_is_named_too(bad: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"trace\.jsonl, line 1: "):
        trace_of(tmp_path, NOT_RECORDS[bad], *GOOD["mooncake"])
    trace = trace_of(tmp_path, NOT_RECORDS[bad], *GOOD["mooncake"], skip_bad=True)
    assert len(list(trace)) == 3
    assert trace.num_skipped == 1


def test_a_line_that_was_cut_off_at_the_end_is_named(tmp_path: Path) -> None:
    path = trace_of(tmp_path, *GOOD["mooncake"]).path
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TraceError, match=r"line 3: it is not JSON"):
        list(Trace(path))
    assert len(list(Trace(path, skip_bad=True))) == 2


@pytest.mark.parametrize("content", [b"", b"\n\n   \n\t\n"])
@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_file_without_records_is_told_what_records_are(content: bytes, skip_bad: bool, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_bytes(content)
    with pytest.raises(TraceError, match=r"trace\.jsonl: .*no JSON object") as caught:
        Trace(tmp_path / "trace.jsonl", skip_bad=skip_bad)
    assert all(kind in str(caught.value) for kind in GOOD)


@pytest.mark.parametrize("record", [{}, {"a": 1, "timestamp": 0}, {"hash_ids": [1], "input_length": 512}])
def test_an_unknown_format_is_told_the_known_ones(record: Record, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"trace\.jsonl: ") as caught:
        trace_of(tmp_path, record)
    assert all(kind in str(caught.value) for kind in GOOD)
    assert all(repr(name) in str(caught.value) for name in record)


@pytest.mark.parametrize("block_size", [0, -64, "64", None, True, HUGE])
def test_a_first_block_size_that_is_none_is_refused(block_size: Any, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="block_size"):
        list(trace_of(tmp_path, mooncake(0, 1, block_size=block_size)))
    with pytest.raises(TraceError, match="block_size"):
        list(trace_of(tmp_path, weka(weka_request(0, 1), block_size=block_size)))


def test_a_folder_needs_sessions(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("nothing here")
    with pytest.raises(TraceError, match=r"no \.json files"):
        Trace(tmp_path)


def test_of_a_folder_with_other_traces_each_file_is_read(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 10)):
        write_trace(tmp_path / f"{name}.jsonl", [mooncake(first, 1), mooncake(first + 5, 1, first)])
    trace = Trace(tmp_path)
    assert [request.arrival for request in trace] == [0, 5, 10, 15]
    assert paths_of(Workload(trace)) == [[0], [0, 1], [0], [0, 2]]


def test_a_bad_line_in_a_folder_is_named_by_its_file(tmp_path: Path) -> None:
    write_trace(tmp_path / "a.jsonl", GOOD["mooncake"])
    write_trace(tmp_path / "b.jsonl", [mooncake(9, 1), mooncake(9, 1, output_length=-1)])
    with pytest.raises(TraceError, match=r"b\.jsonl, line 2: output_length=-1"):
        list(Trace(tmp_path))


def test_a_file_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Trace(tmp_path / "nothing.jsonl")


@pytest.mark.parametrize("kind", ["mooncake", "qwen", "weka"])
def test_numbers_of_hashes_that_do_not_fit_the_lengths_are_counted(kind: str, tmp_path: Path) -> None:
    make: Callable[..., Record] = {
        "mooncake": mooncake,
        "qwen": lambda seconds, *ids, **changes: qwen(1, -1, seconds, *ids, **changes),
        "weka": weka_request,
    }[kind]
    size, length = {"mooncake": (512, "input_length"), "qwen": (16, "input_length"), "weka": (64, "in")}[kind]
    fits = [make(0, 1, 2), make(1, 1, 2, **{length: 2 * size - 1}), make(2, 1, 2, **{length: 3 * size - 1})]
    wrong = [make(3, 1, 2, **{length: size}), make(4, 1, 2, **{length: 3 * size}), make(5, **{length: size})]
    # One a line; or, of sessions, all in one.
    trace = trace_of(tmp_path, weka(*fits, *wrong)) if kind == "weka" else trace_of(tmp_path, *fits, *wrong)
    for _ in range(2):
        assert len(list(trace)) == 6
        assert (trace.num_inconsistent, trace.num_skipped, trace.block_size) == (3, 0, size)


@pytest.mark.parametrize("block_size", [1, 16, 64, 128, 1024])
def test_the_lengths_tell_the_tokens_of_a_block(block_size: int, tmp_path: Path) -> None:
    rng = random.Random(block_size)
    lengths = [rng.randint(1, 50 * block_size) for _ in range(40)]
    records = [
        mooncake(i, *range(-(-length // block_size)), input_length=length) for i, length in enumerate([*lengths, 5000])
    ]
    trace = trace_of(tmp_path, *records)
    assert trace.block_size == block_size
    assert len(list(trace)) == 41
    assert trace.num_inconsistent == 0


# ---------------------------------------------------------------- hostile ones


@pytest.mark.parametrize(
    "parents",
    [
        {1: 1},
        {1: 2, 2: 1},
        {1: 2, 2: 3, 3: 1},
        {i: (i + 1) % 1000 for i in range(1000)},
        {i: i - 1 for i in range(2000)},
        {i: i + 1 for i in range(2000)},
    ],
    ids=["itself", "two", "three", "a thousand", "a long chat", "a long chat backwards"],
)
def test_circles_and_long_lines_of_parents_end(parents: dict[int, int], tmp_path: Path) -> None:
    records = [qwen(chat, parent, 0, 1) for chat, parent in [*parents.items(), *parents.items()]]
    trace = trace_of(tmp_path, *records)
    sessions = [request.session for request in trace]
    assert len(sessions) == 2 * len(parents)
    assert all(isinstance(session, int) for session in sessions)
    assert sessions == [request.session for request in trace]


def test_times_that_go_back_are_counted_and_stand_still(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, *(mooncake(seconds, 1) for seconds in (5, 3, 4, 6, 0, 6, 7)))
    for _ in range(2):
        assert [request.arrival for request in trace] == [0, 0, 0, 1, 1, 1, 2]
        assert trace.num_out_of_order == 3


def test_requests_of_a_session_are_put_in_order(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, weka(weka_request(5, 1), weka_request(3, 1, 2), weka_request(4, 1, 2, 3)))
    assert [request.arrival for request in trace] == [0, 1, 2]
    assert [request.num_prompt_tokens for request in trace] == [128, 192, 64]
    assert trace.num_out_of_order == 0


def test_a_line_of_ten_megabytes_is_a_line(tmp_path: Path) -> None:
    ids = range(10**8, 10**8 + 10**6)
    trace = trace_of(tmp_path, mooncake(0, *ids), mooncake(1, *ids[: 10**5]))
    assert trace.path.stat().st_size > 10_000_000
    reuse = reuse_of(Workload(trace))
    assert (reuse.num_nodes, reuse.num_hits) == (10**6, 10**5)


@pytest.mark.parametrize(
    "line",
    [
        "x" * 10_000_000,
        '{"timestamp": "' + "x" * 10_000_000,
        "[" * 10_000_000,
        json.dumps({"timestamp": "x" * 10_000_000, "input_length": 1, "hash_ids": [1]}),
        json.dumps({"timestamp": [0] * 3_000_000, "input_length": 1, "hash_ids": [1]}),
        json.dumps({"timestamp": 0, "input_length": 1, "hash_ids": [0] * 3_000_000 + [0.5]}),
        json.dumps({"x" * 10_000_000: 0}),
        "9" * 10_000_000,
    ],
    ids=["no JSON", "half a text", "deep", "a text", "a list", "a hash", "a name", "a number"],
)
def test_a_bad_line_of_ten_megabytes_is_named_in_few_words(line: str, tmp_path: Path) -> None:
    good = ONE_BLOCK["mooncake"]
    with pytest.raises(TraceError, match=r"trace\.jsonl, line 2: .*--skip-bad") as caught:
        list(trace_of(tmp_path, good, line, good))
    assert len(str(caught.value)) < 1000
    trace = Trace(tmp_path / "trace.jsonl", skip_bad=True)
    assert len(list(trace)) == 2
    assert trace.num_skipped == 1


def test_an_unknown_format_with_endless_names_is_refused_in_few_words(tmp_path: Path) -> None:
    for record in ({"x" * 10_000_000: 0}, dict.fromkeys(map(str, range(100_000)))):
        with pytest.raises(TraceError) as caught:
            trace_of(tmp_path, record)
        assert len(str(caught.value)) < 3000


# ---------------------------------------------------------------- memory


def peak_of(read: Callable[[], None]) -> int:
    """The most bytes that are held at once on the way."""
    tracemalloc.start()
    try:
        read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# Numbers below 256 are made once by Python: what is measured are the lists, and the trace is quickly read.


@pytest.mark.parametrize("pack", [None, gzip.compress, zst], ids=["plain", "gz", "zst"])
def test_a_long_trace_of_few_blocks_takes_little_memory(pack: Callable[[bytes], bytes] | None, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", (mooncake(i, *range(i % 7, 250)) for i in range(2000)))
    assert path.stat().st_size > 2_000_000
    if pack is not None:
        path.write_bytes(pack(path.read_bytes()))

    def read() -> None:
        assert sum(1 for _ in Workload(Trace(path))) == 2000

    assert peak_of(read) < 700_000


@pytest.mark.parametrize("how", ["a file each", "a line each"])
def test_long_sessions_of_few_blocks_take_little_memory(how: str, tmp_path: Path) -> None:
    session = weka(*(weka_request(i, *range(100 + i)) for i in range(150)), hash_id_scope="global")
    path = tmp_path
    if how == "a file each":
        folder_of(tmp_path, **{f"s{i}": session for i in range(30)})
    else:
        path = write_trace(tmp_path / "all.jsonl", [session] * 30)

    def read() -> None:
        longest = max(len(access.path) for _, access in Workload(Trace(path)))
        assert longest == 249

    assert peak_of(read) < 4_000_000  # all 30 at once are 8 MB


def test_the_books_on_reuse_grow_with_blocks_and_not_with_accesses(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", (mooncake(i, *range(250)) for i in range(1500)))

    def read() -> None:
        assert reuse_of(Workload(Trace(path))).num_hits == 1499 * 250

    assert peak_of(read) < 1_500_000


# ---------------------------------------------------------------- what was read wrongly once


def test_a_cut_zst_is_not_a_whole_one(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", (mooncake(i, *range(i, i + 40)) for i in range(3000)))
    packed = zst(path.read_bytes())
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(TraceError, match=r"trace\.jsonl, after line \d+: it cannot be unpacked: it ends"):
        list(Trace(path, skip_bad=True))


def test_a_session_with_a_bad_request_is_left_out_whole(tmp_path: Path) -> None:
    good, bad = weka(weka_request(0, 1)), weka(weka_request(0, 1), weka_request(1, 2, out=-1), weka_request(2, 3))
    trace = trace_of(tmp_path, good, bad, skip_bad=True)
    assert (len(list(trace)), trace.num_skipped) == (1, 1)


def test_a_stray_brace_is_one_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("{\n" + "".join(json.dumps(mooncake(i, 1)) + "\n" for i in range(3)))
    trace = Trace(path, skip_bad=True)
    assert (len(list(trace)), trace.num_skipped) == (3, 1)
    with pytest.raises(TraceError, match="line 1"):
        Trace(path)


def test_in_a_folder_empty_files_and_folders_are_passed_over(tmp_path: Path) -> None:
    folder_of(tmp_path, b=weka(weka_request(0, 1)))
    (tmp_path / "a.json").write_text("")
    (tmp_path / "c.json").mkdir()
    assert len(list(Trace(tmp_path))) == 1


def test_what_a_template_raises_is_the_fault_of_its_line(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [{"messages": [1, 2]}])

    def encode(messages: Any) -> list[int]:
        return [len(message["content"]) for message in messages]

    with pytest.raises(TraceError, match="line 1: its prompt cannot be turned into tokens"):
        list(Trace(path, encode=encode))


def test_an_aborted_request_has_no_answer(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", [{"prompt_token_ids": [1, 2], "output_token_ids": []}])
    (request,) = Trace(path)
    assert request.num_output_tokens == 0
    (access,) = (access for _, access in Workload(Trace(path), 1))
    assert len(access.path) == 2
