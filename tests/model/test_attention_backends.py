"""Every attention back-end against the definition, computed one query at a time in float64.

A new back-end joins by a line in BACKENDS.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagetable.model import KVCache, TorchAttention
from pagetable.model.config import ModelConfig
from pagetable.model.kernels.backend import PagedAttention
from tests.model.steps import make_step

BACKENDS = {"torch": TorchAttention, "numba": PagedAttention}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}

HEAD_DIMS, GROUPS, BLOCK_SIZES = (16, 32, 64, 80, 128), (1, 2, 3, 4, 8), (1, 2, 4, 8, 16, 32, 64)


def make_config(kv_heads: int, group: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        num_layers=2,
        hidden_size=64,
        intermediate_size=64,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=8,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        rope_scaling=None,
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        checkpoint_dtype="float32",
    )


def attend_by_definition(q: np.ndarray, keys: np.ndarray, values: np.ndarray, first: int) -> np.ndarray:
    """q (n, H, D) at positions first, first + 1, …; keys and values (context, G, D); all float64."""
    out = np.empty_like(q)
    group = q.shape[1] // keys.shape[1]
    for i in range(len(q)):
        for head in range(q.shape[1]):
            k, v = keys[: first + i + 1, head // group], values[: first + i + 1, head // group]
            scores = k @ q[i, head] / np.sqrt(q.shape[2])
            weights = np.exp(scores - scores.max())
            out[i, head] = weights / weights.sum() @ v
    return out


class Case:
    """A random batch over a cache whose unwritten slots are NaN."""

    def __init__(self, seed: int, dtype: torch.dtype, contexts: list[int], scheduled: list[int]) -> None:
        rng = np.random.default_rng(seed)
        kv_heads, group = int(rng.integers(1, 4)), int(rng.choice(GROUPS))
        head_dim, block_size = int(rng.choice(HEAD_DIMS)), int(rng.choice(BLOCK_SIZES))
        blocks = [-(-context // block_size) for context in contexts]
        config = make_config(kv_heads, group, head_dim)
        self.cache = KVCache(config, sum(blocks) + 3, block_size, dtype=dtype)
        self.cache.data.fill_(torch.nan)
        ids = rng.permutation(self.cache.num_blocks)
        ends = np.cumsum(blocks)
        tables = [ids[end - count : end].tolist() for count, end in zip(blocks, ends, strict=True)]
        computed = [context - count for context, count in zip(contexts, scheduled, strict=True)]
        self.step = make_step(tables, computed, [[0] * count for count in scheduled], block_size)
        self.scheduled, self.computed, self.layer = scheduled, computed, int(rng.integers(2))
        self.q = self._random(rng, (sum(scheduled), kv_heads * group, head_dim), dtype)
        # Keys and values of whole sequences; the last `scheduled` of them come with the step.
        self.keys = [self._random(rng, (context, kv_heads, head_dim), dtype) for context in contexts]
        self.values = [self._random(rng, (context, kv_heads, head_dim), dtype) for context in contexts]
        for table, k, v, done in zip(tables, self.keys, self.values, computed, strict=True):
            for position in range(done):
                slot = table[position // block_size] * block_size + position % block_size
                for stored, new in zip(self.cache.slots(self.layer), (k, v), strict=True):
                    stored[slot] = new[position]

    @staticmethod
    def _random(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape)).to(dtype)

    def new(self, whole: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part[done:] for part, done in zip(whole, self.computed, strict=True)])

    def expected(self) -> np.ndarray:
        parts, begin = [], 0
        for k, v, done, count in zip(self.keys, self.values, self.computed, self.scheduled, strict=True):
            q = self.q[begin : begin + count].double().numpy()
            parts.append(attend_by_definition(q, k.double().numpy(), v.double().numpy(), done))
            begin += count
        return np.concatenate(parts)


def check(case: Case, backend_name: str) -> None:
    before = case.cache.data.clone()
    backend = BACKENDS[backend_name](case.cache)
    backend.plan(case.step)
    k, v = case.new(case.keys), case.new(case.values)
    out = backend.attend(case.layer, case.q, k, v)
    assert out.shape == case.q.shape
    assert out.dtype == case.q.dtype
    assert out.is_contiguous()
    tolerance = TOLERANCE[case.q.dtype]
    np.testing.assert_allclose(out.double().numpy(), case.expected(), rtol=tolerance, atol=tolerance)
    slots = torch.tensor(case.step.slot_mapping)
    for index, new in enumerate((k, v)):
        stored = case.cache.slots(case.layer)[index]
        assert torch.equal(stored[slots], new)
        before[case.layer, index].flatten(0, 1)[slots] = new
    assert torch.equal(case.cache.data.nan_to_num(7.0), before.nan_to_num(7.0)), "a slot outside the step was written"


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mixed_batch_attends_as_defined(backend: str, seed: int) -> None:
    rng = np.random.default_rng(1000 + seed)
    size = int(rng.integers(1, 9))
    contexts = rng.integers(1, 301, size)
    # About half are decodes; chunks may be a whole prompt or its end.
    scheduled = np.where(rng.random(size) < 0.5, 1, rng.integers(1, contexts + 1))
    check(Case(seed, torch.float32, contexts.tolist(), scheduled.tolist()), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("contexts", "scheduled"),
    [
        ([1], [1]),
        ([1, 1, 1], [1, 1, 1]),
        ([300, 1, 2, 64], [1, 1, 1, 1]),
        ([300], [300]),
        ([17, 64, 65], [17, 1, 33]),
        ([520], [515]),  # more queries than a tile of any back-end so far
    ],
)
def test_the_edges_attend_as_defined(
    backend: str, dtype: torch.dtype, contexts: list[int], scheduled: list[int]
) -> None:
    check(Case(5, dtype, contexts, scheduled), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sequences_that_share_blocks_read_the_same_keys(backend: str) -> None:
    config = make_config(2, 2, 16)
    cache = KVCache(config, 6, 4)
    cache.data.fill_(torch.nan)
    generator = torch.Generator().manual_seed(0)
    prefix = torch.randn(2, 8, 2, 16, generator=generator)
    for stored, new in zip(cache.slots(0), prefix, strict=True):
        stored[8:16] = new  # blocks 2 and 3
    step = make_step([[2, 3, 5], [2, 3, 0]], [8, 8], [[0], [0, 0]], 4)
    q, k, v = (torch.randn(3, heads, 16, generator=generator) for heads in (4, 2, 2))
    backend_ = BACKENDS[backend](cache)
    backend_.plan(step)
    out = backend_.attend(0, q, k, v).double().numpy()
    for rows in (slice(0, 1), slice(1, 3)):
        keys, values = (torch.cat((old, new[rows])).double().numpy() for old, new in zip(prefix, (k, v), strict=True))
        np.testing.assert_allclose(
            out[rows], attend_by_definition(q[rows].double().numpy(), keys, values, 8), atol=2e-5
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_plan_replaces_the_first(backend: str) -> None:
    case = Case(3, torch.float32, [40, 9], [1, 9])
    backend_ = BACKENDS[backend](case.cache)
    backend_.plan(make_step([[0]], [0], [[1]], case.cache.block_size))
    backend_.plan(case.step)
    out = backend_.attend(case.layer, case.q, case.new(case.keys), case.new(case.values))
    np.testing.assert_allclose(out.double().numpy(), case.expected(), rtol=2e-5, atol=2e-5)
