"""A trace through the page table that serves: each request whole, one after the other."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagetable.memory import BlockManager, make_policy
from pagetable.replay.blocks import SENTINEL, TraceSequence, Workload
from pagetable.replay.reuse import Access
from pagetable.replay.trace import TraceRequest


@dataclass(slots=True)
class CacheResult:
    """What one policy with one capacity did with a trace."""

    policy: str
    capacity: int  # blocks
    num_accesses: int = 0
    num_hits: int = 0
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    num_refused: int = 0  # requests that need more blocks than there are
    evictions: int = 0
    seconds: float = 0.0  # of computing
    hits: list[int] = field(default_factory=list)  # by request, blocks
    lifetimes: list[NDArray[np.float64]] = field(default_factory=list)  # of evicted blocks, in seconds of the trace


class CacheReplay:
    """One `BlockManager`, one policy, and how it fares.

    Of `capacity` blocks no more are made than the trace can fill, `most`. `check` verifies the invariants after each
    request, which is slow.
    """

    def __init__(
        self, workload: Workload, policy: str, capacity: int, *, most: int | None = None, check: bool = False
    ) -> None:
        num_blocks = (capacity if most is None else min(capacity, most)) + workload.is_hashed
        self.result = CacheResult(policy, capacity)
        self._workload = workload
        self._check = check
        # Of a trace of hashes, a block of the page table is a block of the trace; one more is for the sentinel.
        self._block_size = 1 if workload.is_hashed else workload.block_size
        self._now = 0.0  # seconds of the trace
        eviction_policy = make_policy(policy, num_blocks, workload.block_size, lambda: self._now)
        self._manager = BlockManager(num_blocks, self._block_size, eviction_policy=eviction_policy)
        self._stored_at = np.full(num_blocks, np.nan)  # seconds of the trace
        self._num_unknown = 0  # output tokens that the trace does not tell

    def serve(self, request: TraceRequest, access: Access) -> int:
        """Admit a request, compute it, free it. Returns how many of its blocks were found."""
        began = time.perf_counter()
        self._now = request.arrival
        hits = self._serve(self._sequence(request, access), request, access)
        result = self.result
        result.num_accesses += access.num_accesses
        result.num_prompt_tokens += request.num_prompt_tokens
        if hits < 0:
            result.num_refused += 1
            hits = 0
        result.num_hits += hits
        result.num_hit_tokens += self._workload.hits_as_tokens(request, hits)
        result.hits.append(hits)
        result.seconds += time.perf_counter() - began
        if self._check:
            self._manager.check()
        return hits

    def finish(self) -> CacheResult:
        """The result, once all requests were served."""
        self.result.evictions = self._manager.stats().evictions
        return self.result

    def _sequence(self, request: TraceRequest, access: Access) -> TraceSequence:
        if request.token_ids is None:
            return TraceSequence(np.append(access.path, np.int32(SENTINEL)), len(access.path) + 1, 1, request)
        tokens = request.token_ids
        output = request.output_token_ids
        if output is None:  # they fill blocks all the same, which nobody can hit
            length = min(request.num_output_tokens, len(self._manager.blocks) * self._block_size)
            first = -1 - self._num_unknown % 2**30
            self._num_unknown += length
            output = np.arange(first, first - length, -1, dtype=np.int32)
        return TraceSequence(np.append(tokens, output), len(tokens), self._block_size, request)

    def _serve(self, seq: TraceSequence, request: TraceRequest, access: Access) -> int:
        manager = self._manager
        hits = manager.can_allocate(seq)
        if hits < 0:
            return -1
        manager.allocate(seq, hits)
        self._note_evicted(seq.block_table[hits:], request.arrival)
        num_computed = len(access.path) if request.token_ids is None else seq.num_tokens
        self._compute(seq, num_computed - seq.num_cached_tokens)
        if request.token_ids is not None:
            self._decode(seq, len(seq.token_ids) - 1, request.arrival)
        self._note_stored(seq.block_table[hits : seq.num_cached_tokens // self._block_size], request.arrival)
        manager.deallocate(seq)
        return hits

    def _compute(self, seq: TraceSequence, num_tokens: int) -> None:
        """What the engine does around a step: schedule, compute, publish, advance."""
        seq.num_scheduled_tokens = num_tokens
        self._manager.hash_blocks(seq)
        seq.num_cached_tokens += num_tokens
        seq.num_scheduled_tokens = 0

    def _decode(self, seq: TraceSequence, num_tokens: int, now: float) -> None:
        """Let the answer grow, a block at a time, to so many tokens in all, or until no block is free."""
        while seq.num_tokens < num_tokens:
            seq.num_tokens += 1
            if not self._manager.can_append(seq):
                return
            num_blocks = len(seq.block_table)
            self._manager.may_append(seq)
            self._note_evicted(seq.block_table[num_blocks:], now)
            seq.num_tokens = min(num_tokens, len(seq.block_table) * self._block_size)
            self._compute(seq, seq.num_tokens - seq.num_cached_tokens)

    def _note_evicted(self, fresh: list[int], now: float) -> None:
        """These blocks were taken: what they held, if anything, has lived until now."""
        if fresh:
            stored = self._stored_at[fresh]
            gone = stored[~np.isnan(stored)]
            if len(gone):
                self.result.lifetimes.append(now - gone)
                self._stored_at[fresh] = np.nan

    def _note_stored(self, blocks: list[int], now: float) -> None:
        """These blocks hold a content, some perhaps since long ago."""
        stored = self._stored_at[blocks]
        self._stored_at[blocks] = np.where(np.isnan(stored), now, stored)
