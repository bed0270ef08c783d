"""The page table: blocks, reference counts, chained prefix hashes, eviction, events. No model, no torch."""

from pagetable.memory.block import Block
from pagetable.memory.block_manager import BlockManager, OutOfBlocksError, SequenceLike
from pagetable.memory.events import Event, EventSink, MissExplainer, MissReason
from pagetable.memory.free_queue import EVICTION_POLICIES, EvictionPolicy, FreeQueue
from pagetable.memory.invariants import InvariantError
from pagetable.memory.prefix import encode_root
from pagetable.memory.statistics import CacheStats

__all__ = [
    "EVICTION_POLICIES",
    "Block",
    "BlockManager",
    "CacheStats",
    "Event",
    "EventSink",
    "EvictionPolicy",
    "FreeQueue",
    "InvariantError",
    "MissExplainer",
    "MissReason",
    "OutOfBlocksError",
    "SequenceLike",
    "encode_root",
]
