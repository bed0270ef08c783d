"""How likely idle K/V is to be used within the next second: learned by class and age, no shape of the curve assumed.

The *hazard* is the chance a second that something idle is reused now, given that it has waited so long. It is estimated
as reuses over time at risk, in buckets of age. Waits that have not ended yet are time at risk too (they are
*censored*): without them the oldest age that was ever seen would look the most promising of all.

What ranks victims is not the hazard now but the *index*: over all horizons T the best ratio of the chance of a reuse
within T to the time spent waiting for it (Gittins, Journal of the Royal Statistical Society B 41(2), 1979; in caches
Beckmann, Chen, Cidon, LHD, NSDI 2018). People read before they answer, so nobody comes back within the first seconds:
a ranking by the hazard now throws out a fresh chat first, just before it is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]

NUM_BUCKETS = 56  # of age, half an octave each
SHORTEST = 2.0**-6  # seconds; for caches that turn over within one
EDGES: Floats = np.concatenate([[0.0], SHORTEST * 2.0 ** (np.arange(NUM_BUCKETS) / 2)])  # seconds: 0, 1/64, .. 34 days
WIDTHS: Floats = np.diff(EDGES)

# A row for each class of blocks. Those of a session by what its last request was like ...
SIZES, TURNS, OUTPUTS = 9, 3, 4  # new tokens, turn, length of the answer
NEW, PREFIX = 0, 1  # blocks that the request added, blocks that it found
NUM_CLASSES = 2 * SIZES * TURNS * OUTPUTS
# ... and rows of their own:
SHARED = NUM_CLASSES  # blocks that several sessions use
LEFT_BEHIND = SHARED + 1  # blocks that a session did not go on from
ENDED = SHARED + 2  # blocks of a session that was declared over, or is past its time to live
EXPECTED = SHARED + 3  # blocks that the client wants again in about 1, 4, 16, .. seconds
KEPT = EXPECTED + 8  # blocks that the client wants kept for about 1, 4, 16, .. seconds
NUM_ROWS = KEPT + 8

# Before anything is known: as likely within each octave from 1 s on, and the buckets below count as one together.
PRIOR_HAZARD: Floats = 0.03 / np.sqrt(np.maximum(EDGES[:-1], 0.5) * np.maximum(EDGES[1:], 1.0))
PRIOR_EVENTS: Floats = np.where(EDGES[:-1] < 1.0, 0.5 * WIDTHS, 0.5)
PRIOR_REUSES = 10.0  # reuses that a class must have seen to outweigh the class above it
ENDED_HAZARD = 0.05  # hazard of what was declared over, as a share of all others', until experience says otherwise
MAX_WEIGHT = 20.0  # a record weighs at most so many mean ones
CLOSED_PER_BATCH = 128  # closed records that are learned from together
STATE_VERSION = 1
LARGEST = 1e18  # number in a state; a thousand years of a million waiting records are fewer seconds


def class_row(part: int, num_new_tokens: int, turn: int, num_output_tokens: int) -> int:
    """The row of the blocks that a request added (part NEW) or found (PREFIX)."""
    size = min(SIZES - 1, max(0, int(math.log2(max(64, num_new_tokens) / 64))))
    output = (num_output_tokens >= 64) + (num_output_tokens >= 256) + (num_output_tokens >= 512)
    return ((part * SIZES + size) * TURNS + min(turn, TURNS) - 1) * OUTPUTS + output


def announced_row(first: int, seconds: float) -> int:
    """The row, from EXPECTED or KEPT on, of what was announced for so many seconds."""
    return first + min(7, max(0, round(math.log2(max(1.0, seconds)) / 2)))


def bucket_of(age: float) -> int:
    """The bucket of an age in seconds."""
    return 0 if age < SHORTEST else min(NUM_BUCKETS - 1, 1 + int(2.0 * math.log2(age / SHORTEST)))


def buckets_of(ages: Floats) -> Rows:
    """The buckets of many ages."""
    # Truncated: what is shorter than the shortest is 0.
    buckets: Rows = (2.0 * np.log2(np.maximum(ages / SHORTEST, 0.5)) + 1.0).astype(np.int64)
    return np.minimum(np.maximum(buckets, ages >= SHORTEST), NUM_BUCKETS - 1)


class HazardTable:
    """Records of what waits, the reuses and the time at risk of all before, and the index that follows from both.

    A record is a number: `open` hands it out, `close` takes it back. It weighs as much as the blocks that it stands
    for: long chains come back less often than short ones, and cost more.
    """

    def __init__(self) -> None:
        self.events: Floats = np.zeros((NUM_ROWS, NUM_BUCKETS))  # weight that was reused
        self.at_risk: Floats = np.zeros((NUM_ROWS, NUM_BUCKETS))  # weight times seconds, of closed records
        self.num_opened = 0
        self.sum_blocks = 0.0
        self.clear(0.0)

    def clear(self, now: float) -> None:
        """End the wait of all records, and learn from it."""
        if self.num_opened:
            self._learn()
            self.at_risk += self._waiting_at_risk(now)
        self._row = np.zeros(1024, np.int64)
        self._weight = np.zeros(1024)  # 0: this number is free
        self._since = np.zeros(1024)
        self._ttl = np.zeros(1024)
        self._free = list(range(1023, -1, -1))
        self._closed: list[tuple[int, float, float, float, bool]] = []  # row, weight, age, ttl, whether by a reuse
        self.index = _small(look_ahead(smoothed(self.events, self.at_risk)))

    @property
    def num_waiting(self) -> int:
        """Open records."""
        return len(self._row) - len(self._free)

    def open(self, row: int, num_blocks: int, now: float, ttl: float = math.inf) -> int:
        """So many blocks begin to wait. What waits longer than `ttl` seconds goes on as a new wait in row ENDED."""
        self.num_opened += 1
        self.sum_blocks += num_blocks
        return self._new(row, min(MAX_WEIGHT, num_blocks * self.num_opened / self.sum_blocks), now, ttl)

    def _new(self, row: int, weight: float, since: float, ttl: float) -> int:
        if not self._free:
            self._grow()
        record = self._free.pop()
        self._row[record], self._weight[record], self._since[record], self._ttl[record] = row, weight, since, ttl
        return record

    def reuse(self, record: int, now: float, share: float = 1.0) -> bool:
        """This share of a record is reused. Whether a rest goes on waiting; if not, the record is closed."""
        if share > 0.0:
            weight = float(self._weight[record])
            self._note(record, weight * share, now, True)
            self._weight[record] = weight * (1.0 - share)
        if share >= 1.0:
            self._free.append(record)
        return share < 1.0

    def split(self, record: int, share: float) -> int:
        """This share of a record waits on as one of its own."""
        row, since, ttl = int(self._row[record]), float(self._since[record]), float(self._ttl[record])
        weight = float(self._weight[record])
        self._weight[record] = weight * (1.0 - share)
        return self._new(row, weight * share, since, ttl)

    def close(self, record: int, now: float) -> None:
        """The wait ends, and not by a reuse: nobody would notice one any more."""
        self._note(record, float(self._weight[record]), now, False)
        self._weight[record] = 0.0
        self._free.append(record)

    def _note(self, record: int, weight: float, now: float, is_reuse: bool) -> None:
        age = now - float(self._since[record])
        self._closed.append((int(self._row[record]), weight, age, float(self._ttl[record]), is_reuse))
        if len(self._closed) >= CLOSED_PER_BATCH:
            self._learn()

    def _grow(self) -> None:
        size = len(self._row)
        self._free = list(range(2 * size - 1, size - 1, -1))
        self._row = np.concatenate([self._row, np.zeros(size, np.int64)])
        self._weight, self._since, self._ttl = (
            np.concatenate([array, np.zeros(size)]) for array in (self._weight, self._since, self._ttl)
        )

    # ---------------------------------------------------------------- what follows

    def refresh(self, now: float, pause: float = 0.0) -> None:
        """Compute the index from all that is known by now. About 1 ms, and 100 ns for each record that waits."""
        self._learn()
        self.index = _small(look_ahead(smoothed(self.events, self.at_risk + self._waiting_at_risk(now)), pause))

    def fade(self, share: float) -> None:
        """Keep this share of what was learned, so that what comes later counts for more."""
        self._learn()
        self.events *= share
        self.at_risk *= share

    def _learn(self) -> None:
        """From what was closed."""
        if not self._closed:
            return
        rows, weights, ages, ttl, is_reuse = map(np.array, zip(*self._closed, strict=True))
        self._closed.clear()
        self.at_risk += _time_at_risk(rows, weights, ages, ttl)
        is_late = ages > ttl
        rows, ages = np.where(is_late, ENDED, rows), np.where(is_late, ages - ttl, ages)
        np.add.at(self.events, (rows, buckets_of(ages)), weights * is_reuse)

    def _waiting_at_risk(self, now: float) -> Floats:
        waiting = np.flatnonzero(self._weight)
        ages = now - self._since[waiting]
        return _time_at_risk(self._row[waiting], self._weight[waiting], ages, self._ttl[waiting])

    # ---------------------------------------------------------------- what outlives a restart

    def state(self, now: float) -> dict[str, Any]:
        """What was learned so far, as JSON has it."""
        self._learn()
        at_risk = self.at_risk + self._waiting_at_risk(now)
        used = np.flatnonzero(self.events.any(axis=1) | at_risk.any(axis=1)).tolist()
        return {
            "version": STATE_VERSION,
            "shape": [NUM_ROWS, NUM_BUCKETS],
            "num_opened": self.num_opened,
            "sum_blocks": self.sum_blocks,
            "rows": {str(row): [self.events[row].tolist(), at_risk[row].tolist()] for row in used},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. ValueError, and nothing changed, if it is none of this version."""
        given, needed = (state.get("version"), state.get("shape")), (STATE_VERSION, [NUM_ROWS, NUM_BUCKETS])
        if given != needed:
            raise ValueError(f"version {given[0]!r} of shape {given[1]!r}; {needed[0]} of shape {needed[1]} is needed")
        events, at_risk = np.zeros_like(self.events), np.zeros_like(self.at_risk)
        for row, columns in state["rows"].items():
            both = np.array(columns, float)
            if not 0 <= int(row) < NUM_ROWS or both.shape != (2, NUM_BUCKETS):
                raise ValueError(f"row {row:.20} is none of {NUM_ROWS}, or not of the shape {(2, NUM_BUCKETS)}")
            events[int(row)], at_risk[int(row)] = both
        num_opened, sum_blocks = int(state["num_opened"]), float(state["sum_blocks"])
        numbers = np.concatenate([events.ravel(), at_risk.ravel(), [num_opened, sum_blocks]])
        if (
            not ((numbers >= 0) & (numbers <= LARGEST)).all()
            or (num_opened > 0) != (sum_blocks > 0)
            or num_opened > sum_blocks
        ):
            raise ValueError("it holds numbers that cannot be")
        self.events, self.at_risk, self.num_opened, self.sum_blocks = events, at_risk, num_opened, sum_blocks
        self.index = _small(look_ahead(smoothed(events, at_risk)))


def _small(index: Floats) -> NDArray[np.float32]:
    return np.minimum(index, np.finfo(np.float32).max).astype(np.float32)


def _time_at_risk(rows: Rows, weights: Floats, ages: Floats, ttl: Floats) -> Floats:
    """Weighted seconds that records of these ages have spent in each row and bucket."""
    late = np.flatnonzero(ages > ttl)
    if len(late):
        rows = np.concatenate([rows, np.full(len(late), ENDED)])
        weights = np.concatenate([weights, weights[late]])
        ages = np.concatenate([np.minimum(ages, ttl), (ages - ttl)[late]])
    buckets = buckets_of(ages)
    cells, size = rows * NUM_BUCKETS + buckets, NUM_ROWS * NUM_BUCKETS
    inside = np.bincount(cells, weights * (ages - EDGES[buckets]), size).reshape(NUM_ROWS, NUM_BUCKETS)
    weight = np.bincount(cells, weights, size).reshape(NUM_ROWS, NUM_BUCKETS)
    passed = weight[:, ::-1].cumsum(axis=1)[:, ::-1] - weight  # of records that are beyond a bucket
    time_at_risk: Floats = inside + passed * WIDTHS
    return time_at_risk


def smoothed(events: Floats, at_risk: Floats) -> Floats:
    """Hazard by row and bucket: each class is drawn towards the one above it as far as it has seen little itself.

    The classes above one another: all, new or found, number of new tokens, turn, length of the answer.
    """
    root = (events.sum(axis=0) + PRIOR_EVENTS) / (at_risk.sum(axis=0) + PRIOR_EVENTS / PRIOR_HAZARD)
    shape = (2, SIZES, TURNS, OUTPUTS, NUM_BUCKETS)
    class_events, class_at_risk = events[:NUM_CLASSES].reshape(shape), at_risk[:NUM_CLASSES].reshape(shape)
    hazard = root
    for level in range(1, 5):
        below = tuple(range(level, 4))
        hazard = _drawn_to(hazard[..., None, :], class_events.sum(axis=below), class_at_risk.sum(axis=below))
    others = np.tile(root, (NUM_ROWS - NUM_CLASSES, 1))
    others[ENDED - NUM_CLASSES] *= ENDED_HAZARD
    others = _drawn_to(others, events[NUM_CLASSES:], at_risk[NUM_CLASSES:])
    return np.concatenate([hazard.reshape(NUM_CLASSES, NUM_BUCKETS), others])


def _drawn_to(above: Floats, events: Floats, at_risk: Floats) -> Floats:
    """A class first takes over the shape of the one above, scaled to its own level; then its own reuses bend it."""
    level = (events.sum(axis=-1) + PRIOR_REUSES) / ((at_risk * above).sum(axis=-1) + PRIOR_REUSES)
    hazard: Floats = (events + PRIOR_REUSES) / (at_risk + PRIOR_REUSES / (level[..., None] * above))
    return hazard


def look_ahead(hazard: Floats, pause: float = 0.0) -> Floats:
    """For each row and bucket the best of P(reuse within T) / E[time until the reuse or T], over all edges T beyond.

    The time is longer by `pause` seconds: so long nobody thinks it over. Without it a chance in the next millisecond
    would look the best of all, however small.
    """
    hazard = np.ascontiguousarray(hazard.T)
    reused = -np.expm1(-hazard * WIDTHS[:, None])  # in a bucket, of what enters it
    waited = reused / hazard  # seconds in it
    # Horizon by horizon, for all buckets before it at once: what is left of what stood there, its time, its best ratio.
    left, time, index = np.ones_like(hazard), np.zeros_like(hazard), np.zeros_like(hazard)
    for horizon in range(NUM_BUCKETS):
        before = slice(0, horizon + 1)
        time[before] += left[before] * waited[horizon]
        left[before] *= 1.0 - reused[horizon]
        np.maximum(index[before], (1.0 - left[before]) / (time[before] + pause), out=index[before])
    return np.ascontiguousarray(index.T)
