"""A trace cut into blocks: what a page table is asked for, and what can be known of it beforehand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import numpy as np

from pagetable.memory import check_block_size
from pagetable.replay.readers import Trace
from pagetable.replay.reuse import Access
from pagetable.replay.trace import IntArray, PrefixTree, SessionFinder, TraceError, TraceRequest

SENTINEL = 2**31 - 1  # a token behind the last block of a prompt, so that this block may be hit


class Workload:
    """The requests of a trace in blocks of `block_size` tokens. Iterating reads the trace anew.

    A trace of hashes has a block size; blocks of twice, three times, ... as many tokens are several of its blocks. A
    trace of tokens can be cut into blocks of any size. `until` ends it after so many seconds, `sample` keeps that share
    of the sessions, chosen by `seed`.
    """

    def __init__(
        self,
        trace: Trace,
        block_size: int | None = None,
        *,
        until: float = math.inf,
        sample: float = 1.0,
        seed: int = 0,
    ) -> None:
        if block_size is not None and block_size < 1:
            raise TraceError(f"block_size={block_size}: it must be 1 or more")
        if not until >= 0 or not 0 < sample <= 1:
            raise TraceError(f"until={until} must be a time from 0 up, sample={sample} a share above 0, up to 1")
        self.trace = trace
        self.is_hashed = trace.block_size is not None
        self.block_size = block_size or trace.block_size or 16  # tokens
        self._merged = 1  # blocks of the trace in one of ours
        if trace.block_size is None:
            check_block_size(self.block_size)
        elif self.block_size % trace.block_size:
            raise TraceError(
                f"block_size={block_size}: this trace knows blocks of {trace.block_size} tokens, "
                "so that only multiples of it are possible"
            )
        else:
            self._merged = self.block_size // trace.block_size
        self.until = until
        self.sample = sample
        self.seed = seed
        self.guesses_sessions = False  # whether the trace does not say which requests belong together

    def __iter__(self) -> Iterator[tuple[TraceRequest, Access]]:
        tree, sessions = PrefixTree(), SessionFinder()
        for request in self.trace:
            if request.arrival > self.until:
                return
            access = self._access(request, tree)
            if request.session is None:
                self.guesses_sessions = True
                request.session = sessions.find(access.path)
            if self.sample >= 1.0 or self._is_kept(request.session):
                yield request, access

    def _access(self, request: TraceRequest, tree: PrefixTree) -> Access:
        if request.hash_ids is not None:
            path = tree.path(request.hash_ids)
            if self._merged > 1:  # a node stands for all before it, so the last of a group stands for the group
                last = path[len(path) - len(path) % self._merged :][-1:]
                path = np.concatenate([path[self._merged - 1 :: self._merged], last])
            return Access(path, len(path), len(path), len(path))
        assert request.token_ids is not None
        size, prompt = self.block_size, request.token_ids
        tokens = prompt if request.output_token_ids is None else np.append(prompt, request.output_token_ids[:-1])
        content = tokens.astype("<i4").tobytes()
        contents = [content[i : i + 4 * size] for i in range(0, len(tokens) // size * 4 * size, 4 * size)]
        reusable = (len(prompt) - 1) // size
        num_tokens = max(len(tokens), len(prompt) + request.num_output_tokens - 1)  # whose K/V is computed
        return Access(
            tree.path(contents),
            num_accesses=len(prompt) // size,
            num_reusable=reusable,
            num_needed=reusable + 1,
            num_unknown=num_tokens // size - len(contents),
            is_partial=num_tokens % size > 0,
        )

    def _is_kept(self, session: Any) -> bool:
        digest = blake2b(f"{self.seed}/{session}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.sample * 2**64

    def hits_as_tokens(self, request: TraceRequest, num_hits: int) -> int:
        """Tokens in so many blocks of a prompt."""
        return min(num_hits * self.block_size, request.num_prompt_tokens)


class TraceSequence:
    """A request as the page table wants it: `SequenceLike`.

    Of a trace of hashes, each block is one block of one token, the number of its node. The page table never looks up
    the last block of a prompt, since one token must be computed; a sentinel behind it makes the last block one that may
    be hit, as traces of hashes count it.
    """

    __slots__ = (
        "block_size",
        "block_table",
        "cache_hints",
        "cache_salt",
        "num_cached_tokens",
        "num_output_tokens",
        "num_prompt_tokens",
        "num_scheduled_tokens",
        "num_tokens",
        "prefix_chain",
        "token_ids",
    )

    def __init__(self, token_ids: IntArray, num_tokens: int, block_size: int, request: TraceRequest) -> None:
        self.token_ids = token_ids  # perhaps with room for those to come
        self.num_tokens = num_tokens
        self.block_size = block_size
        self.num_prompt_tokens = request.num_prompt_tokens  # what the eviction policy is told
        self.num_output_tokens = request.num_output_tokens
        self.cache_hints = request.hints
        self.block_table: list[int] = []
        self.num_cached_tokens = self.num_scheduled_tokens = 0
        self.cache_salt: str | None = None
        self.prefix_chain: Any = None

    @property
    def num_blocks(self) -> int:
        """Blocks that the tokens fill or begin."""
        return -(-self.num_tokens // self.block_size)
