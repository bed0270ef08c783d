"""Blocks that nobody uses, in the order in which they will be taken for new content.

Two kinds wait here. *Empty* blocks can never be hit: they are reused first, the last freed first. *Cached* blocks keep
their content until they are needed: an eviction policy says which of them goes first.
"""

from __future__ import annotations

from collections.abc import Iterator

from pagetable.memory.eviction import EvictionPolicy


class FreeQueue:
    """The free blocks: `len`, `in`, and iteration in order of reuse. Fresh ids come out ascending from 0."""

    __slots__ = ("cached", "empty")

    def __init__(self, num_blocks: int, policy: EvictionPolicy) -> None:
        self.empty = list(range(num_blocks - 1, -1, -1))  # a stack, its top at the end
        self.cached = policy

    def __len__(self) -> int:
        return len(self.empty) + len(self.cached)

    def __iter__(self) -> Iterator[int]:
        yield from reversed(self.empty)
        yield from self.cached

    def __contains__(self, block_id: object) -> bool:
        return block_id in self.cached or block_id in self.empty
