"""Ends that are declared by hindsight: whose they are, how many are true, and what is a lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagetable.memory.hints import NO_HINTS, CacheHints
from pagetable.replay.blocks import Workload
from pagetable.replay.cache_replay import CacheReplay
from pagetable.replay.hinting import with_ends, with_last_uses
from pagetable.replay.readers import Trace
from pagetable.replay.trace import TraceError
from tests.replay.small_traces import Record, hashed_workload, mooncake, play, qwen, write_trace


def workload_of(folder: Path, *records: Record) -> Workload:
    return Workload(Trace(write_trace(folder / "trace.jsonl", records)))


def sessions_of(folder: Path, *sessions: int | str) -> Workload:
    """A request of one block for each, of these sessions."""
    return workload_of(folder, *(mooncake(i, i, session_id=session) for i, session in enumerate(sessions)))


def ends_of(workload: Workload, share: float, lies: float = 0.0, seed: int = 0) -> list[bool | None]:
    """By request: whether it declares an end; None if it says nothing."""
    hints = [request.hints for request, _ in with_ends(workload, share, lies, seed)]
    assert all(hint == NO_HINTS or hint == CacheHints(hint.session_id, hint.end_session) for hint in hints)
    return [None if hint.session_id is None else hint.end_session for hint in hints]


def test_the_last_request_of_each_session_ends_it(tmp_path: Path) -> None:
    workload = sessions_of(tmp_path, 1, 2, 1, 3, 2, 1)
    assert ends_of(workload, 1.0) == [False, False, False, True, True, True]
    assert ends_of(workload, 0.0) == [None] * 6


def test_requests_are_those_of_the_workload(tmp_path: Path) -> None:
    workload = sessions_of(tmp_path, 1, 2, 1)
    plain, declared = list(workload), list(with_ends(workload, 1.0))
    assert [request.session for request, _ in declared] == [1, 2, 1]
    for (request, access), (other, other_access) in zip(plain, declared, strict=True):
        assert (request.arrival, request.hash_ids, request.session) == (other.arrival, other.hash_ids, other.session)
        assert access.path.tolist() == other_access.path.tolist()


def test_each_session_has_a_name_of_its_own(tmp_path: Path) -> None:
    workload = sessions_of(tmp_path, 1, "1", "", "x" * 1000, 1, "1", "", "x" * 1000)
    names = [request.hints.session_id for request, _ in with_ends(workload, 1.0)]
    assert names[:4] == names[4:]
    assert len(set(names)) == 4


def test_sessions_may_be_those_of_chats_or_guessed(tmp_path: Path) -> None:
    chats = workload_of(tmp_path, qwen(1, -1, 0, 1), qwen(2, -1, 1, 2), qwen(3, 1, 2, 1, 3))
    assert ends_of(chats, 1.0) == [False, True, True]
    guessed = hashed_workload(tmp_path, [(1, 2), (5, 6), (1, 2, 3), (1, 2, 3, 4)])
    assert ends_of(guessed, 1.0) == [False, True, False, True]


def test_a_share_of_the_sessions_tells_and_a_larger_one_holds_it(tmp_path: Path) -> None:
    workload = sessions_of(tmp_path, *range(20), *range(20))
    before: set[int] = set()
    for share, num_telling in [(0.0, 0), (0.1, 2), (0.5, 10), (0.75, 15), (1.0, 20)]:
        ends = ends_of(workload, share)
        telling = {i for i in range(20) if ends[i] is not None}
        assert len(telling) == num_telling
        assert before <= telling
        assert ends == [False if i in telling else None for i in range(20)] + [i in telling or None for i in range(20)]
        before = telling


def test_the_seed_chooses(tmp_path: Path) -> None:
    workload = sessions_of(tmp_path, *range(20), *range(20))
    assert ends_of(workload, 0.5, 0.5, seed=3) == ends_of(workload, 0.5, 0.5, seed=3)
    assert len({str(ends_of(workload, 0.5, seed=seed)) for seed in range(5)}) == 5
    assert len({str(ends_of(workload, 1.0, 0.5, seed=seed)) for seed in range(5)}) == 5


def test_only_those_that_tell_lie_and_all_true_ends_are_told(tmp_path: Path) -> None:
    workload = sessions_of(tmp_path, *(list(range(20)) * 21))
    assert ends_of(workload, 1.0, lies=1.0) == [True] * 420
    true = ends_of(workload, 0.5)
    some, more = ends_of(workload, 0.5, lies=0.1), ends_of(workload, 0.5, lies=0.3)
    for ends in (some, more):
        assert [end is None for end in ends] == [end is None for end in true]
        assert all(end for end, is_true in zip(ends, true, strict=True) if is_true)
    assert some.count(True) - 10 == pytest.approx(0.1 * 200, abs=12)
    assert more.count(True) - 10 == pytest.approx(0.3 * 200, abs=18)
    assert all(b for a, b in zip(some, more, strict=True) if a)


def test_what_the_trace_itself_hints_is_left_out(tmp_path: Path) -> None:
    records = [mooncake(i, i, session_id=i // 2, end_session=True, ttl_s=5) for i in range(4)]
    workload = workload_of(tmp_path, *records)
    assert ends_of(workload, 0.0) == [None] * 4
    assert ends_of(workload, 1.0) == [False, True, False, True]


def test_requests_that_until_leaves_out_are_no_later_ones(tmp_path: Path) -> None:
    records = [mooncake(i, i, session_id=0) for i in range(3)]
    workload = Workload(Trace(write_trace(tmp_path / "trace.jsonl", records)), until=1.0)
    assert ends_of(workload, 1.0) == [False, True]


def test_a_true_end_saves_what_comes_back_and_a_lie_costs_it(tmp_path: Path) -> None:
    paths = [(1, 2), (3, 4), (5, 6), (1, 2), (7, 8), (9, 10), (11, 12), (9, 10)]  # each fills half of the cache
    workload = hashed_workload(tmp_path, paths)

    def hits(lies: float) -> list[int]:
        replay = CacheReplay(workload, "lru", 4)
        for request, access in with_ends(workload, 1.0, lies):
            replay.serve(request, access)
        return replay.finish().hits

    assert play(workload, "lru", 4).hits == [0, 0, 0, 0, 0, 0, 0, 2]
    assert hits(lies=0.0) == [0, 0, 0, 2, 0, 0, 0, 2]
    assert hits(lies=1.0) == [0, 0, 0, 2, 0, 0, 0, 0]


@pytest.mark.parametrize(("share", "lies"), [(-0.1, 0), (1.1, 0), (0.5, -0.1), (0.5, 2), (float("nan"), 0)])
def test_what_is_no_share_is_refused_at_once(share: float, lies: float, tmp_path: Path) -> None:
    workload = sessions_of(tmp_path, 1)
    with pytest.raises(TraceError, match=r"share=.* and lies=.*: they must be from 0 to 1"):
        with_ends(workload, share, lies)


def test_by_hindsight_a_request_ends_its_session_when_none_of_its_own_blocks_is_used_again(tmp_path: Path) -> None:
    paths = {0: ("a", (1, 2, 3)), 1: ("a", (1, 2, 4, 5)), 2: ("b", (1, 9)), 3: ("a", (1, 2, 4, 6)), 4: ("b", (1, 9, 8))}
    records = [mooncake(i, *path, session_id=session) for i, (session, path) in paths.items()]
    requests = [request for request, _ in with_last_uses(workload_of(tmp_path, *records))]
    assert [request.hints.end_session for request in requests] == [False, False, False, True, True]
    assert all(request.hints.session_id == str(request.session) for request in requests)
