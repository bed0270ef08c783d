"""Events tell all: folding them gives the registered set, and every miss has its reason."""

import logging

import pytest

from pagetable.memory import BlockManager, MissExplainer, MissReason
from pagetable.memory.events import Allocated, Cleared, Freed, Hit, Miss, Preempted, Removed, Stored
from tests.memory.plain_sequence import PlainSequence, admit, compute


class Tape:
    def __init__(self) -> None:
        self.events: list[object] = []

    def __call__(self, event: object) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    def last_miss(self) -> MissReason:
        return self.of(Miss)[-1].reason


@pytest.fixture
def tape() -> Tape:
    return Tape()


def make(tape: Tape, num_blocks: int = 16, **kwargs: object) -> tuple[BlockManager, MissExplainer]:
    explainer = MissExplainer(tape, capacity=100)
    return BlockManager(num_blocks, 4, events=explainer, **kwargs), explainer


def run(manager: BlockManager, token_ids: list[int]) -> PlainSequence:
    seq = PlainSequence(token_ids)
    admit(manager, seq)
    compute(manager, seq)
    return seq


def test_every_miss_reason(tape: Tape):
    manager, _ = make(tape, 4)
    run_a = run(manager, list(range(9)))
    assert tape.last_miss() is MissReason.NEVER_SEEN
    manager.deallocate(run_a)
    manager.deallocate(run(manager, [*range(8), 5]))
    assert tape.last_miss() is MissReason.PARTIAL_TAIL
    manager.deallocate(run(manager, [9] * 16))
    assert len(tape.of(Removed)) == 2
    manager.deallocate(run(manager, list(range(9))))
    assert tape.last_miss() is MissReason.EVICTED
    manager.reset_prefix_cache()
    manager.deallocate(run(manager, list(range(9))))
    assert tape.last_miss() is MissReason.RESET

    off = BlockManager(8, 4, enable_prefix_caching=False, events=tape)
    admit(off, PlainSequence(list(range(9))))
    assert tape.last_miss() is MissReason.DISABLED

    manager = BlockManager(8, 4, events=tape)
    run(manager, list(range(9)))
    seq = PlainSequence(list(range(9)))
    manager.allocate(seq, manager.can_allocate(seq, may_hit=False))
    assert tape.last_miss() is MissReason.DISABLED

    twins = BlockManager(8, 4, events=tape)
    admit(twins, PlainSequence(list(range(9))))
    admit(twins, PlainSequence(list(range(9))))
    assert tape.last_miss() is MissReason.IN_FLIGHT


def test_the_events_of_one_life(tape: Tape):
    manager = BlockManager(8, 4, events=tape)
    seq = run(manager, list(range(9)))
    manager.preempt(seq)
    manager.reset_prefix_cache()
    kinds = [type(event) for event in tape.events]
    assert kinds == [Miss, Allocated, Stored, Stored, Preempted, Freed, Cleared]
    stored = tape.of(Stored)
    assert stored[0].parent_hash is None
    assert stored[1].parent_hash == stored[0].hash
    assert stored[1].token_ids == (4, 5, 6, 7)
    assert tape.of(Freed)[0].block_ids == (2, 1, 0)


def test_a_hit_is_told_with_its_length(tape: Tape):
    manager = BlockManager(8, 4, events=tape)
    run(manager, list(range(9)))
    run(manager, [*range(8), 1])
    assert [hit.num_tokens for hit in tape.of(Hit)] == [8]


def test_folding_the_events_gives_the_registered_set(tape: Tape):
    import random

    rng = random.Random(5)
    manager, explainer = make(tape, 12)
    live: list[PlainSequence] = []
    for _ in range(400):
        seq = PlainSequence([rng.randrange(2) for _ in range(rng.randrange(1, 20))])
        hits = manager.can_allocate(seq)
        if hits >= 0:
            manager.allocate(seq, hits)
            compute(manager, seq)
            live.append(seq)
        if live and (hits < 0 or rng.random() < 0.4):
            manager.deallocate(live.pop(rng.randrange(len(live))))
        if rng.random() < 0.02:
            manager.reset_prefix_cache()
        assert explainer.registered == manager.hash_to_block_id
    assert tape.of(Removed)


def test_the_ghost_table_is_bounded(tape: Tape):
    explainer = MissExplainer(tape, capacity=3)
    for i in range(10):
        explainer(Stored(i, bytes([i]), None, ()))
        explainer(Removed(i, bytes([i])))
    for i in (0, 9):
        explainer(Miss(None, 0, 4, bytes([i]), MissReason.NEVER_SEEN))
    assert [miss.reason for miss in tape.of(Miss)] == [MissReason.NEVER_SEEN, MissReason.EVICTED]


def test_a_sink_that_fails_leaves_the_page_table_whole(caplog: pytest.LogCaptureFixture):
    def broken(event: object) -> None:
        raise RuntimeError("no space left")

    manager = BlockManager(8, 4, events=broken)
    with caplog.at_level(logging.ERROR):
        manager.deallocate(run(manager, list(range(9))))
    manager.check()
    assert "event sink failed" in caplog.text
