"""The two plain-data records that pass between the scheduler and a runner.

A `Step` says what to compute, a `StepOutput` what came of it. A runner needs nothing else: it never sees a queue, a
request or a page table, only arrays. How a step is put together from sequences is `engine/batch.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pagetable.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How to draw the next token, one row for each sequence whose `needs_logits` is true, in batch order.

    All arrays have shape (rows,) except the banned pairs. A seeded draw may depend on `seeds[row]` and
    `output_index[row]` only, never on the row's place in the batch.
    """

    temperature: NDArray[np.float32]  # 0 is greedy
    top_k: NDArray[np.int32]  # 0 keeps the whole vocabulary
    top_p: NDArray[np.float32]  # 1 keeps the whole vocabulary
    min_p: NDArray[np.float32]  # 0 keeps the whole vocabulary
    seeds: NDArray[np.uint64]
    output_index: NDArray[np.int64]  # index of the token about to be drawn among the sequence's output, from 0
    num_logprobs: NDArray[np.int32]  # alternatives to report; 0 only the drawn token; -1 nothing
    banned_rows: NDArray[np.int32]  # (pairs,) row of each banned pair
    banned_token_ids: NDArray[np.int32]  # (pairs,) token that this row must not draw (end tokens before `min_tokens`)

    def __len__(self) -> int:
        return len(self.temperature)

    @classmethod
    def greedy(cls, rows: int) -> SamplingBatch:
        """`rows` rows that take the likeliest token."""
        integers, none = np.zeros(rows, np.int32), np.zeros(0, np.int32)
        return cls(
            temperature=np.zeros(rows, np.float32),
            top_k=integers,
            top_p=np.ones(rows, np.float32),
            min_p=np.zeros(rows, np.float32),
            seeds=np.zeros(rows, np.uint64),
            output_index=np.zeros(rows, np.int64),
            num_logprobs=np.full(rows, -1, np.int32),
            banned_rows=none,
            banned_token_ids=none,
        )


@dataclass(frozen=True, slots=True)
class PromptLogprobsBatch:
    """Prompt tokens whose log-probability is asked for, in the order of the tokens before them; all arrays (asked,)."""

    rows: NDArray[np.int64]  # token of the step that comes just before it: what follows that one is its distribution
    token_ids: NDArray[np.int32]  # the prompt token itself, which need not be in the step
    num_logprobs: NDArray[np.int32]  # alternatives to report, from 0
    seq_rows: NDArray[np.int64]  # place of its sequence in the batch

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def nothing(cls) -> PromptLogprobsBatch:
        """Nobody asks."""
        wide, narrow = np.zeros(0, np.int64), np.zeros(0, np.int32)
        return cls(rows=wide, token_ids=narrow, num_logprobs=narrow, seq_rows=wide)


@dataclass(frozen=True, slots=True)
class Step:
    """One batch of work: decodes first, then chunks of prefill, flat over tokens.

    B sequences, T tokens in all. Sequence i owns tokens `query_start[i]` to `query_start[i + 1]`. Block tables are
    padded with -1. `slot_mapping[t] = block_id * block_size + offset` is where the K and V of token t are stored.
    """

    seqs: tuple[Sequence, ...]  # B, in batch order; for the scheduler and the reader, a runner does not look inside
    num_scheduled_tokens: NDArray[np.int32]  # (B,)
    needs_logits: NDArray[np.bool_]  # (B,) false for a middle chunk of prefill
    context_lens: NDArray[np.int32]  # (B,) tokens whose K/V exist once this step is done: cached + scheduled
    token_ids: NDArray[np.int32]  # (T,)
    positions: NDArray[np.int32]  # (T,) position of each token within its own sequence, from 0
    slot_mapping: NDArray[np.int64]  # (T,)
    block_tables: NDArray[np.int32]  # (B, longest table)
    query_start: NDArray[np.int32]  # (B + 1,)
    sampling: SamplingBatch
    prompt_logprobs: PromptLogprobsBatch = field(default_factory=PromptLogprobsBatch.nothing)

    @property
    def num_tokens(self) -> int:
        """Tokens this step computes, T."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the raw logits (before temperature and filters).

    The token that stands there, drawn or the prompt's, comes first, then the requested alternatives from the likeliest
    down (it may be among them again). `rank` is its place in the vocabulary by probability, from 1.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a runner returns: one token for each sequence whose `needs_logits` is true, in batch order."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None  # None when nobody asked
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # one for each of `Step.prompt_logprobs`, likewise
