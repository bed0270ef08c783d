"""The page table: blocks, reference counts, chained prefix hashes, eviction, events. No model, no torch."""

from pagetable.memory.block import Block, check_block_size
from pagetable.memory.block_manager import BlockManager, OutOfBlocksError
from pagetable.memory.events import (
    Allocated,
    Cleared,
    Event,
    EventSink,
    Freed,
    Hit,
    Miss,
    MissExplainer,
    MissReason,
    Preempted,
    Removed,
    Stored,
)
from pagetable.memory.eviction import EvictionPolicy
from pagetable.memory.eviction_state import load_eviction_state, save_eviction_state
from pagetable.memory.free_queue import FreeQueue
from pagetable.memory.hints import CacheHints
from pagetable.memory.invariants import InvariantError
from pagetable.memory.policies import EVICTION_POLICIES, make_policy
from pagetable.memory.prefix import encode_root
from pagetable.memory.sequence_like import SequenceLike
from pagetable.memory.statistics import CacheStats

__all__ = [
    "EVICTION_POLICIES",
    "Allocated",
    "Block",
    "BlockManager",
    "CacheHints",
    "CacheStats",
    "Cleared",
    "Event",
    "EventSink",
    "EvictionPolicy",
    "FreeQueue",
    "Freed",
    "Hit",
    "InvariantError",
    "Miss",
    "MissExplainer",
    "MissReason",
    "OutOfBlocksError",
    "Preempted",
    "Removed",
    "SequenceLike",
    "Stored",
    "check_block_size",
    "encode_root",
    "load_eviction_state",
    "make_policy",
    "save_eviction_state",
]
