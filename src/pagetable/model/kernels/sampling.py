"""Drawing tokens, the CPU's way: the filters and the race of `model/sampler.py`, a row of logits at a time.

    weights = exp((logits - largest) / temperature) -> min_p -> top_k -> top_p -> race

Rows are shared out among the threads; nothing of a draw depends on another row. A cut is found by counting weights by
their leading bits and sorting only those that share the decisive ones: all of a row only when its weights are about
alike.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagetable.engine.step import SamplingBatch
from pagetable.model.kernels.compile import compiled
from pagetable.model.kernels.linear import empty
from pagetable.model.kernels.team import Team, claim
from pagetable.model.kernels.vectors import LANES, exp, load, splat, store
from pagetable.model.sampler import race_entries

_SHIFT = 19  # weights, as the bits of a float32, are counted by what is left of these: 8 of exponent, 4 of mantissa
_BUCKETS = 1 << (31 - _SHIFT)
_LEAST_SHARE = 1e-30  # a top_p of 0, as a float32 may come to be, still keeps the likeliest token
_NUMBERS = 2048  # random numbers made at once
_GAMMA, _FACTOR_1, _FACTOR_2 = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)


def draw(team: Team, logits: Tensor, largest: Tensor, batch: SamplingBatch, rows: NDArray[np.int64]) -> Tensor:
    """A token for each of `rows`, as `sampler.draw_rows` draws it but for ties within float32 rounding.

    logits (R, V) and largest (R,), both float32.
    """
    vocabulary = logits.shape[1]
    tokens = np.empty(len(rows), np.int64)
    team.run(
        _draw_rows, np.zeros(1, np.int64), logits.numpy(), largest.numpy(), rows, batch.temperature, batch.min_p,
        batch.top_k, batch.top_p, race_entries(batch.seeds[rows], batch.output_index[rows]), tokens,
        empty((team.threads, vocabulary + LANES)), np.empty((team.threads, _BUCKETS)),
    )  # fmt: skip
    return torch.from_numpy(tokens)


@compiled
def _draw_rows(
    thread, threads, sync, counters, logits, largest, rows, temperature, min_p, top_k, top_p, entries, tokens,
    weights, buckets,
):  # fmt: skip
    while True:
        claimed = claim(counters, 0, 1)
        if claimed >= rows.size:
            break
        row = rows[claimed]
        mine = weights[thread]
        size = logits.shape[1]
        weigh_row(logits[row], largest[row], temperature[row], mine)
        cut = min(min_p[row], np.float32(1))
        if 0 < top_k[row] < size:
            cut = max(cut, cut_at(mine, size, cut, False, np.float64(top_k[row]), buckets[thread]))
        if top_p[row] < 1:
            goal = max(np.float64(top_p[row]), _LEAST_SHARE)
            cut = max(cut, cut_at(mine, size, cut, True, goal, buckets[thread]))
        tokens[claimed] = run_race(mine, size, cut, entries[claimed])


@compiled
def weigh_row(logits, largest, temperature, weights):
    """weights[i] = exp((logits[i] - largest) / temperature), at most 1; `weights` has LANES numbers to spare."""
    i = 0
    size = logits.size
    while i + LANES <= size:
        store(weights, i, exp((load(logits, i) - splat(largest)) / splat(temperature)))
        i += LANES
    rest = i
    while i < size:
        weights[i] = (logits[i] - largest) / temperature
        i += 1
    store(weights, rest, exp(load(weights, rest)))


@compiled
def cut_at(weights, size, least, by_weight, goal, buckets):
    """The weight down to which the largest weights reach `goal`: how many there are, or the share of all weight.

    Of weights below `least` nothing counts. Weights are walked through from the largest; the one that completes the
    goal is the cut, and all its equals stay.
    """
    bits = weights.view(np.uint32)
    buckets[:] = 0
    for i in range(size):
        if weights[i] >= least:
            buckets[bits[i] >> _SHIFT] += weights[i] if by_weight else 1.0
    if by_weight:
        whole = 0.0
        for bucket in range(buckets.size - 1, -1, -1):
            whole += buckets[bucket]
        goal *= whole
    reached = 0.0
    bucket = buckets.size - 1
    while bucket > 0 and reached + buckets[bucket] < goal:
        reached += buckets[bucket]
        bucket -= 1
    inside = np.empty(64, np.float32)
    count = 0
    for i in range(size):
        if weights[i] >= least and bits[i] >> _SHIFT == bucket:
            if count == inside.size:
                inside = np.concatenate((inside, inside))
            inside[count] = weights[i]
            count += 1
    inside = np.sort(inside[:count])
    for i in range(count - 1, -1, -1):
        reached += inside[i] if by_weight else 1.0
        if reached >= goal:
            return inside[i]
    return inside[0] if count else least


@compiled
def run_race(weights, size, cut, entry):
    """The token that arrives first, at -log(u) / weight, among those that weigh `cut` or more."""
    numbers = np.empty(_NUMBERS)
    best, winner = np.inf, 0
    for begin in range(0, size, _NUMBERS):
        count = min(_NUMBERS, size - begin)
        uniform(entry, begin, count, numbers)
        for i in range(count):
            weight = weights[begin + i]
            # -log(u) is no less than 1 - u: most tokens have lost before their logarithm is known.
            if weight >= cut and weight > 0 and 1.0 - numbers[i] < best * weight:
                arrival = -np.log(numbers[i]) / weight
                if arrival < best:
                    best, winner = arrival, begin + i
    return winner


@compiled
def uniform(entry, begin, count, numbers):
    """The numbers in (0, 1) of tokens `begin` to `begin + count`: see `sampler.uniform`."""
    for i in range(count):
        x = entry + np.uint64(begin + i + 1) * _GAMMA
        x = (x ^ (x >> np.uint64(30))) * _FACTOR_1
        x = (x ^ (x >> np.uint64(27))) * _FACTOR_2
        x ^= x >> np.uint64(31)
        numbers[i] = (np.float64(x >> np.uint64(12)) + 0.5) * 2.0**-52
