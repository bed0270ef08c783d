"""The hazard table against plain estimators of the same, and what it makes of traffic whose hazard is known."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np
import pytest

from pagetable.memory.hazard import (
    EDGES,
    ENDED,
    ENDED_HAZARD,
    EXPECTED,
    KEPT,
    LEFT_BEHIND,
    MAX_WEIGHT,
    NEW,
    NUM_BUCKETS,
    NUM_CLASSES,
    NUM_ROWS,
    OUTPUTS,
    PREFIX,
    PRIOR_EVENTS,
    PRIOR_HAZARD,
    PRIOR_REUSES,
    SHARED,
    SIZES,
    TURNS,
    Floats,
    HazardTable,
    announced_row,
    bucket_of,
    buckets_of,
    class_row,
    look_ahead,
    smoothed,
)

# ---------------------------------------------------------------- plain estimators


@dataclass
class Wait:
    """So much weight waits in a row, until it is used again, is given up, or nothing of either yet."""

    row: int
    weight: float
    since: float
    ttl: float
    until: float | None = None
    is_reuse: bool = False


class PlainTable:
    """All waits that ever were, in a list."""

    def __init__(self) -> None:
        self.past: list[Wait] = []
        self.waiting: dict[int, Wait] = {}
        self.blocks_opened: list[int] = []

    def open(self, record: int, row: int, num_blocks: int, now: float, ttl: float) -> None:
        self.blocks_opened.append(num_blocks)
        mean = sum(self.blocks_opened) / len(self.blocks_opened)
        self.waiting[record] = Wait(row, min(MAX_WEIGHT, num_blocks / mean), now, ttl)

    def part(self, record: int, share: float) -> Wait:
        """Take this share out of a wait."""
        wait = self.waiting[record]
        part = replace(wait, weight=wait.weight * share)
        wait.weight *= 1 - share
        return part

    def reuse(self, record: int, now: float, share: float) -> None:
        self.past.append(replace(self.part(record, share), until=now, is_reuse=True))
        if share == 1:
            del self.waiting[record]

    def split(self, record: int, part: int, share: float) -> None:
        self.waiting[part] = self.part(record, share)

    def close(self, record: int, now: float) -> None:
        self.past.append(replace(self.waiting.pop(record), until=now))

    def learned(self, now: float) -> tuple[Floats, Floats]:
        """Events and time at risk by row and bucket."""
        events, at_risk = np.zeros((NUM_ROWS, NUM_BUCKETS)), np.zeros((NUM_ROWS, NUM_BUCKETS))
        for wait in [*self.past, *self.waiting.values()]:
            age = (now if wait.until is None else wait.until) - wait.since
            stretches = [(wait.row, min(age, wait.ttl))]
            if age > wait.ttl:
                stretches.append((ENDED, age - wait.ttl))
            for row, length in stretches:
                for bucket in range(NUM_BUCKETS):
                    end = EDGES[bucket + 1] if bucket < NUM_BUCKETS - 1 else math.inf
                    at_risk[row, bucket] += wait.weight * max(0.0, min(length, end) - EDGES[bucket])
            if wait.is_reuse:
                row, length = stretches[-1]
                events[row, sum(edge <= length for edge in EDGES[1:-1])] += wait.weight
        return events, at_risk


def plain_smoothed(events: Floats, at_risk: Floats) -> Floats:
    """Class by class, each from the one above it."""

    def drawn_to(above: list[float], rows: list[int]) -> list[float]:
        ev = [sum(events[row, bucket] for row in rows) for bucket in range(NUM_BUCKETS)]
        ex = [sum(at_risk[row, bucket] for row in rows) for bucket in range(NUM_BUCKETS)]
        level = (sum(ev) + PRIOR_REUSES) / (sum(x * h for x, h in zip(ex, above, strict=True)) + PRIOR_REUSES)
        return [(e + PRIOR_REUSES) / (x + PRIOR_REUSES / (level * h)) for e, x, h in zip(ev, ex, above, strict=True)]

    classes = list(product(range(2), range(SIZES), range(TURNS), range(OUTPUTS)))

    @cache
    def of(path: tuple[int, ...]) -> list[float]:
        if path:
            return drawn_to(of(path[:-1]), [row for row, it in enumerate(classes) if it[: len(path)] == path])
        reuses = np.broadcast_to(PRIOR_EVENTS, NUM_BUCKETS)  # that are believed in before any is seen
        totals = zip(events.sum(axis=0), at_risk.sum(axis=0), reuses, PRIOR_HAZARD, strict=True)
        return [(ev + more) / (ex + more / prior) for ev, ex, more, prior in totals]

    hazard = [of(path) for path in classes]
    for row in range(NUM_CLASSES, NUM_ROWS):
        hazard.append(drawn_to([h * (ENDED_HAZARD if row == ENDED else 1) for h in of(())], [row]))
    return np.array(hazard)


def plain_index(hazard: list[float], bucket: int, pause: float = 0.0) -> float:
    """Every horizon tried, each with a pause behind it."""
    best = 0.0
    for horizon in range(bucket, NUM_BUCKETS):
        risk = time = 0.0  # hazard times seconds so far; seconds until a reuse or the horizon
        for i in range(bucket, horizon + 1):
            width = float(EDGES[i + 1] - EDGES[i])
            time += math.exp(-risk) * -math.expm1(-hazard[i] * width) / hazard[i]
            risk += hazard[i] * width
        best = max(best, -math.expm1(-risk) / (time + pause))
    return best


def learned(table: HazardTable, now: float) -> tuple[Floats, Floats]:
    """Events and time at risk by row and bucket."""
    both = np.zeros((2, NUM_ROWS, NUM_BUCKETS))
    for row, columns in table.state(now)["rows"].items():
        both[:, int(row)] = columns
    return both[0], both[1]


# ---------------------------------------------------------------- reuses and time at risk


def with_a_past(seed: int, num_acts: int) -> tuple[HazardTable, PlainTable, float]:
    """Both after the same random history, and the time by then."""
    rng = random.Random(seed)
    table, plain, now = HazardTable(), PlainTable(), 0.0
    for _ in range(num_acts):
        now += rng.choice([0.0, rng.random(), 10.0 ** rng.uniform(-3, 3)])
        act = rng.choice(["open", "open", "open", "reuse", "reuse", "close", "split", "refresh"])
        record = rng.choice([*plain.waiting, -1])
        if act == "open":
            row = rng.choice([rng.randrange(NUM_ROWS), ENDED, SHARED])
            num_blocks, ttl = rng.choice([1, 3, 400]), rng.choice([math.inf, 0.0, 2.0, rng.expovariate(0.01)])
            plain.open(table.open(row, num_blocks, now, ttl), row, num_blocks, now, ttl)
        elif act == "refresh":
            table.refresh(now)
        elif record < 0:
            continue
        elif act == "reuse":
            share = rng.choice([1.0, 1.0, rng.random()])
            assert table.reuse(record, now, share) == (share < 1)
            plain.reuse(record, now, share)
        elif act == "split":
            share = rng.random()
            plain.split(record, table.split(record, share), share)
        else:
            table.close(record, now)
            plain.close(record, now)
        assert table.num_waiting == len(plain.waiting)
    return table, plain, now


@pytest.mark.parametrize("seed", range(12))
def test_reuses_and_time_at_risk_are_those_of_a_plain_list_of_waits_ended_or_not(seed: int):
    table, plain, now = with_a_past(seed, num_acts=100 + 150 * (seed % 4))
    assert len(plain.waiting) > 5
    for later in (0.0, 77.0):  # those that wait grow older meanwhile
        for ours, theirs in zip(learned(table, now + later), plain.learned(now + later), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_clearing_ends_every_wait_and_keeps_what_it_was_worth(seed: int):
    table, plain, now = with_a_past(seed, num_acts=200)
    before = plain.learned(now)
    table.clear(now)
    assert table.num_waiting == 0
    for ours, theirs in zip(learned(table, now + 1000), before, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


def test_more_than_a_thousand_can_wait_at_once():
    table, plain = HazardTable(), PlainTable()
    for i in range(2500):
        plain.open(table.open(SHARED, 1 + i % 3, i * 0.01, math.inf), SHARED, 1 + i % 3, i * 0.01, math.inf)
    assert table.num_waiting == len(plain.waiting) == 2500
    for record in list(plain.waiting)[::2]:
        table.close(record, 60.0)
        plain.close(record, 60.0)
    for ours, theirs in zip(learned(table, 99.0), plain.learned(99.0), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_the_index_follows_from_what_was_learned_when_it_was_refreshed(seed: int):
    table, plain, now = with_a_past(seed, num_acts=300)
    table.refresh(now)
    np.testing.assert_allclose(table.index, look_ahead(smoothed(*plain.learned(now))), rtol=1e-6)


# ---------------------------------------------------------------- the hazard


@pytest.mark.parametrize("seed", range(3))
def test_classes_are_drawn_to_those_above_them_as_a_plain_recursion_has_it(seed: int):
    rng = np.random.default_rng(seed)
    shape = (NUM_ROWS, NUM_BUCKETS)
    is_seen = rng.random(shape) < [0.02, 0.3, 0.9][seed]
    at_risk = np.where(is_seen, 10.0 ** rng.uniform(-3, 7, shape), 0.0)
    events = np.where(rng.random(shape) < 0.5, at_risk * 10.0 ** rng.uniform(-6, 0, shape), 0.0)
    np.testing.assert_allclose(smoothed(events, at_risk), plain_smoothed(events, at_risk), rtol=1e-9)


def test_without_data_the_hazard_is_the_prior():
    nothing = np.zeros((NUM_ROWS, NUM_BUCKETS))
    hazard = smoothed(nothing, nothing)
    for row in range(NUM_ROWS):
        np.testing.assert_allclose(hazard[row], PRIOR_HAZARD * (ENDED_HAZARD if row == ENDED else 1.0), rtol=1e-12)
    low, high = EDGES[:-1][EDGES[:-1] >= 1], EDGES[1:][EDGES[:-1] >= 1]
    np.testing.assert_allclose(PRIOR_HAZARD[EDGES[:-1] >= 1], 0.03 / np.sqrt(low * high))  # as likely in each octave


@pytest.mark.parametrize("seed", range(3))
def test_with_much_data_the_hazard_is_reuses_over_time_at_risk(seed: int):
    rng = np.random.default_rng(seed)
    hazard = 10.0 ** rng.uniform(-4, 1, (NUM_ROWS, NUM_BUCKETS))
    at_risk = 1e9 / hazard ** rng.random()
    np.testing.assert_allclose(smoothed(hazard * at_risk, at_risk), hazard, rtol=0.01)


def test_a_class_with_few_data_has_the_shape_of_the_class_above_and_a_level_of_its_own():
    events, at_risk = np.zeros((2, NUM_ROWS, NUM_BUCKETS))
    known = class_row(NEW, 0, 1, 0)
    at_risk[known] = 1e6
    events[known] = 1e6 * np.linspace(0.001, 0.1, NUM_BUCKETS)
    at_risk[class_row(NEW, 0, 1, 600)] = 1e4 * (np.arange(NUM_BUCKETS) < 4)  # 40,000 s without a reuse
    hazard = smoothed(events, at_risk)
    above, unseen, unlucky = hazard[known], hazard[class_row(NEW, 0, 1, 100)], hazard[class_row(NEW, 0, 1, 600)]
    np.testing.assert_allclose(unseen, above, rtol=0.15)
    np.testing.assert_allclose(unlucky[4:] / above[4:], unlucky[4] / above[4], rtol=0.15)
    assert unlucky[20] < 0.3 * above[20]


# ---------------------------------------------------------------- the index


@pytest.mark.parametrize("seed", range(4))
def test_the_index_is_the_best_over_all_horizons(seed: int):
    rng = random.Random(seed)
    rows = [
        [10.0 ** rng.uniform(-12, 4) for _ in range(NUM_BUCKETS)],  # any
        [10.0 ** rng.uniform(-4, -1) for _ in range(NUM_BUCKETS)],  # as in life
        [rng.choice([1e-30, 1e-3, 1e9]) for _ in range(NUM_BUCKETS)],  # never, or at once
        [1e-300] * NUM_BUCKETS,
        [1e12] * NUM_BUCKETS,
    ]
    pause = [0.0, 0.0, 0.01, 5.0][seed]
    index = look_ahead(np.array(rows), pause)
    for row, hazard in enumerate(rows):
        best = [plain_index(hazard, bucket, pause) for bucket in range(NUM_BUCKETS)]
        assert index[row].tolist() == pytest.approx(best, rel=1e-9, abs=1e-12), f"seed {seed}, row {row}"


def test_where_the_hazard_is_constant_the_index_is_the_hazard_at_every_age():
    hazard = np.full((1, NUM_BUCKETS), 0.02)
    np.testing.assert_allclose(look_ahead(hazard), hazard)


def test_with_a_pause_a_small_chance_in_the_next_moment_is_not_the_best_of_all():
    hazard = np.full((1, NUM_BUCKETS), 1e-3)
    hazard[0, 0] = 0.1  # within the first bucket, which is short; or else it waits for minutes
    assert look_ahead(hazard)[0, 0] == pytest.approx(0.1)
    assert look_ahead(hazard, 1.0)[0, 0] < 3e-3


def test_before_a_hump_the_index_is_higher_than_behind_it_though_the_hazard_is_not():
    age = EDGES[:-1]
    hazard = np.where((age >= 45) & (age < 64), 0.05, 1e-4)[None]
    index = look_ahead(hazard)[0]
    assert index[bucket_of(1)] > 5 * index[bucket_of(100)]
    assert index[bucket_of(30)] > index[bucket_of(1)]  # it is nearer
    assert index[bucket_of(50)] == pytest.approx(0.05)


# ---------------------------------------------------------------- buckets and rows


def test_edges_are_half_octaves_from_a_second_or_less_to_a_month_or_more():
    assert EDGES[0] == 0.0
    assert 0.0 < EDGES[1] <= 1.0 in EDGES
    np.testing.assert_allclose(EDGES[2:] / EDGES[1:-1], math.sqrt(2))
    assert EDGES[-1] > 30 * 24 * 3600


def test_both_ways_to_find_a_bucket_agree_with_the_edges():
    rng = random.Random(0)
    ages = [0.0, -1.0, 1e-300, 0.7, 1e9, 1e15, *(10.0 ** rng.uniform(-6, 8) for _ in range(20_000))]
    for edge in EDGES[1:].tolist():
        ages += [edge * (1 - 1e-12), edge, edge * (1 + 1e-12)]
    buckets = buckets_of(np.array(ages)).tolist()
    for age, bucket in zip(ages, buckets, strict=True):
        assert bucket == bucket_of(age), age
        assert bucket == min(NUM_BUCKETS - 1, sum(edge <= age for edge in EDGES[1:].tolist())), age


def test_every_class_has_a_row_and_no_two_the_same():
    sizes, turns, outputs = [64 << size for size in range(SIZES)], range(1, TURNS + 1), [0, 64, 256, 512]
    rows = [class_row(*it) for it in product((NEW, PREFIX), sizes, turns, outputs)]
    assert rows == list(range(NUM_CLASSES))
    assert class_row(NEW, 0, 1, 0) == class_row(NEW, 127, 1, 63) == rows[0]
    assert class_row(PREFIX, 10**9, 10**9, 10**9) == rows[-1]
    assert len({*rows, SHARED, LEFT_BEHIND, ENDED}) == NUM_CLASSES + 3


def test_what_was_announced_has_a_row_for_every_four_times_as_long():
    for first in (EXPECTED, KEPT):
        assert [announced_row(first, 4.0**i) - first for i in range(8)] == list(range(8))
        assert {announced_row(first, seconds) - first for seconds in (0.0, 1e-9, 1.0, 1.9)} == {0}
        assert {announced_row(first, seconds) - first for seconds in (4.0**7, 1e9, 1e300)} == {7}
    assert EXPECTED == ENDED + 1
    assert (EXPECTED + 8, KEPT + 8) == (KEPT, NUM_ROWS)
