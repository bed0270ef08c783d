"""Attention through the page table: the seam that kernels fit behind, and the plain PyTorch back-end.

PagedAttention (Kwon et al. 2023, SOSP, section 4.1): the K and V of a sequence lie in blocks anywhere in the cache, and
its block table says where. Position p is in block `block_table[p // block_size]`, at offset `p % block_size`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from pagetable.engine.step import Step
from pagetable.model.kv_cache import KVCache

_QUERY_TILE = 256  # queries of a chunk attended at once: bounds the mask, and skips keys that no query of a tile sees
_GATHER_TOKENS = 1 << 16  # tokens of K and V that one gather of decodes may copy


class AttentionBackend(Protocol):
    """Stores K and V of a step in the cache and attends over it. One back-end serves one cache.

    `plan(step)` once a step, then `attend` once for each layer, layers in any order. Hazards, for whoever writes one:

    * Unwritten slots hold garbage, NaN included. Nothing past `context_lens[i]` may be read in a way that reaches the
      result; multiplying it by zero does not help, 0 * NaN is NaN.
    * Padding entries of the block table are -1: as an index they would name the last block, silently.
    * Causality goes by position in the sequence. A chunk of prefill may begin anywhere: its first query stands at
      `context_lens[i] - num_scheduled_tokens[i]`, and sees all keys up to itself.
    * A decode may have a context of 1, and a chunk may be a single token. Sequences of one step may share blocks, but
      none reads a block that another writes in the same step; so order between sequences is free.
    * Within a sequence this step's own K and V are part of the context: store before attending, or use `k` and `v`.
    * Step arrays belong to the engine: copy, never write. A plan must not outlive the next `plan`.
    """

    def plan(self, step: Step) -> None:
        """Digest the step's arrays; whatever does not depend on the layer belongs here."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k and v at the step's slots of `layer`, and attend.

        q (T, num_heads, head_dim), k and v (T, num_kv_heads, head_dim), all with position applied, of the cache's type
        and on its device; they may be views. Query head h reads KV head h // (num_heads / num_kv_heads). Scores are
        scaled by head_dim ** -0.5. Returns a contiguous (T, num_heads, head_dim).
        """


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences with one token each, attended in one call, padded to the longest context among them (L)."""

    tokens: Tensor  # (b,) rows of q
    slots: Tensor  # (b * L,) flat
    mask: Tensor  # (b, 1, 1, L) true where there is context


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One sequence with several tokens."""

    begin: int  # rows of q
    end: int
    slots: Tensor  # (context,)


class TorchAttention:
    """The reference: gathers the context of each sequence, then PyTorch's scaled_dot_product_attention.

    Right on any device and in any type. It copies what it reads, three times the memory traffic of a kernel that
    attends in place. Single-token sequences go together in groups of similar length, chunks one by one.
    """

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self._slots = torch.empty(0, dtype=torch.int64)
        self._groups: list[_Group] = []
        self._chunks: list[_Chunk] = []

    def plan(self, step: Step) -> None:
        """See `AttentionBackend.plan`."""
        self._slots = self._to_device(step.slot_mapping)
        single = step.num_scheduled_tokens == 1
        self._groups = [self._plan_group(step, rows) for rows in _by_length(np.flatnonzero(single), step.context_lens)]
        self._chunks = [self._plan_chunk(step, int(row)) for row in np.flatnonzero(~single)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionBackend.attend`."""
        keys, values = self.cache.slots(layer)
        keys.index_copy_(0, self._slots, k)
        values.index_copy_(0, self._slots, v)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in self._groups:
            out[group.tokens] = _attend_group(group, q[group.tokens], keys, values)
        for chunk in self._chunks:
            _attend_chunk(chunk, q, keys, values, out)
        return out

    def _plan_group(self, step: Step, rows: NDArray[np.int64]) -> _Group:
        lengths = step.context_lens[rows]
        position = np.arange(lengths.max())
        mask = position < lengths[:, None]
        # Padding repeats the sequence's own first slot, which is written: masked scores of finite numbers are harmless.
        slots = _slots_of(step.block_tables[rows], np.where(mask, position, 0), self.cache.block_size)
        return _Group(
            tokens=self._to_device(step.query_start[rows].astype(np.int64)),
            slots=self._to_device(slots.ravel()),
            mask=self._to_device(mask[:, None, None, :]),
        )

    def _plan_chunk(self, step: Step, row: int) -> _Chunk:
        position = np.arange(step.context_lens[row])
        slots = _slots_of(step.block_tables[row : row + 1], position[None, :], self.cache.block_size)
        return _Chunk(int(step.query_start[row]), int(step.query_start[row + 1]), self._to_device(slots[0]))

    def _to_device(self, array: NDArray[np.int64] | NDArray[np.bool_]) -> Tensor:
        return torch.tensor(array, device=self.cache.device)  # copies: the step's arrays may be read-only


def _slots_of(tables: NDArray[np.int32], positions: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
    """Slot of each position, (b, L), in the sequence of the same row of `tables`."""
    blocks = np.take_along_axis(tables, positions // block_size, axis=1).astype(np.int64)
    return blocks * block_size + positions % block_size


def _by_length(rows: NDArray[np.int64], lengths: NDArray[np.int32]) -> list[NDArray[np.int64]]:
    """Split `rows` so that in each part padding at most doubles the work and the gather stays bounded."""
    rows = rows[np.argsort(-lengths[rows], kind="stable")]
    parts, begin = [], 0
    while begin < len(rows):
        longest = int(lengths[rows[begin]])
        similar = int(np.count_nonzero(lengths[rows[begin:]] * 2 >= longest))
        end = begin + max(1, min(similar, _GATHER_TOKENS // longest))
        parts.append(rows[begin:end])
        begin = end
    return parts


def _attend_group(group: _Group, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """q (b, H, D) to (b, H, D)."""
    shape = (len(q), -1, *keys.shape[1:])
    k = keys.index_select(0, group.slots).view(shape).transpose(1, 2)  # (b, G, L, D); index_select beats keys[slots]
    v = values.index_select(0, group.slots).view(shape).transpose(1, 2)
    out = F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=group.mask, enable_gqa=True)
    return out[:, :, 0]


def _attend_chunk(chunk: _Chunk, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
    """Fill out[begin:end], a tile of queries at a time; each tile sees the keys up to its last query."""
    k = keys.index_select(0, chunk.slots).transpose(0, 1)[None]  # (1, G, context, D)
    v = values.index_select(0, chunk.slots).transpose(0, 1)[None]
    context = len(chunk.slots)
    first_position = context - (chunk.end - chunk.begin)
    for begin in range(chunk.begin, chunk.end, _QUERY_TILE):
        end = min(begin + _QUERY_TILE, chunk.end)
        last = first_position + end - chunk.begin
        visible = torch.ones(end - begin, last, dtype=torch.bool, device=q.device).tril(last - (end - begin))
        tile = q[begin:end].transpose(0, 1)[None]  # (1, H, tile, D)
        part = F.scaled_dot_product_attention(tile, k[:, :, :last], v[:, :, :last], attn_mask=visible, enable_gqa=True)
        out[begin:end] = part[0].transpose(0, 1)
