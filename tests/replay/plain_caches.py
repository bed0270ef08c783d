"""Caches written down as plainly as can be: Belady's rule block by block, every choice there is, LRU with its blocks.

A block is known by its prefix here: the tuple of all that stands up to its end. Nothing is fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import combinations

Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Visit:
    """A request that must hold all blocks of `path`; of the first `num_reusable`, those that are there are hits.

    Without room for `num_needed` it is turned away. The rest is its answer, which ends where the room does.
    """

    path: Prefix  # numbers of nodes; one belongs to one place in the tree
    num_reusable: int
    num_needed: int


def _served(visits: list[Visit], capacity: int) -> list[Visit]:
    """What a cache gets to see of them."""
    return [
        Visit(visit.path[:capacity], visit.num_reusable, visit.num_needed)
        for visit in visits
        if visit.num_needed <= capacity
    ]


def _num_hits(cached: frozenset[int] | set[int], visit: Visit) -> int:
    """Blocks that are there without a gap, from the root down."""
    missing = [i for i, node in enumerate(visit.path) if node not in cached]
    return min(visit.num_reusable, missing[0] if missing else len(visit.path))


def belady_hits(visits: list[Visit], capacity: int) -> int:
    """Evict, one by one, the block whose next use is the farthest away, of several the deepest.

    A request that does not fit is turned away and is no use of anything. A block whose next user cannot hit it, and
    computes it in any case, is kept for nothing.
    """
    served = _served(visits, capacity)
    cached: set[int] = set()
    hits = 0
    for now, visit in enumerate(served):
        hits += _num_hits(cached, visit)

        def rank(node: int, now: int = now) -> tuple[float, int]:
            depth = next(other.path.index(node) for other in served if node in other.path)
            user = next((i for i in range(now + 1, len(served)) if node in served[i].path), None)
            is_worth_it = user is not None and depth < served[user].num_reusable
            return user if user is not None and is_worth_it else float("inf"), depth

        idle = cached - set(visit.path)
        while len(idle) + len(visit.path) > capacity:
            idle.remove(max(idle, key=rank))
        cached = idle | set(visit.path)
    return hits


def best_hits(visits: list[Visit], capacity: int, *, leaves_only: bool) -> int:
    """The most hits that any choice of victims can get, by trying all of them.

    Victims are idle blocks: with `leaves_only` such that no cached block loses its parent, otherwise any.
    """
    parents = {node: above for visit in visits for above, node in zip((-1, *visit.path), visit.path, strict=False)}
    served = _served(visits, capacity)

    def is_whole(cached: frozenset[int]) -> bool:
        return all(parents[node] in cached or parents[node] == -1 for node in cached)

    @cache
    def best(now: int, cached: frozenset[int]) -> int:
        if now == len(served):
            return 0
        visit = served[now]
        held = frozenset(visit.path)
        idle = cached - held
        num_victims = max(0, len(idle) + len(held) - capacity)
        states = (held | idle.difference(victims) for victims in combinations(sorted(idle), num_victims))
        return _num_hits(cached, visit) + max(
            best(now + 1, state) for state in states if not leaves_only or is_whole(state)
        )

    return best(0, frozenset())


def lru_curve(paths: list[Prefix], capacities: range) -> list[int]:
    """Hits of LRU by capacity, from one stack of nodes: the head of a path counts as used last."""
    stack: list[int] = []  # last used first
    hits = [0] * len(capacities)
    for path in paths:
        for depth in (stack.index(node) + 1 for node in path if node in stack):
            for i, capacity in enumerate(capacities):
                hits[i] += depth <= capacity
        stack = [*path, *(node for node in stack if node not in path)]
    return hits


class PlainLRU:
    """A pool of blocks, served the way the engine does: one request at a time, its answer token by token.

    `lifetimes` are the seconds between the storing and the eviction of each block that was evicted.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.stored_at: dict[Prefix, float] = {}  # cached blocks
        self.idle: list[Prefix] = []  # of these, those that nobody uses: the one released longest ago first
        self.num_empty = num_blocks
        self.lifetimes: list[float] = []
        self._num_unknown = 0

    def serve(self, prompt: Prefix, output: Prefix | int, now: float) -> int:
        """Blocks that were hit, -1 for a request that does not fit. Of an unknown answer, the number of its tokens."""
        if isinstance(output, int):
            first = 1_000_000 + self._num_unknown
            self._num_unknown += output
            output = tuple(range(first, first + output))
        size, num_blocks = self.block_size, -(-len(prompt) // self.block_size)
        if num_blocks > self.num_blocks:
            return -1
        prefixes = [prompt[: (i + 1) * size] for i in range(num_blocks - 1)]  # one token is computed in any case
        num_hits = next((i for i, prefix in enumerate(prefixes) if prefix not in self.stored_at), len(prefixes))
        held = prefixes[:num_hits]
        for prefix in held:
            self.idle.remove(prefix)
        for _ in range(num_blocks - num_hits):
            self._take(now)
        for i in range(num_hits, len(prompt) // size):
            self._store(prompt[: (i + 1) * size], held, now)
        has_room = len(prompt) % size > 0  # in the last block
        tokens = prompt
        for token in output[:-1]:  # the last one is never computed
            if not has_room and not self._can_take():
                break
            if not has_room:
                self._take(now)
            tokens = (*tokens, token)
            has_room = len(tokens) % size > 0
            if not has_room:
                self._store(tokens, held, now)
        self.num_empty += has_room
        self.idle += reversed(held)
        return num_hits

    def _can_take(self) -> bool:
        return self.num_empty > 0 or bool(self.idle)

    def _take(self, now: float) -> None:
        if self.num_empty:
            self.num_empty -= 1
        else:
            self.lifetimes.append(now - self.stored_at.pop(self.idle.pop(0)))

    def _store(self, prefix: Prefix, held: list[Prefix], now: float) -> None:
        """Keep what was computed; if it is there already, let go of the copy."""
        held.append(prefix)
        if prefix in self.stored_at:
            self.idle.remove(prefix)
            self.num_empty += 1
        else:
            self.stored_at[prefix] = now
