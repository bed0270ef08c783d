"""From scheduled sequences to the arrays of a `Step`: the one place where a batch is put together.

Loops run over sequences, never over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC

import numpy as np
from numpy.typing import NDArray

from pagetable.engine.sequence import Sequence
from pagetable.engine.step import PromptLogprobsBatch, SamplingBatch, Step


def build_step(seqs: SequenceABC[Sequence], block_size: int, eos_token_ids: frozenset[int]) -> Step:
    """The step that computes `num_scheduled_tokens`, at least 1, of each sequence, in the given order.

    Every sequence must have the blocks for its context; shapes are those of `Step`.
    """
    num_scheduled = np.array([seq.num_scheduled_tokens for seq in seqs], np.int32)
    num_cached = np.array([seq.num_cached_tokens for seq in seqs], np.int32)
    context_lens = num_cached + num_scheduled
    # A sequence draws a token when the last of its tokens is computed; a middle chunk of prefill does not reach it.
    needs_logits = context_lens == np.array([seq.num_tokens for seq in seqs], np.int32)
    query_start = np.concatenate(([0], np.cumsum(num_scheduled))).astype(np.int32)
    block_tables = _padded([seq.block_table for seq in seqs])

    # rows[t] is the sequence of token t; the rest is arithmetic over all tokens at once.
    rows = np.repeat(np.arange(len(seqs)), num_scheduled)
    positions = np.arange(query_start[-1], dtype=np.int32) + (num_cached - query_start[:-1])[rows]
    slot_mapping = block_tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    spans = zip(seqs, num_cached.tolist(), context_lens.tolist(), strict=True)
    return Step(
        seqs=tuple(seqs),
        num_scheduled_tokens=num_scheduled,
        needs_logits=needs_logits,
        context_lens=context_lens,
        token_ids=np.concatenate([seq.token_ids.view(start, stop) for seq, start, stop in spans]),
        positions=positions,
        slot_mapping=slot_mapping,
        block_tables=block_tables,
        query_start=query_start,
        sampling=_sampling([seq for seq, needs in zip(seqs, needs_logits, strict=True) if needs], eos_token_ids),
        # A decode tells nothing of its prompt, and neither does the last of a prompt's tokens by itself.
        prompt_logprobs=_prompt_logprobs(seqs, np.flatnonzero((num_scheduled > 1) | ~needs_logits), query_start),
    )


def _padded(block_tables: list[list[int]]) -> NDArray[np.int32]:
    """(B, longest), padded with -1."""
    padded = np.full((len(block_tables), max(map(len, block_tables))), -1, np.int32)
    for row, table in zip(padded, block_tables, strict=True):
        row[: len(table)] = table
    return padded


def _sampling(seqs: list[Sequence], eos_token_ids: frozenset[int]) -> SamplingBatch:
    params = [seq.sampling_params for seq in seqs]
    banned = [
        (row, token_id)
        for row, seq in enumerate(seqs)
        if seq.num_output_tokens < seq.sampling_params.min_tokens
        for token_id in _end_token_ids(seq, eos_token_ids)
    ]
    pairs = np.array(banned, np.int32).reshape(-1, 2)
    return SamplingBatch(
        temperature=np.array([p.temperature for p in params], np.float32),
        top_k=np.array([max(0, p.top_k) for p in params], np.int32),
        top_p=np.array([p.top_p for p in params], np.float32),
        min_p=np.array([p.min_p for p in params], np.float32),
        seeds=np.array([seq.seed for seq in seqs], np.uint64),
        output_index=np.array([seq.num_output_tokens for seq in seqs], np.int64),
        num_logprobs=np.array([-1 if p.logprobs is None else p.logprobs for p in params], np.int32),
        banned_rows=pairs[:, 0],
        banned_token_ids=pairs[:, 1],
    )


def _prompt_logprobs(
    seqs: SequenceABC[Sequence], in_prefill: NDArray[np.int64], query_start: NDArray[np.int32]
) -> PromptLogprobsBatch:
    asking = [row for row in in_prefill.tolist() if seqs[row].lacks_prompt_logprobs]
    if not asking:
        return PromptLogprobsBatch.nothing()
    rows, token_ids = [], []
    for row in asking:
        seq, cached = seqs[row], seqs[row].num_cached_tokens
        # Position p tells of token p + 1. What was recorded before a preemption is not asked for again.
        first = max(cached, len(seq.prompt_logprobs))
        stop = max(first, min(cached + seq.num_scheduled_tokens, seq.num_prompt_tokens - 1))
        start = int(query_start[row]) - cached  # where position 0 would stand
        rows.append(np.arange(start + first, start + stop, dtype=np.int64))
        token_ids.append(seq.token_ids.view(first + 1, stop + 1))
    lengths = [len(part) for part in rows]
    alternatives = [seqs[row].sampling_params.prompt_logprobs or 0 for row in asking]
    return PromptLogprobsBatch(
        rows=np.concatenate(rows),
        token_ids=np.concatenate(token_ids),
        num_logprobs=np.repeat(np.array(alternatives, np.int32), lengths),
        seq_rows=np.repeat(np.array(asking, np.int64), lengths),
    )


def _end_token_ids(seq: Sequence, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end this sequence: the model's, unless it ignores them, and its own stop tokens."""
    own = seq.sampling_params.stop_token_ids or ()
    return frozenset(own) if seq.sampling_params.ignore_eos else eos_token_ids.union(own)
