"""Units of work: every token attends to each of its partitions exactly once, by blocks that are its own."""

from __future__ import annotations

import numpy as np
import pytest

from pagetable.engine.step import Step
from pagetable.model.kernels.plan import (
    BEGIN,
    END,
    END_PART,
    FIRST_PART,
    PARTITION,
    SPLIT,
    TABLE,
    UNIT_ROWS,
    AttentionPlan,
    plan_attention,
)
from tests.model.steps import make_step


def random_step(rng: np.random.Generator, block_size: int) -> Step:
    """Decodes and chunks; families of them begin with the same blocks."""
    free = iter(range(10**6))
    families = [[next(free) for _ in range(-(-1600 // block_size))] for _ in range(3)]
    tables, computed, chunks = [], [], []
    for _ in range(int(rng.integers(1, 70))):
        done = int(rng.choice([0, rng.integers(0, 50), rng.integers(0, 1500), PARTITION * rng.integers(0, 5)]))
        count = 1 if rng.random() < 0.8 else int(rng.integers(1, 150))
        table = []
        if rng.random() < 0.7:
            shared = min(done // block_size, int(rng.choice([32, 256, 512, 768, 1500])) // block_size)
            table = families[int(rng.integers(3))][:shared]
        table = table + [next(free) for _ in range(-(-(done + count) // block_size) - len(table))]
        tables.append(table)
        computed.append(done)
        chunks.append([0] * count)
    return make_step(tables, computed, chunks, block_size)


def check(step: Step, plan: AttentionPlan, group: int, block_size: int) -> None:
    owner = np.repeat(np.arange(len(step.num_scheduled_tokens)), step.num_scheduled_tokens)
    covered: list[list[int]] = [[] for _ in step.token_ids]
    split: list[set[int]] = [set() for _ in step.token_ids]
    for unit in plan.units:
        members = plan.members[unit[BEGIN] : unit[END]]
        assert 0 < len(members) * group <= UNIT_ROWS
        assert len(set(members)) == len(members)
        for token in members:
            for part in range(unit[FIRST_PART], unit[END_PART]):
                if part * PARTITION <= step.positions[token]:
                    covered[token].append(part)
                    begin = part * PARTITION // block_size
                    end = min((part + 1) * PARTITION - 1, step.positions[token]) // block_size + 1
                    tables = step.block_tables[[unit[TABLE], owner[token]], begin:end]
                    assert (tables[0] == tables[1]).all(), "a unit reads blocks that are not its member's"
            split[token].add(int(unit[SPLIT]))
    parts = step.positions // PARTITION + 1
    for token, count in enumerate(parts):
        assert sorted(covered[token]) == list(range(count))
        assert split[token] == {int(plan.partials[token] >= 0)}
    assert sorted(plan.split_tokens) == np.flatnonzero(plan.partials >= 0).tolist()
    places = np.concatenate(
        [np.arange(parts[token]) + plan.partials[token] for token in plan.split_tokens] or [np.zeros(0, int)]
    )
    assert len(np.unique(places)) == len(places), "two tokens keep partial results in the same place"
    assert len(places) == 0 or (places.min() >= 0 and places.max() < plan.num_partials)


@pytest.mark.parametrize("seed", range(40))
def test_each_token_meets_each_of_its_partitions_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    block_size = int(rng.choice([1, 2, 16, 128, 256, 512]))
    group = int(rng.choice([1, 2, 3, 8, UNIT_ROWS]))
    step = random_step(rng, block_size)
    plan = plan_attention(step, group, int(rng.integers(1, 5)), block_size, int(rng.integers(1, 9)))
    check(step, plan, group, block_size)


@pytest.mark.parametrize("threads", [1, 2, 64])
@pytest.mark.parametrize(
    ("computed", "count"), [(0, 1), (0, 2), (255, 1), (256, 1), (255, 2), (254, 2), (0, 700), (300, 300)]
)
def test_a_sequence_alone_meets_each_partition_once(computed: int, count: int, threads: int) -> None:
    step = make_step([list(range(-(-(computed + count) // 16)))], [computed], [[0] * count], 16)
    check(step, plan_attention(step, 3, 1, 16, threads), 3, 16)


def test_decodes_with_the_same_blocks_are_one_unit_for_each_whole_partition() -> None:
    shared = list(range(32))  # two partitions
    step = make_step([[*shared, 100 + i] for i in range(5)], [515] * 5, [[0]] * 5, 16)
    plan = plan_attention(step, 3, 1, 16, 2)
    sizes = (plan.units[:, END] - plan.units[:, BEGIN]).tolist()
    assert sorted(sizes) == [1] * 5 + [5] * 2
    check(step, plan, 3, 16)


def test_the_arrays_of_a_plan_are_its_own() -> None:
    step = make_step([[0]], [0], [[1, 2]], 16)
    plan = plan_attention(step, 1, 1, 16, 1)
    for array in (plan.positions, plan.slots, plan.tables):
        assert array.flags.writeable
    assert not np.shares_memory(plan.positions, step.positions)
