"""The invariants of the page table, verified from scratch: slow, plain, and independent of how they are maintained."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagetable.memory.block import Block
    from pagetable.memory.block_manager import BlockManager


class InvariantError(AssertionError):
    """The page table contradicts itself: a fault in pagetable, or blocks changed behind its back."""


def check_invariants(manager: BlockManager) -> None:
    """Raise InvariantError, naming the block, unless I1 to I4 and I9 hold. O(blocks + table entries)."""
    _check_counts(manager)
    _check_free_queue(manager)
    _check_registry(manager)


def _fail(invariant: str, message: str) -> None:
    raise InvariantError(f"{invariant}: {message}")


def _check_counts(manager: BlockManager) -> None:
    """I2: `ref_count` of a block is the number of entries in live block tables that name it."""
    named = Counter(block_id for seq in manager.live_sequences() for block_id in seq.block_table)
    for block in manager.blocks:
        entries = named.pop(block.block_id, 0)
        if block.ref_count != entries:
            _fail("I2", f"block {block.block_id} has ref_count {block.ref_count}, {entries} live table entries name it")
    for block_id in named:
        _fail("I2", f"a live table names block {block_id}, which does not exist")


def _check_free_queue(manager: BlockManager) -> None:
    """I1: free + used = all. I3: the free queue is exactly the blocks with ref_count 0, once each."""
    waiting = Counter(manager.free_block_ids)
    for block_id, times in waiting.items():
        if not 0 <= block_id < len(manager.blocks):
            _fail("I3", f"block {block_id}, which does not exist, is in the free queue")
        if times != 1:
            _fail("I3", f"block {block_id} is {times} times in the free queue")
    for block in manager.blocks:
        if (block.ref_count == 0) != (block.block_id in waiting):
            place = "is" if block.block_id in waiting else "is not"
            _fail("I3", f"block {block.block_id} with ref_count {block.ref_count} {place} in the free queue")
    for block_id in manager.free_block_ids.empty:
        if manager.blocks[block_id].hash is not None:
            _fail("I3", f"block {block_id} is registered but waits among the empty blocks")
    for block_id in manager.free_block_ids.cached:
        if manager.blocks[block_id].hash is None:
            _fail("I3", f"block {block_id} is not registered but waits among the cached blocks")
    if len(manager.free_block_ids) + len(manager.used_block_ids) != len(manager.blocks):
        _fail(
            "I1", f"{len(manager.free_block_ids)} free + {len(manager.used_block_ids)} used blocks are not all blocks"
        )


def _check_registry(manager: BlockManager) -> None:
    """I4: `hash_to_block_id[h] == b` iff block b carries h. I9: a registered block's parent is registered."""
    for hash, block_id in manager.hash_to_block_id.items():
        if not 0 <= block_id < len(manager.blocks) or manager.blocks[block_id].hash != hash:
            _fail("I4", f"the registry maps a hash to block {block_id}, which carries another")
    for block in manager.blocks:
        if block.hash is None:
            continue
        if manager.hash_to_block_id.get(block.hash) != block.block_id:
            _fail("I4", f"block {block.block_id} carries a hash that the registry does not map to it")
        if not _is_registered_parent(manager, block):
            _fail("I9", f"block {block.block_id} is registered, its parent {block.parent!r} is not")
    seen: set[int] = set()
    for block_id in manager.free_block_ids.cached:  # in order of eviction
        if manager.blocks[block_id].parent in seen:
            _fail("I9", f"block {block_id} would be evicted after its parent")
        seen.add(block_id)


def _is_registered_parent(manager: BlockManager, block: Block) -> bool:
    """Whether the parent of a registered block is the root or another registered block."""
    if not isinstance(block.parent, int):
        return isinstance(block.parent, bytes)
    return (
        0 <= block.parent < len(manager.blocks)
        and block.parent != block.block_id
        and manager.blocks[block.parent].hash is not None
    )
