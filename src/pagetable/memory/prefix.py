"""Whose prefix is it: the root of a chain by value, and the chain of hashes over the blocks of one sequence."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import xxhash

from pagetable.memory.block import int32_bytes
from pagetable.memory.sessions import SessionKey

HashFunction = Callable[[bytes, bytes], bytes]  # tokens of a block, hash of the block before it


def encode_root(namespace: bytes, block_size: int, **extras: str | bytes | None) -> bytes:
    """What a first block hangs under, as bytes that are equal exactly when every part is equal.

    `namespace` says which numbers the K/V are (model, dtype); `extras` tell requests apart that must not share
    (`salt=`, later `lora=`). Each part is tagged with its name and length, so that the LoRA "X" is not the salt "X" and
    no text can imitate another part. An extra that is None is left out.
    """
    parts: list[tuple[str, bytes]] = [("namespace", namespace), ("block_size", str(block_size).encode())]
    for name, value in sorted(extras.items()):
        if isinstance(value, str):
            parts.append((f"{name}:str", value.encode("utf-8", "surrogatepass")))
        elif value is not None:
            parts.append((f"{name}:bytes", value))
    return b"".join(_length_prefixed(tag.encode()) + _length_prefixed(value) for tag, value in parts)


def _length_prefixed(value: bytes) -> bytes:
    return len(value).to_bytes(8, "little") + value


class PrefixChain:
    """What the manager knows of one sequence: content and chained hash of each full block, and notes of its own.

    It hangs on the sequence, so that a prompt that waits, is preempted and comes back is hashed once.
    """

    __slots__ = (
        "announced",
        "computed_before_preemption",
        "contents",
        "counted",
        "ends_session",
        "generation",
        "has_begun",
        "hashes",
        "matched",
        "matched_at",
        "num_accessed",
        "num_prompt_tokens",
        "owner",
        "root",
        "root_hash",
        "session",
        "use",
    )

    def __init__(self, owner: object, root: bytes) -> None:
        self.owner = owner  # the identity of the manager that made it
        self.root = root  # compared by value
        self.root_hash = xxhash.xxh3_128_digest(root)  # only starts the hash chain, proves nothing
        self.contents: list[bytes] = []  # int32 little-endian bytes of each full block
        self.hashes: list[bytes] = []
        self.matched: list[
            int
        ] = []  # cached blocks that look-ups found, good while the manager's count of removals ...
        self.matched_at = -1  # ... is what it was when they were found
        self.generation = -1  # the reset count when blocks were allocated; an older one registers nothing
        self.announced: bytes | None = None  # hash of the block that this sequence computes next
        self.counted = False  # this request is in the hit statistics
        self.num_accessed = 0  # leading blocks that the eviction policy was told of: each counts once, come what may
        self.computed_before_preemption = 0  # tokens
        self.has_begun = False  # the eviction policy was told of this request, and not yet of its end
        self.use: Any = None  # what it knows this request by
        self.num_prompt_tokens = 0  # at that admission
        self.session: SessionKey | None = None
        self.ends_session = False

    def extend(self, token_ids: Any, num_blocks: int, block_size: int, compute_hash: HashFunction) -> None:
        """Hash the blocks up to `num_blocks` that are not hashed yet. They must be full: later tokens do not count."""
        done = len(self.hashes)
        if done >= num_blocks:
            return
        data = int32_bytes(token_ids[done * block_size : num_blocks * block_size])
        prefix = self.hashes[-1] if done else self.root_hash
        width = 4 * block_size
        contents = [data[start:stop] for start, stop in pairwise(range(0, len(data) + width, width))]
        for content in contents:
            prefix = compute_hash(content, prefix)
            self.hashes.append(prefix)
        self.contents += contents
