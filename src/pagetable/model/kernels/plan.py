"""How the attention of one step is cut into units of work: plain arithmetic on the step's arrays.

A unit is some queries and a range of partitions of one block table; each KV head is computed apart. Nothing decided
here shows in the results: see `attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagetable.engine.step import Step
from pagetable.model.kernels.vectors import TILE_ROWS

PARTITION = 256  # positions; a multiple of TILE_COLUMNS and a power of two
UNIT_ROWS = 8 * TILE_ROWS  # queries times heads of a group that a unit holds in the processor's cache

_MOST_PARTIALS = 1 << 14  # partial results of pieces of prompts, each of all heads: they take memory beside the cache

# Fields of a unit of work: members from, to; row of the block tables; partitions from, to; 1 if results are partial.
BEGIN, END, TABLE, FIRST_PART, END_PART, SPLIT = range(6)


@dataclass(slots=True)
class AttentionPlan:
    """Who attends to what in one step, for all layers."""

    positions: NDArray[np.int32]  # (T,)
    slots: NDArray[np.int64]  # (T,) where the token's own K and V go
    tables: NDArray[np.int32]  # (B, longest)
    members: NDArray[np.int64]  # tokens, unit after unit
    units: NDArray[np.int64]  # (U, 6): members from, to; row of `tables`; partitions from, to; 1 if results are partial
    partials: NDArray[np.int64]  # (T,) where a token's first partial result is kept, -1 for none
    split_tokens: NDArray[np.int64]  # those that have partial results, to be joined
    num_partials: int


def plan_attention(step: Step, group: int, kv_heads: int, block_size: int, threads: int) -> AttentionPlan:
    """Cut a step's attention into units. `group` (at most UNIT_ROWS) query heads share each of `kv_heads` KV heads.

    A lone query is always split into its partitions, which may be shared; a piece of a prompt is, when there would be
    too few units for the threads. Whether it is cannot be seen in the result.
    """
    capacity = UNIT_ROWS // group
    counts = step.num_scheduled_tokens
    plan = _Units(capacity, len(step.token_ids))
    lone = np.flatnonzero(counts == 1)
    plan.add_lone(lone, step.query_start[lone].astype(np.int64), step.context_lens[lone], step.block_tables, block_size)
    chunks = np.flatnonzero(counts > 1)
    pieces = int((-(-counts[chunks] // capacity)).sum())
    partials = int((counts[chunks].astype(np.int64) * (-(-step.context_lens[chunks] // PARTITION))).sum())
    split = 0 < (pieces + len(plan.units)) * kv_heads < 4 * threads and partials <= _MOST_PARTIALS
    for row in chunks.tolist():
        begin, end = int(step.query_start[row]), int(step.query_start[row + 1])
        first_position = int(step.context_lens[row]) - (end - begin)
        plan.add_chunk(row, begin, end, first_position, split)
    return AttentionPlan(
        positions=np.array(step.positions),  # copies: a read-only array would be another type to the compiler
        slots=np.array(step.slot_mapping),
        tables=np.array(step.block_tables),
        members=np.concatenate(plan.members) if plan.members else np.zeros(0, np.int64),
        units=np.array(plan.units, np.int64).reshape(-1, 6),
        partials=plan.partials,
        split_tokens=np.flatnonzero(plan.partials >= 0),
        num_partials=plan.num_partials,
    )


class _Units:
    """Units as they are collected: lone queries first, pieces of prompts last.

    `attend_units` begins at the end, with the longest; results do not depend on the order.
    """

    def __init__(self, capacity: int, num_tokens: int) -> None:
        self.capacity = capacity
        self.members: list[NDArray[np.int64]] = []
        self.units: list[tuple[int, int, int, int, int, int]] = []
        self.partials = np.full(num_tokens, -1, np.int64)
        self.num_partials = 0
        self._num_members = 0

    def add_lone(
        self,
        rows: NDArray[np.int64],
        tokens: NDArray[np.int64],
        contexts: NDArray[np.int32],
        tables: NDArray[np.int32],
        block_size: int,
    ) -> None:
        """Sequences with one token each; those that name the same blocks for a partition go together."""
        if not len(rows):
            return
        parts = -(-contexts.astype(np.int64) // PARTITION)
        several = parts > 1
        ends = np.cumsum(np.where(several, parts, 0))
        self.partials[tokens[several]] = self.num_partials + (ends - parts)[several]
        self.num_partials += int(ends[-1])
        for part in range(int(parts.max())):
            whole = contexts >= (part + 1) * PARTITION
            for together in _same_blocks(tables[rows[whole]], part, block_size):
                self._add_lone(rows[whole][together], tokens[whole][together], part, parts[whole][together])
            ending = (parts == part + 1) & ~whole
            for row, token in zip(rows[ending].tolist(), tokens[ending], strict=True):
                self._add(np.array([token]), row, part, part + 1, part > 0)

    def _add_lone(
        self, rows: NDArray[np.int64], tokens: NDArray[np.int64], part: int, parts: NDArray[np.int64]
    ) -> None:
        for is_split in (False, True):  # a sequence that ends with this partition keeps no partial result of it
            chosen = (parts > 1) == is_split
            for begin in range(0, int(chosen.sum()), self.capacity):
                mine = slice(begin, begin + self.capacity)
                self._add(tokens[chosen][mine], int(rows[chosen][mine][0]), part, part + 1, is_split)

    def add_chunk(self, row: int, begin: int, end: int, first_position: int, split: bool) -> None:
        """Tokens `begin` to `end`, the first of which stands at `first_position`, a few at a time."""
        for start in range(begin, end, self.capacity):
            stop = min(start + self.capacity, end)
            parts = (first_position + stop - 1 - begin) // PARTITION + 1
            tokens = np.arange(start, stop, dtype=np.int64)
            if split and parts > 1:
                self.partials[start:stop] = self.num_partials + np.arange(stop - start) * parts
                self.num_partials += parts * (stop - start)
                for part in range(parts):
                    self._add(tokens, row, part, part + 1, True)
            else:
                self._add(tokens, row, 0, parts, False)

    def _add(self, tokens: NDArray[np.int64], row: int, first: int, end: int, split: bool) -> None:
        begin = self._num_members
        self._num_members += len(tokens)
        self.members.append(tokens)
        self.units.append((begin, self._num_members, row, first, end, int(split)))


def _same_blocks(tables: NDArray[np.int32], part: int, block_size: int) -> list[NDArray[np.int64]]:
    """Rows of `tables`, put together where they name the same blocks for partition `part`, which all of them fill."""
    if not len(tables):
        return []
    begin, end = part * PARTITION // block_size, -(-(part + 1) * PARTITION // block_size)
    if len(np.unique(tables[:, begin])) == len(tables):  # the usual case, found quickly
        return [np.array([row]) for row in range(len(tables))]
    names = np.ascontiguousarray(tables[:, begin:end])
    _, owner = np.unique(names.view(f"V{names.shape[1] * 4}").ravel(), return_inverse=True)
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(owner[order])) + 1)
