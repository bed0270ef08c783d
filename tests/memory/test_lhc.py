"""What LHC keeps and what it lets go: the reason that it exists, and each of its rules, through the page table."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest

from pagetable.memory import BlockManager, CacheHints, OutOfBlocksError
from pagetable.memory.candidates import SHORTEST_LIST
from pagetable.memory.hazard import NEW, SHARED, bucket_of, class_row
from pagetable.memory.hints import NO_HINTS
from tests.memory.lhc_structure import check_structure
from tests.memory.plain_sequence import PlainSequence, admit, compute
from tests.memory.request_stream import serve
from tests.memory.test_lhc_fuzz import policy_of
from tests.memory.timed_requests import Clock, Request, play, timed_manager

Think = Callable[[random.Random], float]


def chats(
    seed: int, duration: float, every: float, think: Think, share: float = 0.7, fresh: count[int] | None = None
) -> list[Request]:
    """A new chat of 4 blocks of 16 every so many seconds; this share of all turns is followed by one of 2 more."""
    rng, requests, start = random.Random(seed), list[Request](), 0.0
    fresh = fresh or count(1)
    while (start := start + rng.expovariate(1 / every)) < duration:
        at, kind, tokens = start, "new", [next(fresh)] * (4 * 16 + 1)
        while at < duration:
            requests.append(Request(at, tokens, kind))
            if rng.random() >= share:
                break
            at, kind, tokens = at + think(rng), "back", [*tokens, *[next(fresh)] * (2 * 16)]
    return requests


def share_of_hits(policy: str, num_blocks: int, requests: list[Request]) -> tuple[float, float]:
    """Of the blocks that those who come back could hit; and the mean seconds that a block stays."""
    manager, clock = timed_manager(num_blocks, 16, policy)
    hits = play(manager, clock, requests)
    possible = sum((len(request.token_ids) - 1) // 16 - 2 for request in requests if request.kind == "back")
    return hits["back"] / possible, clock.now * num_blocks / max(1, manager.stats().evictions)


def contents(manager: BlockManager) -> list[int]:
    """The first token of each cached idle block, the next victim first."""
    return [manager.blocks[block_id].token_ids[0] for block_id in manager.free_block_ids.cached]


def is_cached(manager: BlockManager, token_ids: list[int]) -> bool:
    """Whether all full blocks of a prompt are, the last included."""
    return manager.can_allocate(PlainSequence([*token_ids, -1], manager.block_size)) == len(token_ids)


# ---------------------------------------------------------------- why it exists


@pytest.mark.parametrize("seed", range(2))
def test_of_chats_that_come_back_after_lru_has_dropped_them_it_keeps_a_part(seed: int):
    """People read for 45 to 60 s, LRU keeps for 30 s: it hits next to nothing, where half could be kept."""
    requests = chats(seed, 2500, 1.0, lambda rng: rng.uniform(45, 60))
    lru, residence = share_of_hits("lru", 780, requests)
    assert 26 < residence < 34
    lhc, _ = share_of_hits("lhc", 780, requests)
    assert lru < 0.04
    assert lhc > 0.45


def test_it_keeps_a_minority_through_the_hump_and_lets_the_others_go_early():
    requests = chats(0, 2500, 1.0, lambda rng: rng.uniform(45, 60))
    manager, clock = timed_manager(780, 16)
    play(manager, clock, requests)
    runs = {run for run in policy_of(manager)._run_of if run is not None}
    ages = np.array([clock.now - run.last.ended_at for run in runs])
    num_turns = sum(30 < clock.now - request.at < 75 for request in requests)
    assert num_turns > 100
    assert 0.2 * num_turns < (ages > 30).sum() < 0.5 * num_turns  # all of which LRU would have dropped
    assert (ages > 75).sum() < 5  # who is not back by then does not come


def test_where_everything_fits_and_where_the_latest_is_the_best_it_is_as_good_as_lru():
    slow = chats(0, 2000, 2.0, lambda rng: rng.uniform(20, 60))
    assert share_of_hits("lhc", 4000, slow)[0] == share_of_hits("lru", 4000, slow)[0] == 1.0
    fast = chats(1, 1500, 0.5, lambda rng: rng.expovariate(1 / 3))
    assert share_of_hits("lhc", 400, fast)[0] > share_of_hits("lru", 400, fast)[0] - 0.01


# ---------------------------------------------------------------- who goes first


def test_left_behind_blocks_go_first_once_it_is_known_that_nobody_returns_to_them():
    manager, clock = timed_manager(100)
    fresh = count(1000)
    for _ in range(150):  # every session takes a turn again, differently, and goes on from there
        prompt, answers = [next(fresh) for _ in range(4)], [[next(fresh) for _ in range(4)] for _ in range(3)]
        for tail in (answers[0], answers[1], [*answers[1], *answers[2]]):
            serve(manager, [*prompt, *tail])
            clock.now += 5
    policy_of(manager).hazards.refresh(clock.now)
    serve(manager, [1, 2, 3, 4, 5, 6, 7, 8])
    serve(manager, [1, 2, 3, 4, 15, 16, 17, 18])
    first = [token for token in contents(manager) if token < 1000]
    assert first[:4] == [8, 7, 6, 5]
    assert first[-4:] == [4, 3, 2, 1]


def test_a_last_block_goes_first_where_sessions_seldom_go_on_from_it():
    manager, clock = timed_manager(1000)
    for i in range(0, 300, 3):
        serve(manager, [1000 + i, 1001 + i, 1002 + i])
        serve(manager, [1000 + i, 1001 + i, 5000 + i, 5001 + i])  # the last block was a partial one
        clock.now += 1
    manager.reset_prefix_cache()
    for i in range(4):
        clock.now += 0.1
        serve(manager, [10 * i + 1, 10 * i + 2, 10 * i + 3])
    clock.now += 4.7  # all in one bucket of age
    order = contents(manager)
    assert order[:4] == [3, 13, 23, 33]
    assert order[4:] == [2, 1, 12, 11, 22, 21, 32, 31]


def test_an_ended_session_goes_first_and_once_ends_have_come_true_before_older_ones_too():
    manager, clock = timed_manager(400)
    fresh = count(1000)

    def old_and_ended() -> list[int]:
        """Which of two sessions goes first: one that has waited for a minute, or one that has just ended."""
        serve(manager, [1, 2])
        clock.now += 60
        serve(manager, [3, 4], CacheHints("a", end_session=True))
        order = [token for token in contents(manager) if token < 5]
        manager.reset_prefix_cache()
        return order

    assert old_and_ended() == [2, 1, 4, 3]  # nothing is known yet: a minute is long
    for i in range(400):
        clock.now += 1
        chat = [next(fresh), next(fresh)]
        serve(manager, chat, CacheHints(f"{i}"))
        clock.now += 61
        serve(manager, [*chat, next(fresh)], CacheHints(f"{i}", end_session=True))
    assert old_and_ended() == [4, 3, 2, 1]


def test_a_session_past_its_time_to_live_goes_before_one_that_is_not():
    manager, clock = timed_manager(16)
    serve(manager, [1, 2, 3], CacheHints("a", ttl_s=30))
    serve(manager, [4, 5, 6], CacheHints("b", ttl_s=25))
    clock.now = 28
    assert contents(manager)[:1] == [6]
    clock.now = 1000
    serve(manager, [7], CacheHints("c", ttl_s=30))
    assert contents(manager)[-1] == 7


def test_of_equals_the_one_that_waits_longest_goes_first_as_far_as_the_list_reaches():
    manager, clock = timed_manager(1000)
    for i in range(SHORTEST_LIST):
        clock.now += 1e-4
        serve(manager, [1000 + i])
    clock.now += 2.01  # all in one bucket of age
    assert contents(manager) == [1000 + i for i in range(SHORTEST_LIST)]


def test_what_two_sessions_share_outlives_what_one_has():
    manager, clock = timed_manager(30)
    for i in range(20):
        clock.now += 1
        serve(manager, [1, 2, 3, 100 + i, 200 + i])
    clock.now += 10
    assert contents(manager)[-3:] == [3, 2, 1]
    for i in range(60):
        clock.now += 1
        serve(manager, [1000 + i, 2000 + i])
        if i % 20 == 0:
            serve(manager, [1, 2, 3, 300 + i])
    assert is_cached(manager, [1, 2, 3])


def test_a_priority_is_compared_with_the_others_of_the_same_salt():
    manager, _ = timed_manager(100)
    for i in range(300):  # this tenant shouts all the time
        serve(manager, [1000 + i], CacheHints(cache_priority=100), "loud")
    manager.reset_prefix_cache()
    for i, (priority, salt) in enumerate([(50, "calm"), (60, "calm"), (100, "loud"), (40, "calm"), (None, None)]):
        serve(manager, [i], CacheHints(cache_priority=priority), salt)
    assert contents(manager)[:1] == [3]
    assert contents(manager)[-1] == 1


# ---------------------------------------------------------------- preempted and given up


def preempted(manager: BlockManager, token_ids: list[int]) -> PlainSequence:
    seq = PlainSequence(token_ids, manager.block_size)
    admit(manager, seq)
    compute(manager, seq)
    manager.preempt(seq)
    return seq


def test_a_preempted_request_keeps_its_blocks_as_long_as_anything_else_can_go():
    manager, clock = timed_manager(8)
    seq = preempted(manager, [1, 2, 3])
    for i in range(20):
        clock.now += 100
        serve(manager, [100 + i, 200 + i, 300 + i])
        check_structure(manager)
    assert is_cached(manager, [1, 2, 3])
    assert admit(manager, seq) == 2
    manager.preempt(seq)
    flood = PlainSequence(list(range(50, 58)), 1)
    admit(manager, flood)  # takes all there is
    assert not is_cached(manager, [1])
    manager.deallocate(flood)
    manager.deallocate(seq)
    check_structure(manager)


@pytest.mark.parametrize("was_preempted", [False, True])
def test_a_request_that_is_given_up_protects_nothing_any_more(was_preempted: bool):
    """What an aborted request had found, and had not yet used, once stayed until everything else was gone."""
    manager, clock = timed_manager(16)
    serve(manager, [1, 2, 3, 4])
    clock.now = 1
    seq = PlainSequence([1, 2, 3, 4], 1)
    admit(manager, seq)
    if was_preempted:
        manager.preempt(seq)
    manager.deallocate(seq)
    check_structure(manager)
    for i in range(6):
        clock.now += 1
        serve(manager, [100 + i, 200 + i, 300 + i])
    assert not is_cached(manager, [1])
    assert is_cached(manager, [105, 205, 305])


# ---------------------------------------------------------------- corners of the page table


def test_two_that_compute_the_same_at_once_share_and_leave_one_record():
    manager, clock = timed_manager(20)
    first, second = PlainSequence([1, 2, 3, 4], 1), PlainSequence([1, 2, 3, 9], 1)
    for seq in (first, second):
        admit(manager, seq)
    for seq in (first, second):
        compute(manager, seq)
        check_structure(manager)
    clock.now = 5
    for seq in (first, second):
        manager.deallocate(seq)
        check_structure(manager)
    assert contents(manager)[-3:] == [3, 2, 1]
    assert policy_of(manager).hazards.num_waiting == 2
    serve(manager, [1, 2, 3, 4, 5])
    check_structure(manager)


def test_where_all_hashes_collide_what_could_be_registered_is_evicted_like_all_else(short_hash: Callable[[int], None]):
    short_hash(1)
    manager, clock = timed_manager(4)
    for i in range(30):
        clock.now += 1
        serve(manager, [i, i + 1, i + 2])
        check_structure(manager)
        manager.check()
    assert len(manager.hash_to_block_id) == 1


def test_after_a_reset_the_contents_are_gone_and_the_hazards_are_not():
    manager, clock = timed_manager(50)
    play(manager, clock, [Request(i + 20 * turn, [i] * (4 + turn)) for i in range(200) for turn in range(2)])
    policy = policy_of(manager)
    policy.hazards.refresh(clock.now)
    before = policy.hazards.index.copy()
    running = PlainSequence([7, 8, 9], 1)
    admit(manager, running)
    compute(manager, running, 2)
    manager.reset_prefix_cache()
    check_structure(manager)
    assert (len(policy), policy._num_ghosts, policy.hazards.num_waiting) == (0, 0, 0)
    np.testing.assert_allclose(policy.hazards.index, before, rtol=0.05)
    compute(manager, running)
    manager.deallocate(running)
    assert not is_cached(manager, [7])
    for _ in range(3):
        serve(manager, [7, 8, 9])
        check_structure(manager)
    assert is_cached(manager, [7, 8, 9])


def test_a_refused_request_was_never_there():
    manager, clock = timed_manager(6)
    serve(manager, [1, 2, 3])
    clock.now = 30
    state, order = policy_of(manager).state(), contents(manager)
    for tokens in ([1, 2, 3, 4, 5, 6, 7], [9] * 7):
        seq = PlainSequence(tokens, 1)
        assert manager.can_allocate(seq) == -1
        with pytest.raises(OutOfBlocksError):
            manager.allocate(seq, 0)
    assert (policy_of(manager).state(), contents(manager)) == (state, order)
    check_structure(manager)


def test_a_session_is_known_again_by_what_left_long_ago():
    """Ghosts: it comes back after all of its blocks have gone, and counts as a reuse of its class all the same."""
    manager, clock = timed_manager(4)
    serve(manager, [1, 2, 3])
    for i in range(4):
        serve(manager, [10 + i, 20 + i])
    assert not is_cached(manager, [1])
    clock.now = 50
    serve(manager, [1, 2, 3, 4])
    check_structure(manager)
    hazards = policy_of(manager).hazards
    hazards.refresh(clock.now)
    row = class_row(NEW, 3, 1, 0)
    assert hazards.events[row, bucket_of(50)] == pytest.approx(1, rel=0.5)
    assert hazards.events[SHARED].sum() == 0


@pytest.mark.parametrize("hints", [NO_HINTS, CacheHints("a")])
def test_without_prefix_caching_it_is_told_nothing(hints: CacheHints):
    manager = BlockManager(8, 1, eviction_policy="lhc", enable_prefix_caching=False, clock=Clock())
    for _ in range(20):
        serve(manager, [1, 2, 3], hints)
    assert manager.end_session("a") == 0
    assert len(policy_of(manager)) == 0
    assert policy_of(manager)._num_uses == 0
