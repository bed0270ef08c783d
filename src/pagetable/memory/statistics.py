"""Numbers that are always there: what the page table did, and how full it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Since the manager was made."""

    query_tokens: int = 0  # prompt tokens of admitted sequences, each sequence once
    hit_tokens: int = 0  # of those, found in the cache
    evictions: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0  # computed once, lost by preemption, computed again


@dataclass(slots=True, kw_only=True)
class CacheStats(Counters):
    """A snapshot: the counters, and blocks and slots as of now."""

    num_blocks: int
    block_size: int  # tokens a block
    blocks_in_use: int
    blocks_cached_idle: int  # nobody uses them, but they can be hit
    blocks_empty: int
    wasted_slots: int  # slots of blocks in use that no token fills

    @property
    def hit_rate(self) -> float:
        """Share of the query tokens that were found in the cache, 0 to 1."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0
