"""The compiled attention as an `AttentionBackend`, and one layer of it by itself."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagetable.engine.step import Step
from pagetable.model.kernels.attention import attend_units, join_partials, partial_size, scratch_size, store_rows
from pagetable.model.kernels.compile import compiled
from pagetable.model.kernels.linear import as_numpy, empty
from pagetable.model.kernels.plan import UNIT_ROWS, AttentionPlan, plan_attention
from pagetable.model.kernels.team import Team, barrier
from pagetable.model.kv_cache import KVCache


@compiled
def attend_layer(
    thread, threads, sync, counters, q, k, v, keys, values, out, group, kv_heads, head_dim, block_size,
    positions, slots, tables, members, units, partials, split_tokens, partial_results, scratch,
):  # fmt: skip
    """One layer's attention by itself: store K and V, attend, join."""
    size, row = kv_heads * head_dim, group * kv_heads * head_dim
    store_rows(counters, 0, k, keys, slots, size)
    store_rows(counters, 1, v, values, slots, size)
    barrier(sync, threads)
    attend_units(
        counters, 2, threads, q, row, keys, values, out, row, group, kv_heads, head_dim, block_size,
        positions, tables, members, units, partials, partial_results, scratch[thread],
    )  # fmt: skip
    barrier(sync, threads)
    join_partials(
        counters, 3, out, row, group * kv_heads, head_dim, positions, split_tokens, partials, partial_results,
        scratch[thread],
    )  # fmt: skip


class PagedAttention:
    """The CPU back-end of the `AttentionBackend` protocol, for a model whose other parts are PyTorch's.

    `CompiledLlama` uses the same kernels, and the plan, within one compiled function for the whole step.
    """

    def __init__(self, cache: KVCache, team: Team | None = None) -> None:
        self.cache = cache
        self.team = team or Team(1)
        self.layers = as_numpy(cache.data).reshape(cache.data.shape[0], 2, -1)
        self.kv_heads, self.head_dim = cache.data.shape[4:]
        self.scratch = empty((self.team.threads, scratch_size(self.head_dim)))
        self.partial_results = np.empty(0, np.float32)
        self.plan_: AttentionPlan | None = None
        self._step: Step | None = None

    def plan(self, step: Step) -> None:
        """See `AttentionBackend.plan`."""
        self._step, self.plan_ = step, None  # how many heads share a key is known when the queries come

    def prepare(self, heads: int) -> AttentionPlan:
        """The plan of this step for a model with `heads` query heads."""
        assert self._step is not None, "plan(step) comes first"
        if self.plan_ is None:
            group = heads // self.kv_heads
            if group > UNIT_ROWS:
                raise ValueError(f"{group} query heads share a KV head, these kernels take at most {UNIT_ROWS}")
            self.plan_ = plan_attention(self._step, group, self.kv_heads, self.cache.block_size, self.team.threads)
            size = partial_size(self.plan_.num_partials, heads, self.head_dim)
            if len(self.partial_results) < size:
                self.partial_results = empty((size,))
        return self.plan_

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionBackend.attend`."""
        plan = self.prepare(q.shape[1])
        out = torch.empty(q.shape, dtype=torch.float32)
        flat = [x.float().contiguous().numpy().reshape(-1) for x in (q, k, v)]
        keys, values = self.layers[layer]
        self.team.run(
            attend_layer, np.zeros(4, np.int64), *flat, keys, values, out.numpy().reshape(-1),
            q.shape[1] // self.kv_heads, self.kv_heads, self.head_dim, self.cache.block_size,
            plan.positions, plan.slots, plan.tables, plan.members, plan.units, plan.partials, plan.split_tokens,
            self.partial_results, self.scratch,
        )  # fmt: skip
        return out.to(q.dtype)
