"""In which order cached idle blocks leave when memory is needed: the seam, and the default."""

from __future__ import annotations

import copy
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from pagetable.memory.hints import NO_HINTS, CacheHints


class EvictionPolicy(Protocol):
    """An order over cached idle blocks, in which a parent never comes before its registered child.

    (A chain without its head can never be hit again.) It is told what requests do, each with `use`, what its own
    `begin` returned for that request. An *access* of a block is that a request hits it or registers it, once. Every
    operation is O(log n) for each block at most, amortised. One made for `num_blocks` blocks knows ids below that.
    """

    def begin(self, hashes: Sequence[bytes], num_tokens: int, hints: CacheHints, tenant: str | None) -> Any:
        """A request is admitted for the first time: the hashes of its full blocks, 16 bytes each, its prompt's tokens.

        Session ids and priorities mean something among requests of one `tenant`.
        """

    def access(self, block_ids: Sequence[int]) -> None:
        """A request hits these blocks, in use by now, at one moment.

        At its admission, perhaps none; or later, some that it computed and that turn out to be there already.
        """

    def register(
        self, use: Any, block_ids: list[int], hashes: Sequence[bytes], parent: int | None, num_repeated: int = 0
    ) -> None:
        """Blocks in use got a content each, one behind the other; the first is behind that of the block `parent`.

        The first `num_repeated` are no accesses: the request had them before, lost them to preemption and computed them
        again.
        """

    def end(self, use: Any, num_blocks: int, num_output_tokens: int) -> None:
        """A request has ended, and `add` comes next. Its first `num_blocks` blocks have a content."""

    def demote(self, block_ids: Sequence[int]) -> None:
        """A session is declared over: these blocks, all idle, were used by nobody else. A child before its parent."""

    def add(self, block_ids: Sequence[int]) -> None:
        """Registered blocks became idle. Of one sequence's blocks the tail is added before the head."""

    def remove(self, block_ids: Sequence[int]) -> None:
        """Idle blocks were hit: they are in use again."""

    def pop(self) -> int:
        """Take out the victim, which loses its content. KeyError when there is none."""

    def clear(self) -> None:
        """No block has a content any more, idle or in use. Forget all of them, and all that ever were."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]:
        """The idle blocks, the next victim first."""

    def __contains__(self, block_id: object) -> bool: ...


class IdleBlocks:
    """What policies have in common that know which blocks are idle, but in which order only by letting them leave."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._forget_idle()

    def _forget_idle(self) -> None:
        self._is_idle = bytearray(self._num_blocks)
        self._num_idle = 0

    def pop(self) -> int:
        """Take out the victim."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self._num_idle

    def __iter__(self) -> Iterator[int]:
        rest = copy.deepcopy(self)  # the order depends on what leaves, so let it leave
        while rest:
            yield rest.pop()

    def __contains__(self, block_id: object) -> bool:
        return isinstance(block_id, int) and 0 <= block_id < self._num_blocks and bool(self._is_idle[block_id])


class LRU:
    """Least recently released first, so a first-in, first-out queue from which hits are taken out; all O(1).

    Why not last in, first out: a block that was just released is the likeliest to be hit again, so it waits longest.
    Why this never takes a parent before its child: whoever uses the child uses the parent too, and gives the child back
    first. So the last release of the child is always earlier than that of the parent.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, clock: Callable[[], float] = time.monotonic) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def begin(
        self, hashes: Sequence[bytes], num_tokens: int, hints: CacheHints = NO_HINTS, tenant: str | None = None
    ) -> None:
        """Only releases count."""

    def access(self, block_ids: Sequence[int]) -> None:
        """Only releases count."""

    def register(
        self, use: None, block_ids: list[int], hashes: Sequence[bytes], parent: int | None, num_repeated: int = 0
    ) -> None:
        """Only releases count."""

    def end(self, use: None, num_blocks: int, num_output_tokens: int) -> None:
        """Only releases count."""

    def demote(self, block_ids: Sequence[int]) -> None:
        """Put them before all others."""
        for block_id in reversed(block_ids):
            self._order.move_to_end(block_id, last=False)

    def add(self, block_ids: Sequence[int]) -> None:
        """Put blocks that were just released at the end."""
        self._order.update(dict.fromkeys(block_ids))

    def remove(self, block_ids: Sequence[int]) -> None:
        """Take blocks that were hit out of the middle."""
        for block_id in block_ids:
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
