"""LHC under random requests, hints and clocks: what it believes of the page table stays true after every act."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from pagetable.memory import BlockManager, OutOfBlocksError
from pagetable.memory.hazard import LEFT_BEHIND
from pagetable.memory.lhc import LHC
from tests.memory.hinted_stream import HintedStream
from tests.memory.lhc_structure import check_structure
from tests.memory.plain_sequence import PlainSequence
from tests.memory.timed_requests import Clock


def hinted_stream(seed: int, *, resets: bool = True) -> HintedStream:
    rng, clock = random.Random(seed), Clock()
    num_blocks, block_size = rng.choice([2, 5, 8, 12, 16, 24]), rng.choice([1, 1, 2])
    manager = BlockManager(num_blocks, block_size, eviction_policy="lhc", clock=clock)
    return HintedStream(manager, seed, clock, resets=resets)


def policy_of(manager: BlockManager) -> LHC:
    assert isinstance(manager.eviction_policy, LHC)
    return manager.eviction_policy


@pytest.mark.parametrize("seed", range(24))
def test_what_it_believes_of_the_page_table_is_true_after_every_act(seed: int):
    stream = hinted_stream(seed)
    for _ in stream.acts(150):
        check_structure(stream.manager)
        stream.manager.check()
    stream.finish_all()
    check_structure(stream.manager)


@pytest.mark.parametrize("num_values", [2, 3, 7, 50, 300])
@pytest.mark.parametrize("seed", range(5))
def test_so_it_is_when_strangers_share_hashes(num_values: int, seed: int, short_hash: Callable[[int], None]):
    short_hash(num_values)
    stream = hinted_stream(seed)
    for _ in stream.acts(80):
        check_structure(stream.manager)
        stream.manager.check()


@pytest.mark.parametrize("seed", range(12))
def test_while_time_stands_still_the_order_shown_is_the_order_of_eviction(seed: int):
    """Whatever happened before, whoever still runs, and however often one looks."""
    stream = hinted_stream(seed)
    for _ in stream.acts(250):
        pass
    manager = stream.manager
    order = list(manager.free_block_ids)
    assert list(manager.free_block_ids) == order
    check_structure(manager)
    assert [manager._take() for _ in order] == order  # no request: one may be the occasion to learn
    check_structure(manager)


@pytest.mark.parametrize("seed", range(8))
def test_a_refusal_changes_nothing(seed: int):
    stream = hinted_stream(seed, resets=False)
    for _ in stream.acts(200):
        pass
    manager = stream.manager
    order, state = list(manager.free_block_ids), policy_of(manager).state()
    hits, prompt = max((manager.can_allocate(PlainSequence([*it, 9], manager.block_size)), it) for it in stream.prompts)
    too_long = PlainSequence([*prompt, *[9] * (len(manager.blocks) + 1) * manager.block_size], manager.block_size)
    assert manager.can_allocate(too_long) == -1
    for num_cached_blocks in (0, max(0, hits)):
        with pytest.raises(OutOfBlocksError):
            manager.allocate(too_long, num_cached_blocks)
    assert (list(manager.free_block_ids), policy_of(manager).state()) == (order, state)
    check_structure(manager)


def test_the_streams_do_all_that_they_are_for():
    counts: Counter[str] = Counter()
    for seed in range(24):
        stream = hinted_stream(seed)
        for _ in stream.acts(150):
            policy = policy_of(stream.manager)
            runs = {run for run in policy._run_of if run is not None}
            counts["forked"] += any(run.branches for run in runs)
            counts["shared"] += any(run.is_shared for run in runs)
            counts["left behind"] += any(run.last.new_row == LEFT_BEHIND for run in runs)
            counts["protected"] += any(run.slot >= 0 and run.last.is_running for run in runs)
            counts["half gone"] += any(run.num_ghosts for run in runs)
        counts.update(stream.counts)
        counts["evictions"] += stream.manager.stats().evictions
    acts = ("admitted", "came back", "computed", "decoded", "finished", "preempted", "refused", "hits", "evictions")
    for what in (*acts, "forked", "shared", "left behind", "protected", "half gone", "given up", "ended", "reset"):
        assert counts[what] >= 5, (what, counts)
