"""Which run of idle blocks goes next: scores of many at once, and a short list of the lowest."""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from pagetable.memory.hazard import ENDED, HazardTable, bucket_of, buckets_of

SHARE_PER_RANKING = 200  # all are scored anew whenever one block in so many has left ...
SECONDS_PER_RANKING = 0.1  # ... unless that was just now
SHORTEST_LIST = 32
SHARED_FLOOR = 0.1  # uses in the mean interval between them that what is shared is believed to see at least


class Candidates:
    """Things that may leave, each with a `stamp` and a `slot` of its own, ordered by score.

    A score is what the hazard table foretells at an age, times a factor. Scores change as time passes: a newcomer is
    scored at once, all others from time to time.
    """

    def __init__(self, num_blocks: int, hazards: HazardTable) -> None:
        self._hazards = hazards
        self._blocks_per_ranking = max(1, num_blocks // SHARE_PER_RANKING)
        self._budget = 0  # blocks that may still leave before all are ranked anew
        self._ranked_at = -math.inf
        self._highest_listed = -math.inf  # score; whoever has more may not be the next, not all are listed
        self._num_stamps = 0
        self._shortlist: list[tuple[float, float, int, Any]] = []  # score, since, stamp, run; a heap
        self._free = list(range(255, -1, -1))
        self._runs: list[Any] = [None] * 256
        self._is_taken = np.zeros(256, bool)
        self._row = np.zeros(256, np.int64)
        self._since = np.zeros(256)
        self._ttl = np.zeros(256)
        self._interval = np.zeros(256)  # infinite for one that is not shared
        self._factor = np.zeros(256)

    def offer(self, run: Any, row: int, since: float, ttl: float, interval: float, factor: float, now: float) -> None:
        """Take in a run, or note that its score has changed. Of equals the one that waits longer goes first."""
        slot = run.slot
        if slot < 0:
            if not self._free:
                self._grow()
            slot = run.slot = self._free.pop()
            self._runs[slot] = run
            self._is_taken[slot] = True
        self._row[slot], self._since[slot], self._ttl[slot] = row, since, ttl
        self._interval[slot], self._factor[slot] = interval, factor
        age = max(0.0, now - since)
        self._push(self._score(row, age, ttl, interval) * factor, since, run)

    def withdraw(self, run: Any) -> None:
        """A run is no candidate any more, if it was one."""
        if run.slot >= 0:
            self._is_taken[run.slot] = False
            self._runs[run.slot] = None
            self._free.append(run.slot)
            run.slot = run.stamp = -1

    def first(self, now: float) -> Any:
        """The run with the lowest score, scores being as old as the last ranking. There must be one."""
        if self._budget <= 0 and now > self._ranked_at + SECONDS_PER_RANKING:
            self._rank(now)
        while True:
            if not self._shortlist:
                self._rank(now)
            score, _, stamp, run = self._shortlist[0]
            if run.stamp != stamp:
                heappop(self._shortlist)
            elif score > self._highest_listed:  # something that is not listed is lower
                self._rank(now)
            else:
                return run

    def note_left(self, num_blocks: int) -> None:
        """So many blocks are about to leave."""
        self._budget -= num_blocks

    def _score(self, row: int, age: float, ttl: float, interval: float) -> float:
        """Of one, as `_rank` has it for many: arrays of one element would take ten times as long."""
        index = self._hazards.index
        if age > ttl:
            row, age = ENDED, age - ttl
        bucket = bucket_of(age)
        score = float(index[row, bucket])
        if interval < math.inf:
            score = max(score, SHARED_FLOOR / max(1.0, interval, age))
        return score

    def _rank(self, now: float) -> None:
        """Score all and list the lowest."""
        self._ranked_at, self._budget = now, self._blocks_per_ranking
        slots = np.flatnonzero(self._is_taken)
        rows, interval, index = self._row[slots], self._interval[slots], self._hazards.index
        ages = np.maximum(now - self._since[slots], 0.0)
        late = ages - self._ttl[slots]
        is_late = late > 0.0
        if is_late.any():
            ages, rows = np.where(is_late, late, ages), np.where(is_late, ENDED, rows)
        buckets = buckets_of(ages)
        scores = index[rows, buckets]
        shared = np.flatnonzero(interval < math.inf)
        if len(shared):
            floor = SHARED_FLOOR / np.maximum(np.maximum(1.0, interval[shared]), ages[shared])
            scores[shared] = np.maximum(scores[shared], floor)
        scores *= self._factor[slots]
        num = min(len(slots), max(SHORTEST_LIST, self._budget))
        lowest = np.argpartition(scores, num - 1)[:num]
        self._highest_listed = float(scores[lowest[-1]]) if num < len(slots) else math.inf
        self._shortlist = []
        entries = (slots[lowest].tolist(), scores[lowest].tolist(), self._since[slots[lowest]].tolist())
        for slot, score, since in zip(*entries, strict=True):
            self._shortlist.append(self._entry(score, since, self._runs[slot]))
        heapify(self._shortlist)

    def _entry(self, score: float, since: float, run: Any) -> tuple[float, float, int, Any]:
        """A place in the list, and the only one that counts for this run from now on."""
        run.stamp = self._num_stamps
        self._num_stamps += 1
        return score, since, run.stamp, run

    def _push(self, score: float, since: float, run: Any) -> None:
        heappush(self._shortlist, self._entry(score, since, run))
        if len(self._shortlist) > 4 * len(self._runs):  # most of it is out of date
            self._shortlist.clear()
            self._highest_listed = -math.inf

    def _grow(self) -> None:
        size = len(self._runs)
        self._runs += [None] * size
        self._free = list(range(2 * size - 1, size - 1, -1))
        for name in ("_is_taken", "_row", "_since", "_ttl", "_interval", "_factor"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
