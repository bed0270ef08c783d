"""Blocks that nobody uses, in the order in which they will be taken for new content.

Two kinds wait here. *Empty* blocks can never be hit: they are reused first, the last freed first. *Cached* blocks keep
their content until they are needed: an eviction policy says which of them goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """An order over cached idle blocks, in which a parent never comes before its registered child.

    (A chain without its head can never be hit again.) Every operation is O(log n) at most.
    """

    def add(self, block_id: int) -> None:
        """A registered block became idle. Of one sequence's blocks the tail is added before the head."""

    def remove(self, block_id: int) -> None:
        """An idle block was hit: it is in use again."""

    def pop(self) -> int:
        """Take out the victim. KeyError when there is none."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]:
        """The idle blocks, the next victim first."""

    def __contains__(self, block_id: object) -> bool: ...


class LRU:
    """Least recently released first, so a first-in, first-out queue from which hits are taken out; all O(1).

    Why not last in, first out: a block that was just released is the likeliest to be hit again, so it waits longest.
    Why this never takes a parent before its child: whoever uses the child uses the parent too, and gives the child back
    first. So the last release of the child is always earlier than that of the parent.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def add(self, block_id: int) -> None:
        """Put a block that was just released at the end."""
        self._order[block_id] = None

    def remove(self, block_id: int) -> None:
        """Take a block that was hit out of the middle."""
        del self._order[block_id]

    def pop(self) -> int:
        """Take the block that was released longest ago."""
        return self._order.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._order


EVICTION_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LRU}


class FreeQueue:
    """The free blocks: `len`, `in`, and iteration in order of reuse. Fresh ids come out ascending from 0."""

    __slots__ = ("cached", "empty")

    def __init__(self, num_blocks: int, eviction_policy: str) -> None:
        if eviction_policy not in EVICTION_POLICIES:
            raise ValueError(
                f"eviction_policy={eviction_policy!r}: choose one of {', '.join(sorted(EVICTION_POLICIES))}"
            )
        self.empty = list(range(num_blocks - 1, -1, -1))  # a stack, its top at the end
        self.cached = EVICTION_POLICIES[eviction_policy]()

    def __len__(self) -> int:
        return len(self.empty) + len(self.cached)

    def __iter__(self) -> Iterator[int]:
        yield from reversed(self.empty)
        yield from self.cached

    def __contains__(self, block_id: object) -> bool:
        return block_id in self.cached or block_id in self.empty
