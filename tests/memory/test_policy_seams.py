"""What the page table tells an eviction policy, where it once told it wrongly."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pagetable.memory import BlockManager
from pagetable.memory.eviction import LRU
from tests.memory.plain_sequence import PlainSequence, admit, compute
from tests.memory.request_stream import serve
from tests.memory.test_policies import AccessCounter, manager_with


def test_the_age_of_lfu_does_not_fall_when_a_long_request_ends():
    manager = BlockManager(8, 4, eviction_policy="lfu")
    slow = PlainSequence([7] * 5)
    admit(manager, slow)
    compute(manager, slow)  # one registered block, of value 1
    for i in range(200):
        serve(manager, [100 + i] * 5)
    manager.deallocate(slow)
    for i in range(30):
        serve(manager, [1000 + i] * 5)
    assert manager.can_allocate(PlainSequence([1028] * 5)) == 1  # the last but one request
    assert manager.can_allocate(PlainSequence([299] * 5)) == 0  # 31 requests ago


@pytest.mark.parametrize("name", ["lru-k", "2q", "arc", "s3-fifo"])
def test_a_request_that_loses_its_blocks_to_preemption_is_seen_once(name: str):
    manager = BlockManager(8, 4, eviction_policy=name)
    seq = PlainSequence([7] * 9)
    admit(manager, seq)
    compute(manager, seq)
    manager.preempt(seq)
    other = PlainSequence(list(range(100, 132)))  # takes all eight blocks
    admit(manager, other)
    manager.deallocate(other)
    assert admit(manager, seq) == 0
    compute(manager, seq)
    manager.deallocate(seq)
    serve(manager, [8] * 9)  # also seen once, but later: so the first to leave is the other
    assert [manager.blocks[block_id].token_ids[0] for block_id in manager.free_block_ids.cached] == [7, 7, 8, 8]


def test_after_a_reset_a_hit_by_a_request_from_before_it_is_an_access():
    policy = AccessCounter(16)
    manager = manager_with(policy, 16)
    a, b = PlainSequence(list(range(10))), PlainSequence(list(range(10)))
    admit(manager, a)
    compute(manager, a)
    manager.reset_prefix_cache()
    policy.num_accesses.clear()
    manager.preempt(a)
    admit(manager, b)
    compute(manager, b)
    assert admit(manager, a) == 2
    assert sorted(policy.num_accesses.values()) == [2, 2]


def test_what_one_request_finds_it_finds_at_one_moment():
    calls: list[list[int]] = []

    class Spy(LRU):
        def access(self, block_ids: Sequence[int]) -> None:
            calls.append(list(block_ids))

    manager = manager_with(Spy(16), 16)
    a, b = PlainSequence(list(range(13))), PlainSequence(list(range(13)))
    admit(manager, a)
    admit(manager, b)
    compute(manager, a)
    compute(manager, b)
    assert calls == [[], [], [0, 1, 2]]
