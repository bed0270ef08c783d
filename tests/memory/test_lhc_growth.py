"""What LHC and the session hints remember is bounded by the pool, and a turn costs no more the later it comes."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from itertools import count
from types import FrameType

import numpy as np
import pytest

from pagetable.memory import BlockManager, CacheHints
from pagetable.memory.hints import LONGEST_SESSION_ID, NO_HINTS
from pagetable.memory.lhc import GHOSTS, LHC, NUM_TENANTS
from tests.memory.deep_size import deep_size
from tests.memory.lhc_structure import check_structure
from tests.memory.plain_sequence import PlainSequence
from tests.memory.request_stream import serve
from tests.memory.test_lhc_fuzz import policy_of
from tests.memory.timed_requests import Clock, timed_manager

FIXED = 600_000  # bytes at most, whatever the pool: the hazard table


def bytes_per_block(manager: BlockManager) -> float:
    """Of the policy, beyond what is there whatever the pool, and of the sessions."""
    num_bytes = deep_size(manager.eviction_policy) + deep_size(manager._feed.sessions) - deep_size(LHC(1))
    return num_bytes / len(manager.blocks)


def test_the_measure_sees_containers_attributes_slots_and_arrays():
    class WithSlots:
        __slots__ = ("absent", "array")

        def __init__(self) -> None:
            self.array = np.zeros(10_000)

    text = "a" * 1000
    assert 80_000 < deep_size({1: [WithSlots()]}) < 81_000
    assert 80_000 < deep_size(np.zeros((100, 100))[:10]) < 81_000
    assert deep_size([text, text]) < 1200
    assert deep_size(LHC(1)) < FIXED


# ---------------------------------------------------------------- memory


def play_chats(manager: BlockManager, clock: Clock, seed: int) -> int:
    """Chats of 100 to 4,000 more tokens a turn, until eight times the pool has left; returns the number of requests."""
    rng, fresh = random.Random(seed), count(1)
    chats: list[list[int]] = []
    for num_requests in count(1):
        clock.now += rng.expovariate(2)
        goes_on = bool(chats) and rng.random() < 0.6
        tokens = chats.pop(rng.randrange(len(chats))) if goes_on else []
        tokens = [*tokens, *[next(fresh)] * rng.randint(100, 4000)]
        serve(manager, tokens, CacheHints(f"session {tokens[0]}"))
        chats = [*chats[-60:], tokens if len(tokens) < 16_000 else [next(fresh)]]
        assert policy_of(manager)._num_ghosts <= GHOSTS * len(manager.blocks)
        if manager.stats().evictions > 8 * len(manager.blocks):
            return num_requests
    raise AssertionError


@pytest.mark.parametrize(("block_size", "num_blocks", "bound"), [(16, 4000, 400), (512, 125, 1500), (512, 500, 1500)])
def test_memory_is_below_400_bytes_a_block_of_16_tokens_and_1500_of_512(block_size: int, num_blocks: int, bound: int):
    manager, clock = timed_manager(num_blocks, block_size)
    assert play_chats(manager, clock, seed=num_blocks) > 100
    assert policy_of(manager)._num_ghosts > 0.7 * GHOSTS * num_blocks
    assert bytes_per_block(manager) < bound


HOSTILE: dict[str, Callable[[int], tuple[list[int], CacheHints]]] = {
    "a block each": lambda i: ([i], NO_HINTS),
    "the longest names": lambda i: ([i], CacheHints(f"{i:0{LONGEST_SESSION_ID}}", ttl_s=i + 0.5, expected_idle_s=i)),
    "all ended": lambda i: ([i, i], CacheHints(f"{i:0{LONGEST_SESSION_ID}}", end_session=True)),
    "a tree": lambda i: ([i >> bit & 1 for bit in range(12)], CacheHints(str(i))),
    "one prefix": lambda i: ([*range(i % 30), -1 - i], CacheHints(str(i))),
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("num_blocks", [40, 200])
def test_whatever_clients_do_memory_stays_below_12_kilobytes_a_block(what: str, num_blocks: int):
    manager, clock = timed_manager(num_blocks)
    policy = policy_of(manager)
    sizes = []
    for i in range(16 * num_blocks):
        clock.now += 0.5
        tokens, hints = HOSTILE[what](i)
        serve(manager, tokens, hints)
        assert policy._num_ghosts <= GHOSTS * num_blocks
        if (i + 1) % (4 * num_blocks) == 0:
            sizes.append(bytes_per_block(manager))
    assert manager.stats().evictions > 6 * num_blocks
    assert sizes[-1] < 12_000
    assert sizes[-1] < 1.3 * sizes[1]  # it does not go on growing


def test_sessions_are_forgotten_with_their_blocks():
    manager, clock = timed_manager(20)
    for i in range(2000):
        clock.now += 1
        serve(manager, [i, i], CacheHints(f"session {i}", end_session=i % 3 == 0), cache_salt=f"salt {i % 7}")
        manager.end_session(f"session {i - 5}", f"salt {(i - 5) % 7}")
        manager.end_session(f"never heard of {i}")
    assert deep_size(manager._feed.sessions) < 20_000


def test_of_a_million_tenants_few_are_remembered():
    policy = LHC(20, 1, lambda: 0.0)
    for i in range(20_000):
        policy.begin([], 5, CacheHints(cache_priority=i % 101), f"tenant {i}")
    assert deep_size(policy) < FIXED + 500 * NUM_TENANTS


# ---------------------------------------------------------------- records


def compute(manager: BlockManager, seq: PlainSequence) -> None:
    """All that is left, without checks."""
    seq.num_scheduled_tokens = seq.num_tokens - seq.num_cached_tokens
    manager.hash_blocks(seq)
    seq.num_cached_tokens, seq.num_scheduled_tokens = seq.num_tokens, 0


@pytest.mark.parametrize("is_prefix_shared", [False, True])
def test_requests_whose_blocks_others_take_over_while_they_run_leave_nothing_behind(is_prefix_shared: bool):
    """Records of the hazard table that nothing would ever close: they made every class look dead, and grew for ever."""
    manager, clock = timed_manager(40, 4)
    for i in range(300):
        clock.now += 1
        for other in (1000, 2000) if is_prefix_shared else ():
            serve(manager, [*[i] * 4, *[other + i] * 5])
        first, second = PlainSequence([i] * 9), PlainSequence([i] * 9)
        for seq in (first, second):
            manager.allocate(seq, int(is_prefix_shared))
        for seq in (first, second):  # computed twice: the second turns to the blocks of the first
            compute(manager, seq)
        third = PlainSequence([i] * 9)
        manager.allocate(third, 2)
        for seq in (first, second, third):
            manager.deallocate(seq)
    check_structure(manager)
    assert manager.stats().evictions > 500
    assert policy_of(manager).hazards.num_waiting <= (1 + GHOSTS) * 40


def test_a_session_that_goes_back_and_forth_leaves_nothing_behind():
    manager, clock = timed_manager(40)
    for _ in range(1000):
        for length in (4, 9):
            clock.now += 1
            serve(manager, list(range(length)))
    assert policy_of(manager).hazards.num_waiting < 10


# ---------------------------------------------------------------- work


def calls(act: Callable[[], object]) -> int:
    """Function calls, built-in ones too."""
    num_calls = 0

    def note(frame: FrameType, event: str, arg: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
    return num_calls


def calls_per_turn(hints: CacheHints, *, regenerates: bool) -> list[float]:
    """Of the policy alone, in each tenth of 3,000 turns of a chat, a block each; the refresh of the table aside."""
    policy, hashes = LHC(4000, 1, lambda: 0.0), [b"%016d" % i for i in range(6100)]
    policy.hazards.refresh = lambda *given: None  # type: ignore[method-assign]

    def turn(i: int) -> None:
        num_before = 50 if regenerates else 50 + i
        chain = [*hashes[:num_before], hashes[3100 + i]] if regenerates else hashes[: num_before + 1]
        use = policy.begin(chain, len(chain), hints, None)
        policy.register(use, [50 + i], chain[-1:], num_before - 1)
        policy.end(use, len(chain), 1)

    use = policy.begin(hashes[:50], 50, hints, None)
    policy.register(use, list(range(50)), hashes[:50], None)
    policy.end(use, 50, 1)
    return [calls(lambda first=first: [turn(first + i) for i in range(300)]) / 300 for first in range(0, 3000, 300)]


@pytest.mark.parametrize("hints", [NO_HINTS, CacheHints("chat")])
@pytest.mark.parametrize("regenerates", [False, True])
def test_a_turn_costs_no_more_the_later_it_comes(hints: CacheHints, regenerates: bool):
    """Whether it goes on where the last one ended, or always from the same place."""
    each = calls_per_turn(hints, regenerates=regenerates)
    assert max(each) < 150
    assert each[-1] < 1.2 * each[1]
