"""What is learned of traffic whose hazard is known, and how fast a change of traffic is followed.

Figures behind the bounds. 4,000 waits of a class, then gaps become ten times longer: the hazard at 3, 20, 60 s is off
by factors of 5, 4 and 1.7 after as many waits again, and within a factor of 2 after 7, 4 and 0.7 times as many. A class
that returns no more has 0.5 of its index after as many waits again, 0.1 after 8 times as many. Where two classes change
places hits fall from 0.82 to 0.15 for as long again as the past was, and are 0.65 to 0.74 from then on; a table without
that past is there in a few minutes. For the table never forgets: a change is followed in proportion to the past.
"""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np
import pytest

from pagetable.memory.hazard import (
    EDGES,
    NEW,
    NUM_BUCKETS,
    Floats,
    HazardTable,
    bucket_of,
    class_row,
    look_ahead,
    smoothed,
)
from pagetable.memory.lhc import LHC
from tests.memory.test_hazard import learned
from tests.memory.timed_requests import Request, play, timed_manager

ROW = class_row(NEW, 49, 1, 0)


@dataclass(frozen=True)
class Traffic:
    """Gaps before a return, and the share of all that never return by then; `draw` gives infinity for never."""

    draw: Callable[[random.Random], float]
    returned_by: Callable[[float], float]

    def gaps(self, count: int, seed: int) -> list[float]:
        rng = random.Random(seed)
        return [self.draw(rng) for _ in range(count)]

    def hazard(self) -> tuple[Floats, Floats]:
        """By bucket: returns of one wait, and these over its seconds at risk."""
        returns, seconds = np.zeros((2, NUM_BUCKETS))
        for bucket in range(NUM_BUCKETS):
            ages = np.linspace(EDGES[bucket], EDGES[bucket + 1], 1001)
            waits = np.array([1.0 - self.returned_by(age) for age in ages])
            returns[bucket] = waits[0] - waits[-1]
            seconds[bucket] = (waits.mean() - (waits[0] + waits[-1]) / 2002) * 1.001 * (ages[-1] - ages[0])
        return returns, returns / np.maximum(seconds, 1e-300)


def exponential(mean: float, share: float = 1.0) -> Traffic:
    return Traffic(
        lambda rng: rng.expovariate(1 / mean) if rng.random() < share else math.inf,
        lambda age: share * (1 - math.exp(-age / mean)),
    )


def log_normal(median: float, share: float) -> Traffic:
    return Traffic(
        lambda rng: rng.lognormvariate(math.log(median), 1) if rng.random() < share else math.inf,
        lambda age: share * (1 + math.erf((math.log(max(age, 1e-9) / median)) / math.sqrt(2))) / 2,
    )


def hump(low: float, high: float, share: float) -> Traffic:
    return Traffic(
        lambda rng: rng.uniform(low, high) if rng.random() < share else math.inf,
        lambda age: share * min(1.0, max(0.0, (age - low) / (high - low))),
    )


SHAPES = {"exponential": exponential(20), "log-normal": log_normal(30, 0.5), "hump": hump(45, 60, 0.6)}


def drive(table: HazardTable, gaps: list[float], now: float = 0.0, row: int = ROW) -> float:
    """One wait begins every 50 ms; those that return do so after their gaps. Returns the time of the last return."""
    begins = [now + 0.05 * i for i in range(len(gaps))]
    acts = sorted(
        [(at, -1, i) for i, at in enumerate(begins)] + [(begins[i] + gap, 1, i) for i, gap in enumerate(gaps)]
    )
    records: dict[int, int] = {}
    for at, what, i in acts[: bisect(acts, (1e300,))]:
        now = at
        if what < 0:
            records[i] = table.open(row, 3, now)
        else:
            table.reuse(records[i], now)
    return now


def hazard_in(table: HazardTable, now: float, row: int = ROW) -> Floats:
    hazard: Floats = smoothed(*learned(table, now))[row]
    return hazard


# ---------------------------------------------------------------- the true hazard is found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_after_four_thousand_waits_the_hazard_is_the_true_one_but_for_noise(shape: str, seed: int):
    """Within 4 standard errors and a tenth, wherever 30 returns are to be expected."""
    table, traffic, num_waits = HazardTable(), SHAPES[shape], 4000
    found = hazard_in(table, drive(table, traffic.gaps(num_waits, seed)))
    returns, true = traffic.hazard()
    many = np.flatnonzero(returns * num_waits >= 30)
    assert len(many) >= 2
    error = np.abs(found[many] / true[many] - 1)
    assert (error < 4 / np.sqrt(returns[many] * num_waits) + 0.1).all(), (seed, error)


@pytest.mark.parametrize("shape", SHAPES)
def test_after_sixteen_thousand_waits_it_is_within_a_sixth_wherever_many_return(shape: str):
    table, traffic, num_waits = HazardTable(), SHAPES[shape], 16_000
    found = hazard_in(table, drive(table, traffic.gaps(num_waits, 7)))
    returns, true = traffic.hazard()
    many = returns * num_waits >= 300
    np.testing.assert_allclose(found[many], true[many], rtol=1 / 6)


@pytest.mark.parametrize("num_blocks", [40_000, 300])
def test_the_page_table_teaches_it_too_and_what_is_evicted_and_forgotten_does_not_bias_it(num_blocks: int):
    """300 blocks are cached for some 20 s and remembered for some 100 s; ages below that are learned all the same."""
    traffic, block_size, num_chats = exponential(20, 0.8), 16, 4000
    fresh = count(1)
    requests = []
    for i, gap in enumerate(traffic.gaps(num_chats, seed=3)):
        first = [next(fresh)] * (3 * block_size + 1)
        requests.append(Request(0.25 * i, first))
        if gap < math.inf:
            requests.append(Request(0.25 * i + gap, [*first, *[next(fresh)] * (2 * block_size)]))
    manager, clock = timed_manager(num_blocks, block_size)
    play(manager, clock, requests)
    assert isinstance(manager.eviction_policy, LHC)
    assert (manager.stats().evictions > 10_000) == (num_blocks == 300)
    found = hazard_in(manager.eviction_policy.hazards, clock.now)
    returns, true = traffic.hazard()
    many = np.flatnonzero((returns * num_chats >= 100) & (EDGES[:-1] < 60))
    assert len(many) >= 10
    np.testing.assert_allclose(found[many], true[many], rtol=0.35)


# ---------------------------------------------------------------- a change is followed


def test_gaps_that_become_ten_times_longer_are_followed_in_proportion_to_the_past():
    table, num_before = HazardTable(), 4000
    now = drive(table, exponential(20).gaps(num_before, seed=1))
    ages = [bucket_of(age) for age in (3, 20, 60)]
    assert hazard_in(table, now)[ages].tolist() == pytest.approx([0.05] * 3, rel=0.3)
    now = drive(table, exponential(200).gaps(num_before, seed=2), now)
    off = hazard_in(table, now)[ages] / 0.005
    assert (off < [7, 5, 2]).all(), off
    now = drive(table, exponential(200).gaps(7 * num_before, seed=3), now)
    off = hazard_in(table, now)[ages] / 0.005
    assert (off < [2.2, 1.8, 1.3]).all(), off


def test_a_class_that_returns_no_more_loses_its_index_in_proportion_to_the_past():
    table, num_before = HazardTable(), 4000
    now = drive(table, exponential(20, 0.8).gaps(num_before, seed=1))
    ages = [bucket_of(age) for age in (3, 20, 60)]
    before = look_ahead(hazard_in(table, now)[None])[0, ages]
    now = drive(table, [math.inf] * num_before, now)
    left = look_ahead(hazard_in(table, now)[None])[0, ages] / before
    assert (left < 0.6).all(), left
    now = drive(table, [math.inf] * (7 * num_before), now)
    left = look_ahead(hazard_in(table, now)[None])[0, ages] / before
    assert (left < 0.15).all(), left


def test_two_classes_that_change_places_change_ranks_within_as_many_waits_as_before():
    table, other, num_before = HazardTable(), class_row(NEW, 5000, 1, 0), 2000
    gaps = exponential(20, 0.8).gaps(num_before, seed=1)
    now = max(drive(table, gaps), drive(table, [math.inf] * num_before, row=other))
    age = bucket_of(20)
    hazard = smoothed(*learned(table, now))
    assert hazard[ROW, age] > 5 * hazard[other, age]
    start = now
    now = max(drive(table, [math.inf] * num_before, start), drive(table, gaps, start, row=other))
    table.refresh(now)
    index = table.index
    assert index[other, age] > 0.9 * index[ROW, age]
    start = now
    now = max(drive(table, [math.inf] * num_before, start), drive(table, gaps, start, row=other))
    table.refresh(now)
    assert table.index[other, age] > 1.5 * table.index[ROW, age]


def short_and_long(start: float, duration: float, share_of_short: float, share_of_long: float) -> list[Request]:
    """Prompts of 5 and of 8 blocks, one of each a second; these shares of them come back after 45 to 60 s."""
    rng, fresh, requests = random.Random(start), count(int(start) * 1000), list[Request]()
    for i in range(int(duration)):
        for num_blocks, share in ((5, share_of_short), (8, share_of_long)):
            at, tokens = start + i + rng.random(), [next(fresh)] * (num_blocks * 16 + 1)
            requests.append(Request(at, tokens, "new"))
            if rng.random() < share:
                requests.append(Request(at + rng.uniform(45, 60), [*tokens, *[next(fresh)] * 16], "back"))
    return requests


def test_hits_are_back_after_a_half_more_requests_than_taught_otherwise():
    past, change = short_and_long(1, 600, 0.8, 0.0), short_and_long(601, 1500, 0.0, 0.8)
    manager, clock = timed_manager(400, 16)
    shares = []
    for requests in (past, [it for it in change if it.at < 1500], [it for it in change if it.at >= 1500]):
        hits = play(manager, clock, requests)["back"]
        shares.append(hits / sum((len(it.token_ids) - 1) // 16 for it in requests if it.kind == "back"))
    assert shares[0] > 0.7
    assert shares[2] > 0.8 * shares[0]  # in between it is 0.1 to 0.3
