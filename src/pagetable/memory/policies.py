"""The eviction policies by name."""

from __future__ import annotations

from collections.abc import Callable

from pagetable.memory.classic_policies import ARC, LFU, LRUK, S3FIFO, TwoQ
from pagetable.memory.eviction import LRU, EvictionPolicy
from pagetable.memory.lhc import LHC

# Each is made for a number of blocks, tokens in a block, and a clock that tells seconds.
EVICTION_POLICIES: dict[str, Callable[[int, int, Callable[[], float]], EvictionPolicy]] = {
    "lru": LRU,
    "lru-k": LRUK,
    "lfu": LFU,
    "2q": TwoQ,
    "arc": ARC,
    "s3-fifo": S3FIFO,
    "lhc": LHC,
}


def make_policy(name: str, num_blocks: int, block_size: int, clock: Callable[[], float]) -> EvictionPolicy:
    """A policy by its name. ValueError for a name that is none."""
    if name not in EVICTION_POLICIES:
        raise ValueError(f"eviction_policy={name!r}: choose one of {', '.join(EVICTION_POLICIES)}")
    return EVICTION_POLICIES[name](num_blocks, block_size, clock)
