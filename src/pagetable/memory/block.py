"""The block: one page of KV memory, and what identifies the content it holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np


def int32_bytes(token_ids: Any) -> bytes:
    """Token ids (a list, an int32 buffer, anything array-like) as little-endian int32 bytes, 4 a token."""
    return np.asarray(token_ids, dtype="<i4").tobytes()


def check_block_size(block_size: int) -> None:
    """Raise ValueError unless `block_size` is a power of two, from 1 up."""
    if block_size < 1 or block_size & (block_size - 1):
        raise ValueError(f"block_size={block_size}: it must be a power of two, from 1 up")


class Block:
    """One page of KV memory: the bookkeeping of `block_size` slots, not the K and V themselves.

    A block is *in use* while `ref_count > 0`, *registered* while it has a hash, *cached and idle* when it is registered
    and nobody uses it, *empty* when neither.
    """

    __slots__ = ("block_id", "content", "hash", "parent", "ref_count")

    def __init__(
        self,
        block_id: int,
        ref_count: int = 0,
        hash: bytes | None = None,
        token_ids: Iterable[int] = (),
        parent: int | bytes | None = None,
    ) -> None:
        self.block_id = block_id
        self.ref_count = ref_count  # how many entries of live block tables name this block
        self.hash = hash  # only a full, computed block has one
        self.content: bytes | None = int32_bytes(list(token_ids)) or None  # its tokens, to rule out a hash collision
        self.parent = parent  # the block before it, or for a first block the root by value: see prefix.py

    @property
    def token_ids(self) -> list[int]:
        """The tokens whose K/V a registered block holds; empty for any other block."""
        token_ids: list[int] = np.frombuffer(self.content or b"", dtype="<i4").tolist()
        return token_ids

    def register(self, hash: bytes, content: bytes, parent: int | bytes) -> None:
        """Give the block the identity of the content that it now holds."""
        self.hash = hash
        self.content = content
        self.parent = parent

    def unregister(self) -> None:
        """Forget the content: nothing can hit this block any more."""
        self.hash = self.content = self.parent = None

    def __repr__(self) -> str:
        hash = self.hash.hex()[:8] if isinstance(self.hash, bytes) else self.hash
        return f"Block({self.block_id}, ref_count={self.ref_count}, hash={hash})"
