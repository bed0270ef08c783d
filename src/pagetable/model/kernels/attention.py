"""Attention through the block table, in place: prefill and decode of a mixed batch, one result to the bit.

The keys of a sequence are cut into partitions of PARTITION positions, counted from its beginning. Within one, a query's
scores, their largest, the sum of their exponentials and the weighted sum of values are each formed in the order of the
positions; partitions are joined in order (Dao, Haziza, Massa and Sizov 2023, "Flash-Decoding for long-context
inference"). So a query's result depends on its own keys and values alone: not on the block size, the chunk it came
with, its neighbours, or the number of threads.

Work is cut into units of (some queries, a range of partitions), each computed for every KV head apart. Queries of a
unit read the same keys, so keys and values are brought into the processor's cache once for all of them: the queries of
a piece of a prompt, the heads of a group, and decoding sequences whose block tables name the same blocks for a whole
partition, as those with a shared prefix do (cascade attention; Juravsky et al. 2024, "Hydragen", arXiv:2402.05099).

In cache memory a tile of keys is turned over, so that one register holds the same number of LANES keys, and scores
and values are then two products of the kind that `multiply_tile` computes.
"""

from __future__ import annotations

import numpy as np

from pagetable.model.kernels.compile import compiled
from pagetable.model.kernels.linear import copy, padded, row_size, tile_height
from pagetable.model.kernels.plan import (
    BEGIN,
    END,
    END_PART,
    FIRST_PART,
    PARTITION,
    SPLIT,
    TABLE,
    UNIT_ROWS,
)
from pagetable.model.kernels.team import claim
from pagetable.model.kernels.tiles import CHAIN, STORE, multiply_tile, transpose_square
from pagetable.model.kernels.vectors import (
    LANES,
    TILE_COLUMNS,
    TILE_ROWS,
    exp,
    first_lanes,
    fma,
    larger,
    largest_of,
    load,
    splat,
    store,
    sum_of,
    widen,
)

_MINUS_INFINITY, _ZERO = np.float32(-np.inf), np.float32(0)


# ------------------------------------------------------------------------------------------------------------ kernels


def scratch_size(head_dim: int) -> int:
    """Numbers that each thread needs in its cache: see `attend_unit`."""
    wide = padded(head_dim)
    return wide * TILE_COLUMNS + PARTITION * wide + UNIT_ROWS * (3 * wide + PARTITION + 4)


@compiled
def store_rows(counters, phase, x, cache, slots, size):
    """cache[slots[t]] = x[t] for all tokens; K or V of all heads, `size` numbers, are one row."""
    while True:
        t = claim(counters, phase, 1)
        if t >= slots.size:
            break
        copy(x, t * size, cache, slots[t] * size, size)


@compiled
def attend_units(
    counters, phase, threads, q, q_row, keys, values, out, out_row, group, kv_heads, head_dim, block_size,
    positions, tables, members, units, partials, partial_results, scratch,
):  # fmt: skip
    """Attend, one unit after another. q and out are flat with rows of all heads; keys and values flat by slot."""
    count = units.shape[0]
    # With units enough, a thread takes all heads of one: their keys stand side by side in memory.
    together = kv_heads if count >= 4 * threads else 1
    while True:
        first = claim(counters, phase, together)
        if first >= count * kv_heads:
            break
        unit = count - 1 - first // kv_heads  # the last are pieces of prompts, the longest: begin with them
        for head in range(first % kv_heads, first % kv_heads + together):
            attend_unit(
                unit, head, together > 1, q, q_row, keys, values, out, out_row, group, kv_heads, head_dim, block_size,
                positions, tables, members, units, partials, partial_results, scratch,
            )  # fmt: skip


@compiled
def attend_unit(
    unit, head, all_heads, q, q_row, keys, values, out, out_row, group, kv_heads, head_dim, block_size,
    positions, tables, members, units, partials, partial_results, scratch,
):  # fmt: skip
    """The queries of one unit against its partitions, for the query heads that share one KV head.

    A row is one query of one head. Few rows read the values where they lie; for many they are first brought together.
    """
    wide = row_size(head_dim)
    slot_size, at = kv_heads * head_dim, head * head_dim
    key_tile = scratch[: wide * TILE_COLUMNS]  # numbers x keys
    place = wide * TILE_COLUMNS
    value_rows = scratch[place : place + PARTITION * wide]
    place += PARTITION * wide
    queries = scratch[place : place + UNIT_ROWS * wide]
    place += UNIT_ROWS * wide
    result = scratch[place : place + UNIT_ROWS * wide]  # of the partitions so far
    place += UNIT_ROWS * wide
    part_result = scratch[place : place + UNIT_ROWS * wide]
    place += UNIT_ROWS * wide
    scores = scratch[place : place + UNIT_ROWS * PARTITION]
    place += UNIT_ROWS * PARTITION
    largest, total = scratch[place : place + UNIT_ROWS], scratch[place + UNIT_ROWS : place + 2 * UNIT_ROWS]
    place += 2 * UNIT_ROWS
    part_largest, part_total = scratch[place : place + UNIT_ROWS], scratch[place + UNIT_ROWS : place + 2 * UNIT_ROWS]

    begin, end, split = units[unit, BEGIN], units[unit, END], units[unit, SPLIT]
    rows = (end - begin) * group
    in_place = rows <= TILE_ROWS and wide == head_dim
    last = 0
    for member in range(begin, end):
        last = max(last, positions[members[member]])
    load_queries(q, q_row, members, begin, rows, head, group, head_dim, wide, queries)
    for part in range(units[unit, FIRST_PART], units[unit, END_PART]):
        start = part * PARTITION
        count = min(PARTITION, last + 1 - start)
        if in_place and (head == 0 or not all_heads):
            first, size = (0, slot_size) if all_heads else (at, head_dim)
            # The assignment only keeps the compiler from leaving `touch` out; `score` overwrites it.
            scores[0] = touch(
                keys, values, tables, units[unit, TABLE], start, count, block_size, slot_size, first, size
            )
        score(
            keys, values, tables, units[unit, TABLE], start, count, block_size, slot_size, at, head_dim, wide,
            rows, queries, key_tile, value_rows, scores, in_place,
        )  # fmt: skip
        for row in range(rows):
            visible = min(count, positions[members[begin + row // group]] + 1 - start)
            part_largest[row], part_total[row] = weigh(scores, row * PARTITION, visible, count)
        if in_place:
            sum_in_place(
                values, tables, units[unit, TABLE], start, count, block_size, slot_size, at, wide, rows, scores,
                part_result,
            )  # fmt: skip
        else:
            sum_values(value_rows, count, wide, rows, scores, part_result)
        for row in range(rows):
            if split:
                entry = (partials[members[begin + row // group]] + part) * group * kv_heads + head * group + row % group
                keep(part_result, row * wide, part_largest[row], part_total[row], partial_results, entry, wide)
            else:
                largest[row], total[row] = join(
                    part == units[unit, FIRST_PART], result, row * wide, largest[row], total[row],
                    part_result, row * wide, part_largest[row], part_total[row], wide,
                )  # fmt: skip
    if not split:
        for row in range(rows):
            target = members[begin + row // group] * out_row + (head * group + row % group) * head_dim
            finish(result, row * wide, total[row], out, target, head_dim)


@compiled
def score(
    keys, values, tables, table, start, count, block_size, slot_size, at, head_dim, wide,
    rows, queries, key_tile, value_rows, scores, in_place,
):  # fmt: skip
    """scores[row, j] = queries[row] . key at start + j, for `count` keys; brings the values along unless in place."""
    height = tile_height(rows)
    for tile in range(0, count, TILE_COLUMNS):
        width = min(TILE_COLUMNS, count - tile)
        j = 0
        while j < width:
            slot, run = find_run(tables, table, start + tile + j, width - j, block_size)
            load_keys(keys, slot * slot_size + at, slot_size, run, head_dim, key_tile, j)
            if not in_place:
                for r in range(run):
                    target = (tile + j + r) * wide
                    copy(values, (slot + r) * slot_size + at, value_rows, target, head_dim)
                    for i in range(head_dim, wide):
                        value_rows[target + i] = _ZERO
            j += run
        for row in range(0, rows, height):
            multiply_tile(
                min(height, rows - row), queries, row * wide, wide, key_tile, 0, TILE_COLUMNS, head_dim,
                scores, row * PARTITION + tile, PARTITION, STORE, 0, 0,
            )  # fmt: skip


@compiled
def sum_values(value_rows, count, wide, rows, scores, part_result):
    """part_result[row] = sum of scores[row, j] * value j, in the order of j."""
    height = tile_height(rows)
    for row in range(0, rows, height):
        for column in range(0, wide, TILE_COLUMNS):
            multiply_tile(
                min(height, rows - row), scores, row * PARTITION, PARTITION, value_rows, column, wide, count,
                part_result, row * wide + column, wide, STORE, 0, 0,
            )  # fmt: skip


@compiled
def sum_in_place(values, tables, table, start, count, block_size, slot_size, at, wide, rows, scores, part_result):
    """The same for up to TILE_ROWS rows, from the values' blocks, one after another."""
    j = 0
    while j < count:
        slot, run = find_run(tables, table, start + j, count - j, block_size)
        for column in range(0, wide, TILE_COLUMNS):
            multiply_tile(
                rows, scores, j, PARTITION, values, slot * slot_size + at + column, slot_size, run,
                part_result, column, wide, CHAIN if j else STORE, 0, 0,
            )  # fmt: skip
        j += run


@compiled
def find_run(tables, table, position, most, block_size):
    """The slot of a position, and how many of the next `most` positions, itself included, stand side by side there."""
    block = position // block_size
    offset = position - block * block_size
    return tables[table, block] * block_size + offset, min(most, block_size - offset)


@compiled
def touch(keys, values, tables, table, start, count, block_size, slot_size, at, size):
    """Read keys and values of one head, or of all, once, straight through, into the processor's cache.

    Only so are enough reads under way at once to use all of the memory's speed: what comes after has too much to do
    between one read and the next. Returns a number made of all, lest the compiler leave it out.
    """
    seen = splat(_ZERO)
    j = 0
    while j < count:
        slot, run = find_run(tables, table, start + j, count - j, block_size)
        rows, width = (1, run * size) if size == slot_size else (run, size)
        for row in range(rows):
            begin = (slot + row) * slot_size + at
            for i in range(begin, begin + width - LANES + 1, LANES):
                seen = seen + load(keys, i)
            for i in range(begin, begin + width - LANES + 1, LANES):
                seen = seen + load(values, i)
        j += run
    return sum_of(seen)


@compiled
def join_partials(
    counters, phase, out, out_row, heads, head_dim, positions, split_tokens, partials, partial_results, scratch
):
    """Join the partial results of each split token, in the order of its partitions."""
    wide = row_size(head_dim)
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
def load_queries(q, q_row, members, begin, rows, head, group, head_dim, wide, queries):
    """queries[row, :] = q of (member, head of the group), scaled."""
    scale = np.float32(1.0 / np.sqrt(head_dim))
    for row in range(rows):
        at = members[begin + row // group] * q_row + (head * group + row % group) * head_dim
        i = 0
        while i + LANES <= head_dim:
            store(queries, row * wide + i, load(q, at + i) * splat(scale))
            i += LANES
        while i < head_dim:
            queries[row * wide + i] = q[at + i] * scale
            i += 1


@compiled
def load_keys(keys, source, slot_size, run, head_dim, key_tile, column):
    """key_tile[i, column + r] = number i of key r, for `run` keys that stand side by side."""
    r = 0
    while r + LANES <= run:
        i = 0
        while i + LANES <= head_dim:
            transpose_square(
                keys, source + r * slot_size + i, slot_size, key_tile, i * TILE_COLUMNS + column + r, TILE_COLUMNS
            )
            i += LANES
        while i < head_dim:
            for each in range(r, r + LANES):
                key_tile[i * TILE_COLUMNS + column + each] = widen(keys[source + each * slot_size + i])
            i += 1
        r += LANES
    while r < run:
        for i in range(head_dim):
            key_tile[i * TILE_COLUMNS + column + r] = widen(keys[source + r * slot_size + i])
        r += 1


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
    """Add a partition's weighted sum to that of those before it, both rescaled to the larger of their peaks.

    As in online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867).
    """
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
    i = 0
    while i + LANES <= head_dim:
        store(out, place + i, load(result, at + i) / splat(total))
        i += LANES
    while i < head_dim:
        out[place + i] = result[at + i] / total
        i += 1
