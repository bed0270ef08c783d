"""The Llama decoder of `model/llama.py` as one compiled function a step: the same mathematics, the CPU's way.

All threads of a team walk through the layers together; within a phase they share the work, between phases they meet at
a barrier. Nothing is allocated, no Python runs, and every number depends on its own sequence only, so an answer is the
same to the bit whatever was cached and whoever else is in the batch.

    phase of a layer        what                                        unit of work
    norm                    normed = rms_norm(x)                        a token
    qkv                     qkv = normed @ Wqkv                         a panel of the weights (linear.py)
    place                   turn q and k by position, K and V to slots  a token
    attend, join            out = attention                             a unit (plan.py) x KV head; a token x head
    o                       x += out @ Wo                               a panel
    norm                    normed = rms_norm(x)                        a token
    gate_up                 hidden = silu(gate) * up                    a panel of each
    down                    x += hidden @ Wdown                         a panel

Weights may be bfloat16: they are widened on the way into a register, and all arithmetic is float32. That halves the
memory read and asks nothing of the processor.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagetable.checkpoint import ModelError
from pagetable.engine.step import SamplingBatch, Step
from pagetable.model.config import ModelConfig
from pagetable.model.kernels.attention import attend_units, join_partials
from pagetable.model.kernels.backend import PagedAttention
from pagetable.model.kernels.compile import announce, compiled
from pagetable.model.kernels.linear import PackedRows, copy, embed, empty, multiply, multiply_gated, padded, row_size
from pagetable.model.kernels.plan import UNIT_ROWS
from pagetable.model.kernels.sampling import draw
from pagetable.model.kernels.team import Team, barrier, claim, default_threads, share
from pagetable.model.kernels.tiles import ADD, STORE
from pagetable.model.kernels.vectors import LANES, TILE_COLUMNS, first_lanes, fma, load, splat, store, sum_of
from pagetable.model.kv_cache import KVCache
from pagetable.model.rope import rope_table
from pagetable.model.sampler import draw_rows
from pagetable.model.weights import Place, TensorPlace

logger = logging.getLogger(__name__)

_HOT = 1e3  # a temperature at which weights are so alike that float32 cannot rank them
_ZERO, _ONE = np.float32(0), np.float32(1)


class Weights(NamedTuple):
    """All layers' weights; matrices packed into panels (layers, panels, inputs, TILE_COLUMNS), biases maybe empty."""

    embed: Any  # (panels, E, TILE_COLUMNS)
    head: Any  # the same array when tied
    norms: Any  # (layers, 2, E)
    final_norm: Any  # (E,)
    qkv: Any
    qkv_bias: Any  # (layers, outputs)
    o: Any
    o_bias: Any
    gate_up: Any  # panels of gate and up take turns
    gate_up_bias: Any
    down: Any
    down_bias: Any


class Sizes(NamedTuple):
    """The model's numbers that kernels need."""

    layers: int
    hidden: int
    inner: int
    group: int
    kv_heads: int
    head_dim: int
    block_size: int
    eps: float


class Batch(NamedTuple):
    """One step, as arrays, and the room in which it is computed: flat, one row a token.

    Rows of x, normed, qkv, hidden and logits are padded to whole panels, those of out are not.
    """

    token_ids: Any
    wanted: Any  # tokens whose logits are asked for
    positions: Any
    slots: Any
    tables: Any
    members: Any
    units: Any
    partials: Any
    split_tokens: Any
    partial_results: Any
    x: Any  # flat, each row padded
    normed: Any
    qkv: Any
    out: Any
    hidden: Any
    logits: Any


# Phases of a layer, and before and after the layers: each has a counter of claimed work.
_NORM, _QKV, _PLACE, _ATTEND, _JOIN, _O, _NORM_2, _GATE_UP, _DOWN, _PHASES = range(10)
_EMBED, _HEAD, _OUTSIDE = range(3)


@compiled
def run_step(thread, threads, sync, counters, batch, weights, sizes, cache, cos, sin, scratch):
    """All of a step: embed, layers, and the logits that are wanted. `cache` is (layers, 2, numbers)."""
    tokens = batch.token_ids.size
    wide = row_size(sizes.hidden)
    heads = sizes.group * sizes.kv_heads
    qkv_row, out_row = row_size((heads + 2 * sizes.kv_heads) * sizes.head_dim), heads * sizes.head_dim
    inner_row = row_size(sizes.inner)
    outside = sizes.layers * _PHASES
    mine = scratch[thread]
    embed(counters, outside + _EMBED, threads, weights.embed, batch.token_ids, batch.x, wide)
    barrier(sync, threads)
    for layer in range(sizes.layers):
        phase = layer * _PHASES
        keys, values = cache[layer, 0], cache[layer, 1]
        norm, norm_2 = weights.norms[layer, 0], weights.norms[layer, 1]
        norm_rows(counters, phase + _NORM, threads, tokens, batch.x, wide, norm, sizes.eps, batch.normed)
        barrier(sync, threads)
        multiply(
            counters, phase + _QKV, threads, tokens, batch.normed, wide, weights.qkv[layer], weights.qkv_bias[layer],
            batch.qkv, qkv_row, STORE,
        )  # fmt: skip
        barrier(sync, threads)
        place_rows(
            counters, phase + _PLACE, threads, batch.qkv, qkv_row, heads, sizes.kv_heads, sizes.head_dim,
            batch.positions, cos, sin, batch.slots, keys, values,
        )  # fmt: skip
        barrier(sync, threads)
        attend_units(
            counters, phase + _ATTEND, threads, batch.qkv, qkv_row, keys, values, batch.out, out_row, sizes.group,
            sizes.kv_heads, sizes.head_dim, sizes.block_size, batch.positions, batch.tables, batch.members,
            batch.units, batch.partials, batch.partial_results, mine,
        )  # fmt: skip
        barrier(sync, threads)
        if batch.split_tokens.size:
            join_partials(
                counters, phase + _JOIN, batch.out, out_row, heads, sizes.head_dim, batch.positions,
                batch.split_tokens, batch.partials, batch.partial_results, mine,
            )  # fmt: skip
            barrier(sync, threads)
        multiply(
            counters, phase + _O, threads, tokens, batch.out, out_row, weights.o[layer], weights.o_bias[layer],
            batch.x, wide, ADD,
        )  # fmt: skip
        barrier(sync, threads)
        norm_rows(counters, phase + _NORM_2, threads, tokens, batch.x, wide, norm_2, sizes.eps, batch.normed)
        barrier(sync, threads)
        multiply_gated(
            counters, phase + _GATE_UP, threads, tokens, batch.normed, wide, weights.gate_up[layer],
            weights.gate_up_bias[layer], batch.hidden, inner_row, mine,
        )  # fmt: skip
        barrier(sync, threads)
        multiply(
            counters, phase + _DOWN, threads, tokens, batch.hidden, inner_row, weights.down[layer],
            weights.down_bias[layer], batch.x, wide, ADD,
        )  # fmt: skip
        barrier(sync, threads)
    if not batch.wanted.size:
        return
    if thread == 0:  # few rows: sharing them out would cost more
        for row in range(batch.wanted.size):
            norm_row(batch.x, batch.wanted[row] * wide, weights.final_norm, sizes.eps, batch.normed, row * wide)
    barrier(sync, threads)
    multiply(
        counters, outside + _HEAD, threads, batch.wanted.size, batch.normed, wide, weights.head,
        weights.qkv_bias[0][:0], batch.logits, weights.head.shape[0] * TILE_COLUMNS, STORE,
    )  # fmt: skip
    barrier(sync, threads)


@compiled
def norm_rows(counters, phase, threads, rows, x, x_row, weight, eps, normed):
    """normed = x / rms(x) * weight (see `RMSNorm`)."""
    run = share(rows, threads)
    while True:
        first = claim(counters, phase, run)
        if first >= rows:
            break
        for row in range(first, min(first + run, rows)):
            norm_row(x, row * x_row, weight, eps, normed, row * x_row)


@compiled
def norm_row(x, at, weight, eps, normed, place):
    """One row of `norm_rows`."""
    squares = splat(_ZERO)
    for i in range(0, weight.size, LANES):
        value = first_lanes(weight.size - i, load(x, at + i), splat(_ZERO))
        squares = fma(value, value, squares)
    scale = np.float32(_ONE / np.sqrt(sum_of(squares) / np.float32(weight.size) + np.float32(eps)))
    i = 0
    while i + LANES <= weight.size:
        store(normed, place + i, load(x, at + i) * splat(scale) * load(weight, i))
        i += LANES
    while i < weight.size:
        normed[place + i] = x[at + i] * scale * weight[i]
        i += 1


@compiled
def place_rows(
    counters, phase, threads, qkv, qkv_row, heads, kv_heads, head_dim, positions, cos, sin, slots, keys, values
):
    """Turn q and k of each token by its position, and store k and v in the token's slot."""
    size = kv_heads * head_dim
    run = share(slots.size, threads)
    while True:
        first = claim(counters, phase, run)
        if first >= slots.size:
            break
        for t in range(first, min(first + run, slots.size)):
            at, k = t * qkv_row, t * qkv_row + heads * head_dim
            for head in range(heads + kv_heads):
                rotate(qkv, at + head * head_dim, head_dim // 2, cos, sin, positions[t])
            copy(qkv, k, keys, slots[t] * size, size)
            copy(qkv, k + size, values, slots[t] * size, size)


@compiled
def rotate(x, at, half, cos, sin, position):
    """One head of `rope.rotate`: number i is paired with number i + half."""
    angle = position * half
    i = 0
    while i + LANES <= half:
        c, s = load(cos, angle + i), load(sin, angle + i)
        first, second = load(x, at + i), load(x, at + half + i)
        store(x, at + i, first * c - second * s)
        store(x, at + half + i, second * c + first * s)
        i += LANES
    while i < half:
        first_, second_ = x[at + i], x[at + half + i]
        x[at + i] = first_ * cos[angle + i] - second_ * sin[angle + i]
        x[at + half + i] = second_ * cos[angle + i] + first_ * sin[angle + i]
        i += 1


class CompiledLlama:
    """A Llama on the CPU. Its weights hold no memory before `allocate`, no values before they are loaded."""

    batch_invariant = True

    def __init__(self, config: ModelConfig, dtype: torch.dtype, threads: int | None = None) -> None:
        group = config.num_heads // config.num_kv_heads
        if group > UNIT_ROWS:
            raise ModelError(
                f"{group} query heads share a KV head, the compiled decoder takes at most {UNIT_ROWS}: "
                "use kernels='torch'"
            )
        self.config, self.dtype = config, dtype
        self.device = torch.device("cpu")
        cores = default_threads()
        if threads is not None and threads > cores:
            logger.warning("threads=%d, but this process may use %d cores: fewer would be faster", threads, cores)
        self.team = Team(cores if threads is None else threads)
        self.cos, self.sin = np.empty(0, np.float32), np.empty(0, np.float32)  # flat
        self.weights: Weights | None = None
        self._counters = np.zeros(config.num_layers * _PHASES + _OUTSIDE, np.int64)
        self._room: dict[str, np.ndarray] = {}
        self._computed: tuple[Batch, Sizes, PagedAttention] | None = None  # the last step

    def attention(self, cache: KVCache) -> PagedAttention:
        """The back-end that this model attends with."""
        announce(str(self.dtype).removeprefix("torch."))
        return PagedAttention(cache, self.team)

    def reserve_positions(self, length: int) -> None:
        """Prepare the rotary table for positions below `length`."""
        if 2 * len(self.cos) < length * self.config.head_dim:
            self.cos, self.sin = (table.numpy().reshape(-1) for table in rope_table(self.config, length, self.device))

    def allocate(self, device: torch.device) -> None:
        """Take memory for the weights."""
        c = self.config
        qkv = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        vocabulary, inner = padded(c.vocab_size), padded(c.intermediate_size)

        def matrix(outputs: int, inputs: int) -> np.ndarray:
            return empty((c.num_layers, padded(outputs) // TILE_COLUMNS, inputs, TILE_COLUMNS), self.dtype)

        def biases(outputs: int, wanted: bool) -> np.ndarray:
            return np.zeros((c.num_layers, padded(outputs) if wanted else 0), np.float32)

        words = empty((vocabulary // TILE_COLUMNS, c.hidden_size, TILE_COLUMNS), self.dtype)
        self.weights = Weights(
            embed=words,
            head=words if c.tie_word_embeddings else empty(words.shape, self.dtype),
            norms=np.empty((c.num_layers, 2, c.hidden_size), np.float32),
            final_norm=np.empty(c.hidden_size, np.float32),
            qkv=matrix(qkv, c.hidden_size),
            qkv_bias=biases(qkv, c.attention_bias),
            o=matrix(c.hidden_size, c.num_heads * c.head_dim),
            o_bias=biases(c.hidden_size, c.attention_bias),
            gate_up=matrix(2 * inner, c.hidden_size),
            gate_up_bias=biases(2 * inner, c.mlp_bias),
            down=matrix(c.hidden_size, c.intermediate_size),
            down_bias=biases(c.hidden_size, c.mlp_bias),
        )
        for panels in (self.weights.qkv, self.weights.o, self.weights.gate_up, self.weights.down):
            panels[:, -2:] = 0  # columns past the last output are computed, too, and must be numbers
        self.weights.embed[-1] = self.weights.head[-1] = 0

    @torch.inference_mode()
    def compute(self, step: Step, attention: PagedAttention, wanted: np.ndarray) -> Tensor:
        """See `Decoder.compute`. The result is overwritten by the next call."""
        assert self.weights is not None
        c = self.config
        attention.plan(step)
        plan = attention.prepare(c.num_heads)
        tokens, heads = len(step.token_ids), c.num_heads
        batch = Batch(
            np.array(step.token_ids), np.array(wanted, np.int64), plan.positions, plan.slots, plan.tables,
            plan.members, plan.units, plan.partials, plan.split_tokens, attention.partial_results,
            self._array("x", tokens * padded(c.hidden_size)),
            self._array("normed", tokens * padded(c.hidden_size)),
            self._array("qkv", tokens * padded((heads + 2 * c.num_kv_heads) * c.head_dim)),
            self._array("out", tokens * heads * c.head_dim),
            self._array("hidden", tokens * padded(c.intermediate_size)),
            self._logits_room(len(wanted)),
        )  # fmt: skip
        sizes = Sizes(
            c.num_layers, c.hidden_size, c.intermediate_size, heads // c.num_kv_heads, c.num_kv_heads, c.head_dim,
            attention.cache.block_size, c.rms_norm_eps,
        )  # fmt: skip
        self._computed = batch, sizes, attention
        return self._run(batch, sizes, attention)

    @torch.inference_mode()
    def more_logits(self, wanted: np.ndarray) -> Tensor:
        """See `Decoder.more_logits`. The result is overwritten by the next call, and overwrites what `compute` gave."""
        assert self._computed is not None, "compute comes first"
        batch, sizes, attention = self._computed
        # A step of no tokens through no layers is the head alone, on what the last step left in x. So there is nothing
        # else to compile.
        head = batch._replace(
            token_ids=batch.token_ids[:0], wanted=np.array(wanted, np.int64), logits=self._logits_room(len(wanted))
        )
        return self._run(head, sizes._replace(layers=0), attention)

    def _run(self, batch: Batch, sizes: Sizes, attention: PagedAttention) -> Tensor:
        self.team.run(
            run_step, self._counters, batch, self.weights, sizes, attention.layers, self.cos, self.sin,
            attention.scratch,
        )  # fmt: skip
        count, row = len(batch.wanted), padded(self.config.vocab_size)
        return torch.from_numpy(batch.logits[: count * row].reshape(count, row)[:, : self.config.vocab_size])

    def _logits_room(self, rows: int) -> np.ndarray:
        return self._array("logits", rows * padded(self.config.vocab_size))

    def draw(self, logits: Tensor, largest: Tensor, batch: SamplingBatch, rows: np.ndarray) -> Tensor:
        """See `Decoder.draw`."""
        if (batch.temperature[rows] > _HOT).any():
            return draw_rows(logits, largest, batch, rows)
        return draw(self.team, logits, largest, batch, rows)

    def _array(self, name: str, size: int) -> np.ndarray:
        """Room for intermediate results, kept from step to step, and larger when a step needs more."""
        if name not in self._room or len(self._room[name]) < size:
            self._room[name] = empty((size,))
        return self._room[name]

    def placements(self) -> Iterator[tuple[str, Place]]:
        """Canonical tensor names and where each goes, for `load_weights`. Before `allocate`, shapes only."""
        c, w = self.config, self.weights
        words = (c.vocab_size, c.hidden_size)
        yield "model.embed_tokens.weight", PackedRows(w and w.embed, 0, words)
        yield "model.norm.weight", _vector(w and w.final_norm, c.hidden_size)
        if not c.tie_word_embeddings:
            yield "lm_head.weight", PackedRows(w and w.head, 0, words)
        for layer in range(c.num_layers):
            name = f"model.layers.{layer}."
            norms = (None, None) if w is None else w.norms[layer]
            yield name + "input_layernorm.weight", _vector(norms[0], c.hidden_size)
            yield name + "post_attention_layernorm.weight", _vector(norms[1], c.hidden_size)
            for part, kind, first, shape, turns in self._matrices():
                yield name + part + ".weight", PackedRows(w and getattr(w, kind)[layer], first, shape, *turns)
                has_bias = c.mlp_bias if part.startswith("mlp") else c.attention_bias
                if has_bias:
                    bias = w and getattr(w, kind + "_bias")[layer].reshape(-1, 1, TILE_COLUMNS)  # as if of one input
                    yield name + part + ".bias", PackedRows(bias, first, shape[:1], *turns)

    def _matrices(self) -> list[tuple[str, str, int, tuple[int, int], tuple[int, int]]]:
        """A layer's matrices: name, field of `Weights`, first row there, shape, and which panels (see `PackedRows`)."""
        c = self.config
        hidden, inner, q, kv = c.hidden_size, c.intermediate_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        return [
            ("self_attn.q_proj", "qkv", 0, (q, hidden), (1, 0)),
            ("self_attn.k_proj", "qkv", q, (kv, hidden), (1, 0)),
            ("self_attn.v_proj", "qkv", q + kv, (kv, hidden), (1, 0)),
            ("self_attn.o_proj", "o", 0, (hidden, q), (1, 0)),
            ("mlp.gate_proj", "gate_up", 0, (inner, hidden), (2, 0)),
            ("mlp.up_proj", "gate_up", 0, (inner, hidden), (2, 1)),
            ("mlp.down_proj", "down", 0, (hidden, inner), (1, 0)),
        ]


def _vector(array: np.ndarray | None, size: int) -> Place:
    return TensorPlace(torch.empty(size, device="meta") if array is None else torch.from_numpy(array))
