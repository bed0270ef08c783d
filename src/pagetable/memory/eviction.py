"""In which order cached idle blocks leave when memory is needed: the seam, and the default."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """An order over cached idle blocks, in which a parent never comes before its registered child.

    (A chain without its head can never be hit again.) An *access* of a block is that a request hits it or registers
    it, once. Every operation is O(log n) at most, amortised. One made for `num_blocks` blocks knows ids below that.
    """

    def register(self, block_id: int, hash: bytes, parent: int | None, is_access: bool = True) -> None:
        """A block in use got a content, known by its hash, behind that of the block `parent`.

        It is no access when this request had the content before, lost it to preemption and computed it again.
        """

    def access(self, block_ids: Iterable[int]) -> None:
        """A request hits these blocks, in use by now, at one moment.

        At its admission, perhaps none; or later, one that it computed and that turns out to be there already.
        """

    def add(self, block_id: int) -> None:
        """A registered block became idle. Of one sequence's blocks the tail is added before the head."""

    def remove(self, block_id: int) -> None:
        """An idle block was hit: it is in use again."""

    def pop(self) -> int:
        """Take out the victim, which loses its content. KeyError when there is none."""

    def clear(self) -> None:
        """No block has a content any more, idle or in use. Forget all of them, and all that ever were."""

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

    def __init__(self, num_blocks: int) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def register(self, block_id: int, hash: bytes, parent: int | None, is_access: bool = True) -> None:
        """Only releases count."""

    def access(self, block_ids: Iterable[int]) -> None:
        """Only releases count."""

    def add(self, block_id: int) -> None:
        """Put a block that was just released at the end."""
        self._order[block_id] = None

    def remove(self, block_id: int) -> None:
        """Take a block that was hit out of the middle."""
        del self._order[block_id]

    def pop(self) -> int:
        """Take the block that was released longest ago."""
        return self._order.popitem(last=False)[0]

    def clear(self) -> None:
        """Empty the queue."""
        self._order.clear()

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._order
