"""Builds `Step`s by hand, so that model/ is tested without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pagetable.engine.step import PromptLogprobsBatch, SamplingBatch, Step

_DEFAULTS = {
    "temperature": (np.float32, 0.0),
    "top_k": (np.int32, 0),
    "top_p": (np.float32, 1.0),
    "min_p": (np.float32, 0.0),
    "seeds": (np.uint64, 0),
    "output_index": (np.int64, 0),
    "num_logprobs": (np.int32, -1),
}


def make_sampling(rows: int, banned: Sequence[tuple[int, int]] = (), **columns: Any) -> SamplingBatch:
    """Greedy rows unless a column says otherwise; a column is one value for all rows or one for each."""
    arrays = {
        name: np.ascontiguousarray(np.broadcast_to(np.asarray(columns.get(name, default), dtype), (rows,)))
        for name, (dtype, default) in _DEFAULTS.items()
    }
    pairs = np.array(banned, np.int32).reshape(-1, 2)
    return SamplingBatch(**arrays, banned_rows=pairs[:, 0].copy(), banned_token_ids=pairs[:, 1].copy())


def make_step(
    tables: Sequence[Sequence[int]],
    computed: Sequence[int],
    chunks: Sequence[Sequence[int]],
    block_size: int,
    needs_logits: Sequence[bool] | None = None,
    sampling: SamplingBatch | None = None,
    prompt_logprobs: PromptLogprobsBatch | None = None,
) -> Step:
    """A step in which sequence i, with `computed[i]` tokens in the cache, computes `chunks[i]`; all read-only."""
    counts = np.array([len(chunk) for chunk in chunks], np.int32)
    needs = np.array([True] * len(chunks) if needs_logits is None else needs_logits, np.bool_)
    positions = np.concatenate([np.arange(c, c + n) for c, n in zip(computed, counts, strict=True)]).astype(np.int32)
    padded = np.full((len(tables), max(map(len, tables))), -1, np.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    owner = np.repeat(np.arange(len(chunks)), counts)
    slots = padded[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size
    arrays = {
        "num_scheduled_tokens": counts,
        "needs_logits": needs,
        "context_lens": np.array(computed, np.int32) + counts,
        "token_ids": np.concatenate([np.asarray(chunk, np.int32) for chunk in chunks]),
        "positions": positions,
        "slot_mapping": slots,
        "block_tables": padded,
        "query_start": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
    }
    for array in arrays.values():
        array.flags.writeable = False  # a runner must not need to write them
    return Step(
        seqs=(),
        **arrays,
        sampling=sampling or make_sampling(int(needs.sum())),
        prompt_logprobs=prompt_logprobs or PromptLogprobsBatch.nothing(),
    )


def ask(rows: Sequence[int], token_ids: Sequence[int], counts: Sequence[int], seq_rows: Sequence[int]) -> Any:
    """The part of a step that asks for prompt log-probabilities."""
    return PromptLogprobsBatch(
        rows=np.array(rows, np.int64),
        token_ids=np.array(token_ids, np.int32),
        num_logprobs=np.array(counts, np.int32),
        seq_rows=np.array(seq_rows, np.int64),
    )
