"""Attention through the block table, in place: prefill and decode of a mixed batch, one result to the bit.

The keys of a sequence are cut into partitions of PARTITION positions, counted from its beginning. Within one, a query's
scores, their largest, the sum of their exponentials and the weighted sum of values are each formed in the order of the
positions; partitions are joined in order (FlashDecoding; Dao et al. 2023). So a query's result depends on its own keys
and values alone: not on the block size, the chunk it came with, its neighbours, or the number of threads.

Work is cut into units of (some queries, one KV head, a range of partitions). Queries of a unit read the same keys, so
keys and values are brought into the processor's cache once for all of them: the queries of a piece of a prompt, the
heads of a group, and decoding sequences whose block tables name the same blocks for a whole partition, as those with
a shared prefix do (cascade attention; Juravsky et al. 2024, "Hydragen", arXiv:2402.05099).

In cache memory a tile of keys is turned over, so that one register holds the same number of LANES keys, and scores
and values are then two products of the kind that `multiply_tile` computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagetable.engine.step import Step
from pagetable.model.kernels.compile import compiled
from pagetable.model.kernels.linear import as_numpy, padded, tile_height
from pagetable.model.kernels.team import Team, barrier, claim
from pagetable.model.kernels.vectors import (
    LANES,
    STORE,
    TILE_COLUMNS,
    TILE_ROWS,
    exp,
    fma,
    first_lanes,
    larger,
    largest_of,
    load,
    multiply_tile,
    prefetch,
    put,
    splat,
    store,
    sum_of,
    transpose_square,
    widen,
)
from pagetable.model.kv_cache import KVCache

PARTITION = 256  # positions; a multiple of TILE_COLUMNS and a power of two
_UNIT_ROWS = 8 * TILE_ROWS  # queries times heads of a group that a unit holds in cache memory
_MINUS_INFINITY, _ZERO = np.float32(-np.inf), np.float32(0)

# Fields of a unit of work.
_BEGIN, _END, _TABLE, _FIRST_PART, _END_PART, _SPLIT = range(6)


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
    """Cut a step's attention into units.

    A lone query is always split into its partitions, which may be shared; a piece of a prompt is, when there would be
    too few units for the threads. Whether it is cannot be seen in the result.
    """
    capacity = max(1, _UNIT_ROWS // group)
    counts = step.num_scheduled_tokens
    plan = _Units(capacity, len(step.token_ids))
    lone = np.flatnonzero(counts == 1)
    plan.add_lone(lone, step.query_start[lone].astype(np.int64), step.context_lens[lone], step.block_tables, block_size)
    chunks = np.flatnonzero(counts > 1)
    pieces = int((-(-counts[chunks] // capacity)).sum())
    split = 0 < (pieces + len(plan.units)) * kv_heads < 4 * threads
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
    """Units as they are collected, the costly ones (many partitions) where they come; order does not matter."""

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


# ------------------------------------------------------------------------------------------------------------ kernels


def scratch_size(head_dim: int) -> int:
    """Numbers that each thread needs in cache memory: see `_scratch`."""
    wide = padded(head_dim)
    return (
        wide * TILE_COLUMNS  # a tile of keys, turned over
        + PARTITION * wide  # the values of a partition
        + _UNIT_ROWS * (3 * wide + PARTITION + 4)  # queries; results so far and of this partition; scores; their sums
        + 16 * LANES
    )


@compiled
def store_rows(counters, phase, rows, x, x_row, at, cache, slots, size):
    """cache[slots[t]] = x[t, at : at + size] for all tokens; K or V of all heads are one row."""
    while True:
        t = claim(counters, phase, 1)
        if t >= rows:
            break
        for i in range(size):
            put(cache, slots[t] * size + i, x[t * x_row + at + i])


@compiled
def attend_units(
    counters, phase, q, q_row, keys, values, out, out_row, group, kv_heads, head_dim, block_size,
    positions, tables, members, units, partials, partial_results, scratch,
):  # fmt: skip
    """Attend, one unit after another. q and out are flat with rows of all heads; keys and values flat by slot."""
    wide = (head_dim + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS
    key_tile = scratch[: wide * TILE_COLUMNS]
    rest = scratch[wide * TILE_COLUMNS :]
    value_rows, rest = rest[: PARTITION * wide], rest[PARTITION * wide :]
    queries, rest = rest[: _UNIT_ROWS * wide], rest[_UNIT_ROWS * wide :]
    result, rest = rest[: _UNIT_ROWS * wide], rest[_UNIT_ROWS * wide :]
    part_result, rest = rest[: _UNIT_ROWS * wide], rest[_UNIT_ROWS * wide :]
    scores, rest = rest[: _UNIT_ROWS * PARTITION], rest[_UNIT_ROWS * PARTITION :]
    largest, total = rest[:_UNIT_ROWS], rest[_UNIT_ROWS : 2 * _UNIT_ROWS]
    part_largest, part_total = rest[2 * _UNIT_ROWS : 3 * _UNIT_ROWS], rest[3 * _UNIT_ROWS : 4 * _UNIT_ROWS]
    slot_size = kv_heads * head_dim
    while True:
        claimed = claim(counters, phase, 1)
        if claimed >= units.shape[0] * kv_heads:
            break
        # The last units are pieces of prompts with the longest contexts: begin with them, end with small ones.
        unit, head = units[units.shape[0] - 1 - claimed // kv_heads], claimed % kv_heads
        tokens = members[unit[_BEGIN] : unit[_END]]
        rows = tokens.size * group
        load_queries(q, q_row, tokens, head, group, head_dim, wide, queries)
        last = 0
        for token in tokens:
            last = max(last, positions[token])
        for part in range(unit[_FIRST_PART], unit[_END_PART]):
            start = part * PARTITION
            count = min(PARTITION, last + 1 - start)
            table = tables[unit[_TABLE]]
            ask_for(keys, values, table, start, min(TILE_COLUMNS, count), block_size, slot_size, head * head_dim, head_dim)
            for tile in range(0, count, TILE_COLUMNS):
                width = min(TILE_COLUMNS, count - tile)
                ahead = tile + TILE_COLUMNS
                ask_for(keys, values, table, start + ahead, min(TILE_COLUMNS, count - ahead), block_size, slot_size, head * head_dim, head_dim)
                load_tile(
                    keys, values, table, start + tile, width, block_size, slot_size, head * head_dim, head_dim, wide,
                    key_tile, value_rows, tile,
                )  # fmt: skip
                height = tile_height(rows)
                for row in range(0, rows, height):
                    multiply_tile(
                        min(height, rows - row), queries, row * wide, wide, key_tile, 0, TILE_COLUMNS, head_dim,
                        scores, row * PARTITION + tile, PARTITION, STORE,
                    )  # fmt: skip
            for row in range(rows):
                visible = min(count, positions[tokens[row // group]] + 1 - start)
                part_largest[row], part_total[row] = weigh(scores, row * PARTITION, visible, count)
            height = tile_height(rows)
            for row in range(0, rows, height):
                for column in range(0, wide, TILE_COLUMNS):
                    multiply_tile(
                        min(height, rows - row), scores, row * PARTITION, PARTITION, value_rows, column, wide, count,
                        part_result, row * wide + column, wide, STORE,
                    )  # fmt: skip
            for row in range(rows):
                if unit[_SPLIT]:
                    place = (partials[tokens[row // group]] + part) * group * kv_heads + head * group + row % group
                    keep(part_result, row * wide, part_largest[row], part_total[row], partial_results, place, wide)
                else:
                    is_first = part == unit[_FIRST_PART]
                    largest[row], total[row] = join(
                        is_first, result, row * wide, largest[row], total[row],
                        part_result, row * wide, part_largest[row], part_total[row], wide,
                    )  # fmt: skip
        if not unit[_SPLIT]:
            for row in range(rows):
                place = tokens[row // group] * out_row + (head * group + row % group) * head_dim
                finish(result, row * wide, total[row], out, place, head_dim)


@compiled
def join_partials(
    counters, phase, out, out_row, heads, head_dim, positions, split_tokens, partials, partial_results, scratch
):
    """Join the partial results of each split token, in the order of its partitions."""
    wide = (head_dim + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS
    entry = wide + LANES
    while True:
        claimed = claim(counters, phase, 1)
        if claimed >= split_tokens.size * heads:
            break
        token, head = split_tokens[claimed // heads], claimed % heads
        largest, total = _MINUS_INFINITY, _ZERO
        for part in range(positions[token] // PARTITION + 1):
            at = ((partials[token] + part) * heads + head) * entry
            largest, total = join(
                part == 0, scratch, 0, largest, total,
                partial_results, at, partial_results[at + wide], partial_results[at + wide + 1], wide,
            )  # fmt: skip
        finish(scratch, 0, total, out, token * out_row + head * head_dim, head_dim)


def partial_size(num_partials: int, heads: int, head_dim: int) -> int:
    """Numbers that partial results take: sums, their largest score and the sum of their weights."""
    return num_partials * heads * (padded(head_dim) + LANES)


@compiled
def load_queries(q, q_row, tokens, head, group, head_dim, wide, queries):
    """queries[row, :] = q of (token, head of the group), scaled, with zeros up to `wide`."""
    scale = np.float32(1.0 / np.sqrt(head_dim))
    for row in range(tokens.size * group):
        at = tokens[row // group] * q_row + (head * group + row % group) * head_dim
        for i in range(head_dim):
            queries[row * wide + i] = q[at + i] * scale
        for i in range(head_dim, wide):
            queries[row * wide + i] = _ZERO


@compiled
def ask_for(keys, values, table, position, width, block_size, slot_size, at, head_dim):
    """Prefetch what `load_tile` will read: jumps from block to block are not foreseen by the processor."""
    for j in range(width):
        slot = table[(position + j) // block_size] * block_size + (position + j) % block_size
        for i in range(0, head_dim, 16):
            prefetch(keys, slot * slot_size + at + i)
            prefetch(values, slot * slot_size + at + i)


@compiled
def load_tile(
    keys, values, table, position, width, block_size, slot_size, at, head_dim, wide, key_tile, value_rows, tile
):
    """Bring `width` keys, turned over, and values from their blocks into cache memory.

    key_tile[i, j] is number i of the key at `position` + j; value_rows[tile + j, :] its value, with zeros up to `wide`.
    What lies past `width` is left as it was, and nothing past it is read: slots not yet written may hold NaN.
    """
    j = 0
    while j < width:
        # As many keys as stand next to each other in one block.
        offset = (position + j) % block_size
        run = min(width - j, block_size - offset)
        slot = table[(position + j) // block_size] * block_size + offset
        for r in range(run):
            source, target = (slot + r) * slot_size + at, (tile + j + r) * wide
            i = 0
            while i + LANES <= head_dim:
                store(value_rows, target + i, load(values, source + i))
                i += LANES
            while i < head_dim:
                value_rows[target + i] = widen(values[source + i])
                i += 1
            while i < wide:
                value_rows[target + i] = _ZERO
                i += 1
        r = 0
        while r + LANES <= run:
            turn(keys, (slot + r) * slot_size + at, slot_size, head_dim, key_tile, j + r)
            r += LANES
        while r < run:
            for i in range(head_dim):
                key_tile[i * TILE_COLUMNS + j + r] = widen(keys[(slot + r) * slot_size + at + i])
            r += 1
        j += run


@compiled
def turn(keys, source, slot_size, head_dim, key_tile, column):
    """LANES keys into as many columns of the tile."""
    i = 0
    while i + LANES <= head_dim:
        transpose_square(keys, source + i, slot_size, key_tile, i * TILE_COLUMNS + column, TILE_COLUMNS)
        i += LANES
    while i < head_dim:
        for r in range(LANES):
            key_tile[i * TILE_COLUMNS + column + r] = widen(keys[source + r * slot_size + i])
        i += 1


@compiled
def weigh(scores, at, visible, count):
    """Turn scores[at : at + visible] into exp(score - largest), and what follows up to `count` into 0.

    Returns the largest and the sum. With nothing visible, minus infinity and 0.
    """
    if visible <= 0:
        for i in range(0, count, LANES):
            store(scores, at + i, splat(_ZERO))
        return _MINUS_INFINITY, _ZERO
    peak = splat(_MINUS_INFINITY)
    for i in range(0, visible, LANES):
        here = first_lanes(visible - i, load(scores, at + i), splat(_MINUS_INFINITY))
        peak = larger(here, peak)
    largest = largest_of(peak)
    weights = splat(_ZERO)
    for i in range(0, count, LANES):
        weight = first_lanes(visible - i, exp(load(scores, at + i) - splat(largest)), splat(_ZERO))
        weights = weights + weight
        store(scores, at + i, weight)
    return largest, sum_of(weights)


@compiled
def join(is_first, result, at, largest, total, part_result, part_at, part_largest, part_total, wide):
    """Add a partition's weighted sum to that of those before it, both rescaled to the larger of their largest scores."""
    if is_first:
        for i in range(0, wide, LANES):
            store(result, at + i, load(part_result, part_at + i))
        return part_largest, part_total
    if part_total == _ZERO:  # nothing of this partition is visible
        return largest, total
    peak = part_largest if largest < part_largest else largest
    before, now = exp(splat(largest - peak)), exp(splat(part_largest - peak))
    for i in range(0, wide, LANES):
        store(result, at + i, fma(load(part_result, part_at + i), now, load(result, at + i) * before))
    sums = fma(splat(part_total), now, splat(total) * before)
    return peak, sum_of(first_lanes(1, sums, splat(_ZERO)))


@compiled
def keep(part_result, at, largest, total, partial_results, place, wide):
    """Write down a partial result for `join_partials`."""
    base = place * (wide + LANES)
    for i in range(0, wide, LANES):
        store(partial_results, base + i, load(part_result, at + i))
    partial_results[base + wide] = largest
    partial_results[base + wide + 1] = total


@compiled
def finish(result, at, total, out, place, head_dim):
    """out[place :] = result / total."""
    for i in range(head_dim):
        out[place + i] = result[at + i] / total


# --------------------------------------------------------------------------------------------- as a back-end by itself


@compiled
def _attend_layer(
    thread, threads, sync, counters, q, k, v, keys, values, out, group, kv_heads, head_dim, block_size,
    positions, slots, tables, members, units, partials, split_tokens, partial_results, scratch,
):  # fmt: skip
    size, row = kv_heads * head_dim, group * kv_heads * head_dim
    store_rows(counters, 0, slots.size, k, size, 0, keys, slots, size)
    store_rows(counters, 1, slots.size, v, size, 0, values, slots, size)
    barrier(sync, threads)
    attend_units(
        counters, 2, q, row, keys, values, out, row, group, kv_heads, head_dim, block_size,
        positions, tables, members, units, partials, partial_results, scratch[thread],
    )  # fmt: skip
    barrier(sync, threads)
    join_partials(
        counters, 3, out, row, group * kv_heads, head_dim, positions, split_tokens, partials, partial_results,
        scratch[thread],
    )  # fmt: skip


class PagedAttention:
    """The CPU back-end of the `AttentionBackend` protocol, for a model whose other parts are PyTorch's.

    `CompiledLlama` uses the same kernels, and the plan, within one compiled function for the whole step.
    """

    def __init__(self, cache: KVCache, team: Team | None = None) -> None:
        self.cache = cache
        self.team = team or Team(1)
        self.layers = as_numpy(cache.data).reshape(cache.data.shape[0], 2, -1)
        self.kv_heads, self.head_dim = cache.data.shape[4:]
        self.scratch = np.empty((self.team.threads, scratch_size(self.head_dim)), np.float32)
        self.partial_results = np.empty(0, np.float32)
        self.plan_: AttentionPlan | None = None
        self._step: Step | None = None

    def plan(self, step: Step) -> None:
        """See `AttentionBackend.plan`."""
        self._step, self.plan_ = step, None  # how many heads share a key is known when the queries come

    def prepare(self, heads: int) -> AttentionPlan:
        """The plan of this step for a model with `heads` query heads."""
        assert self._step is not None, "plan(step) comes first"
        if self.plan_ is None:
            group = heads // self.kv_heads
            self.plan_ = plan_attention(self._step, group, self.kv_heads, self.cache.block_size, self.team.threads)
            size = partial_size(self.plan_.num_partials, heads, self.head_dim)
            if len(self.partial_results) < size:
                self.partial_results = np.empty(size, np.float32)
        return self.plan_

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionBackend.attend`."""
        plan = self.prepare(q.shape[1])
        out = torch.empty(q.shape, dtype=torch.float32)
        flat = [x.float().contiguous().numpy().reshape(-1) for x in (q, k, v)]
        keys, values = self.layers[layer]
        self.team.run(
            _attend_layer, np.zeros(4, np.int64), *flat, keys, values, out.numpy().reshape(-1),
            q.shape[1] // self.kv_heads, self.kv_heads, self.head_dim, self.cache.block_size,
            plan.positions, plan.slots, plan.tables, plan.members, plan.units, plan.partials, plan.split_tokens,
            self.partial_results, self.scratch,
        )  # fmt: skip
        return out.to(q.dtype)
