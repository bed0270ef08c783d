"""What can be known of a trace without a cache: when each block is used again. From it follow, at any capacity, the
hits of LRU and of Belady's MIN.

All blocks of a request that the next one on the same path reuses are one *run*: they were last used together, and are
used again together. A chat has a handful of runs a request however long it is. What is kept is the runs and a few
numbers a request and a block, and no access.

LRU is a stack algorithm (Mattson, Gecsei, Slutz, Traiger, 1970): a block is hit at capacity C exactly when fewer than C
other blocks were used since. One pass over the trace gives the distances of all accesses, so LRU at every capacity.

MIN (Belady, 1966) evicts what is used again last. In a tree of prefixes whoever uses a block uses its parent, so the
next use of a parent is never later than that of its child: MIN takes the child first by itself, and a rule that keeps
prefixes whole costs it nothing. It is the optimum for a cache in which a request must hold all of its blocks. (Where
tokens are replayed, partial blocks take room that is not counted here: there it is a bound.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from pagetable.replay.trace import Grown, IntArray

NEVER = -1
Runs = list[tuple[int, int]]  # (request, blocks), one behind the other along a path

_CHUNK = 512  # requests whose live blocks are summed up together


@dataclass(slots=True)
class Access:
    """One request as a cache sees it."""

    path: IntArray  # all blocks that it leaves behind, from the root down
    num_accesses: int  # of these, those of its prompt
    num_reusable: int  # of these, those that it can hit: the last may have to be computed in any case
    num_needed: int  # blocks without which it cannot begin
    num_unknown: int = 0  # blocks behind the path that nobody else can use: of an answer that the trace does not tell
    is_partial: bool = False  # whether it ends in a block that is not full, and so is not kept


class Reuse:
    """The runs of a trace, taken down request by request with `add`."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_accesses = 0
        self.num_reusable = 0  # of these, those that could be hit
        self.num_hits = 0  # of an infinite cache
        self.num_nodes = 0
        self._last_user = Grown(-1)  # request that used a block last
        self._live = Grown(0)  # by request: blocks that it used last
        self._live_sums = Grown(0)  # of _CHUNK requests
        self._sizes: list[int] = []  # by request: blocks that it leaves behind
        self._has_partial = False
        self._num_unknown = 0
        self._needed: list[int] = []  # by request: blocks without which it is refused
        self._next_uses: list[Runs] = []  # by request: who hits its blocks next, from the root down
        self._distances = np.zeros(1024, np.int64)  # differences of the histogram of LRU distances
        self._arrivals: list[float] = []
        self._intervals: list[tuple[float, int]] = []  # seconds between two uses, blocks

    def add(self, access: Access, arrival: float) -> int:
        """Take down the next request. Returns how many of its blocks were ever seen before: an infinite cache hits."""
        now, path = self.num_requests, access.path
        last_user = self._last_user.fit(int(path.max(initial=-1)) + 1)
        runs = _runs(last_user[path])
        reusable, depth = access.num_reusable, 0
        live, sums = self._live.fit(now + 1), self._live_sums.fit(now // _CHUNK + 1)
        hits = 0
        for user, length in runs:
            hit = min(length, max(0, reusable - depth))
            if hit:
                self._count_distances(self._blocks_used_after(user, now), hit)
                self._intervals.append((arrival - self._arrivals[user], hit))
                self._next_uses[user].append((now, hit))
                hits += hit
            if hit < length:  # these must be computed again in any case
                self._next_uses[user].append((NEVER, length - hit))
            depth += length
        for user, length in runs:
            live[user] -= length
            sums[user // _CHUNK] -= length
        size = len(path) + access.num_unknown
        live[now] = size
        sums[now // _CHUNK] += size
        last_user[path] = now
        self._sizes.append(size)
        self._num_unknown += access.num_unknown
        self._has_partial |= access.is_partial
        self._needed.append(access.num_needed)
        self._next_uses.append([])
        self._arrivals.append(arrival)
        self.num_requests += 1
        self.num_accesses += access.num_accesses
        self.num_reusable += reusable
        self.num_hits += hits
        self.num_nodes += len(path) - depth
        return hits

    def _blocks_used_after(self, user: int, now: int) -> int:
        """Blocks whose last user came after `user`."""
        chunk = user // _CHUNK
        end = min((chunk + 1) * _CHUNK, now)
        after = int(self._live.values[user + 1 : end].sum())
        return after + int(self._live_sums.values[chunk + 1 : now // _CHUNK + 1].sum())

    def _count_distances(self, after: int, length: int) -> None:
        """`length` accesses at LRU distances after + 1, after + 2, ...: the head of a path is used last."""
        if after + length + 2 > len(self._distances):
            self._distances = np.concatenate([self._distances, np.zeros(2 * (after + length), np.int64)])
        self._distances[after + 1] += 1
        self._distances[after + length + 1] -= 1

    # ---------------------------------------------------------------- what follows

    @property
    def num_needed(self) -> int:
        """Blocks without which some request is refused."""
        return max(self._needed, default=0)

    def lru_hits(self) -> NDArray[np.int64]:
        """Hits of LRU by capacity, from 0 to so many blocks that more bring nothing. int64.

        They are too many below `num_needed`, where some requests are refused. A block that is being filled and not kept
        comes on top.
        """
        per_distance = np.cumsum(self._distances)
        largest = max(self.num_nodes, int(np.flatnonzero(per_distance).max(initial=0)))
        per_distance = np.pad(per_distance[: largest + 1], (0, max(0, largest + 1 - len(per_distance))))
        return np.cumsum(per_distance)

    @property
    def most_blocks(self) -> int:
        """Blocks that nothing of the trace can outgrow."""
        return self.num_nodes + self._num_unknown + 1

    def lru_blocks(self, share: Fraction) -> int:
        """The fewest blocks with which LRU has this share of an infinite cache's hits, and refuses nobody."""
        hits = self.lru_hits()
        enough = int(np.searchsorted(hits, math.ceil(share * int(hits[-1]))))
        return max(enough + self._has_partial, self.num_needed)

    def intervals(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Seconds between two uses of a block, and how many blocks it was so for."""
        seconds, counts = zip(*self._intervals, strict=True) if self._intervals else ((), ())
        return np.array(seconds, np.float64), np.array(counts, np.int64)

    def min_hits(self, capacity: int) -> int:
        """Hits of Belady's MIN with so many blocks. A request that needs more than there are hits nothing."""
        cache, hits = _Optimum(capacity), 0
        for now, needed in enumerate(self._needed):
            if needed <= capacity:  # its answer may outgrow the cache all the same
                hits += cache.use(now, min(self._sizes[now], capacity), self._served(self._next_uses[now], capacity))
        return hits

    def _served(self, runs: Runs, capacity: int) -> Runs:
        """The runs without requests that are too large: whoever waits for one of them waits for the next after it."""
        if all(self._needed[request] <= capacity for request, _ in runs if request != NEVER):
            return runs
        served: Runs = []
        depth, ahead = 0, runs[::-1]
        while ahead:
            request, length = ahead.pop()
            if request == NEVER or self._needed[request] <= capacity:
                served.append((request, length))
                depth += length
                continue
            ahead += _between(self._next_uses[request], depth, depth + length)[::-1]
        return served


@dataclass(slots=True)
class _Optimum:
    """MIN's cache, as numbers of blocks by the request that hits them next.

    A block that the next request on its path must compute in any case is worth nothing until then. It counts among
    those not used again, and once more when that request leaves it behind: too many, but of those that go first.
    """

    capacity: int
    num_blocks: int = 0
    never: int = 0  # that are not used again
    waiting: dict[int, int] = field(default_factory=dict)
    latest: list[int] = field(default_factory=list)  # heap of -request, of those in `waiting` and some that were

    def use(self, now: int, size: int, next_uses: Runs) -> int:
        """Serve a request of `size` blocks; its hits."""
        present = self.waiting.pop(now, 0)
        self._evict(self.num_blocks - present + size - self.capacity)
        self.num_blocks += size - present
        self._keep(size, next_uses)
        return present

    def _keep(self, num_blocks: int, next_uses: Runs) -> None:
        """The first `num_blocks` blocks of a path wait for their next use."""
        for request, length in next_uses:
            length = min(length, num_blocks)
            num_blocks -= length
            if request == NEVER:
                self.never += length
            elif length:
                if request not in self.waiting:
                    heappush(self.latest, -request)
                self.waiting[request] = self.waiting.get(request, 0) + length
        self.never += num_blocks

    def _evict(self, num_blocks: int) -> None:
        """Let go of so many blocks: those not used again, then those used last."""
        if num_blocks <= 0:
            return
        self.num_blocks -= num_blocks
        gone = min(num_blocks, self.never)
        self.never -= gone
        num_blocks -= gone
        while num_blocks:
            request = -self.latest[0]
            gone = min(num_blocks, self.waiting.get(request, 0))
            num_blocks -= gone
            if gone == self.waiting.get(request, 0):
                self.waiting.pop(request, None)
                heappop(self.latest)
            else:
                self.waiting[request] -= gone


def _between(runs: Runs, start: int, end: int) -> Runs:
    """What runs say of the blocks of a path from `start` to `end`; of those past the last run, that they are over."""
    parts, depth = [], 0
    for request, length in [*runs, (NEVER, end)]:
        overlap = min(end, depth + length) - max(start, depth)
        if overlap > 0:
            parts.append((request, overlap))
        depth += length
    return parts


def _runs(last_users: IntArray) -> Runs:
    """(last user, blocks) of each run along a path; where nobody used a block before, there are no more."""
    if not len(last_users):
        return []
    starts = np.flatnonzero(np.diff(last_users, prepend=last_users[0] - 1))
    lengths = np.diff(starts, append=len(last_users))
    users = last_users[starts]
    return [(user, length) for user, length in zip(users.tolist(), lengths.tolist(), strict=True) if user >= 0]
