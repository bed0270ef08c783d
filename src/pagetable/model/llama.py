"""The Llama decoder (Touvron et al. 2023, arXiv:2302.13971), computed over a flat batch of tokens.

There is no batch dimension and no padding: T tokens of any mix of sequences stand in one row, each with its position.
Only attention knows which token belongs to whom, and only the attention back-end sees the cache.

    E hidden size, D head size, H heads, G KV heads, F feed-forward size, V vocabulary     SmolLM2-135M, for example
    token_ids, positions   (T,)                                                            E 576, 30 layers
    hidden                 (T, E)                                                          H 9, G 3, D 64
    embed_tokens, lm_head  (V, E)       the same tensor when tied                          V 49152
    qkv_proj               (H D + 2 G D, E)                                                960 × 576
    o_proj                 (E, H D)                                                        576 × 576
    gate_up_proj           (2 F, E)     F 1536                                             3072 × 576
    down_proj              (E, F)                                                          576 × 1536

q, k and v are one matrix, and so are gate and up: fewer and larger multiplications, the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from pagetable.engine.step import SamplingBatch, Step
from pagetable.model.attention import AttentionBackend, TorchAttention
from pagetable.model.config import ModelConfig
from pagetable.model.kv_cache import KVCache
from pagetable.model.rope import rope_table, rotate
from pagetable.model.sampler import draw_rows
from pagetable.model.weights import Place, TensorPlace


class RMSNorm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich 2019, arXiv:1910.07467), the root computed in float32."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """(…, size) to the same shape and type."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


class Attention(nn.Module):
    """Project to q, k, v; turn q and k by position; attend through the page table; project back."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.heads, self.kv_heads = config.num_heads, config.num_kv_heads
        size, bias = config.hidden_size, config.attention_bias
        self.qkv_proj = nn.Linear(size, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=bias, dtype=dtype)
        self.o_proj = nn.Linear(self.heads * self.head_dim, size, bias=bias, dtype=dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: AttentionBackend) -> Tensor:
        """(T, E) to (T, E)."""
        qkv = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        turned = rotate(qkv[:, : -self.kv_heads], cos, sin)  # q and k; v carries no position
        q, k, v = turned[:, : self.heads], turned[:, self.heads :], qkv[:, -self.kv_heads :]
        out = attention.attend(self.layer, q, k, v)
        return self.o_proj(out.view(len(x), -1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = nn.Linear(size, 2 * inner, bias=bias, dtype=dtype)
        self.down_proj = nn.Linear(inner, size, bias=bias, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(T, E) to (T, E)."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Attention, then the feed-forward net, each on a normalised copy and added back."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = Attention(config, layer, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: AttentionBackend) -> Tensor:
        """(T, E) to (T, E)."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attention)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """The whole model in plain PyTorch, on any device: the reference, and the way to a GPU.

    Its parameters hold no values until `load_weights`, its rotary table until `reserve_positions`.
    Make it under `torch.device("meta")` to learn its shapes without taking memory.
    """

    batch_invariant = False  # how PyTorch multiplies depends on the number of rows

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        size = (config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Parameter(torch.empty(size, dtype=dtype))
        self.layers = nn.ModuleList(DecoderLayer(config, layer, dtype) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.lm_head = None if config.tie_word_embeddings else nn.Parameter(torch.empty(size, dtype=dtype))
        self.requires_grad_(False)
        self.cos, self.sin = torch.empty(0), torch.empty(0)
        self._hidden = torch.empty(0)  # of the step that was computed last

    def attention(self, cache: KVCache) -> AttentionBackend:
        """See `Decoder.attention`."""
        return TorchAttention(cache)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights, of the hidden states and of the K/V that the cache must hold."""
        return self.embed_tokens.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed_tokens.device

    def reserve_positions(self, length: int) -> None:
        """Prepare the rotary table for positions below `length`."""
        if len(self.cos) < length or self.cos.device != self.device:
            self.cos, self.sin = rope_table(self.config, length, self.device)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        """Hidden states (T, E) after the last layer, not yet normalised; K and V go into the cache on the way."""
        x = F.embedding(token_ids, self.embed_tokens)
        cos, sin = self.cos[positions], self.sin[positions]
        for layer in self.layers:
            x = layer(x, cos, sin, attention)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary, (R, V) float32, for rows picked from what `forward` returned, (R, E)."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return F.linear(self.norm(hidden), head).float()

    def compute(self, step: Step, attention: AttentionBackend, wanted: NDArray[np.int64]) -> Tensor:
        """See `Decoder.compute`."""
        attention.plan(step)
        token_ids, positions, rows = (
            torch.tensor(array, device=self.device) for array in (step.token_ids, step.positions, wanted)
        )
        self._hidden = hidden = self(token_ids, positions, attention)
        return self.logits(hidden[rows]) if len(wanted) else hidden.new_empty((0, self.config.vocab_size))

    def more_logits(self, wanted: NDArray[np.int64]) -> Tensor:
        """See `Decoder.more_logits`."""
        return self.logits(self._hidden[torch.tensor(wanted, device=self.device)])

    def draw(self, logits: Tensor, largest: Tensor, batch: SamplingBatch, rows: NDArray[np.int64]) -> Tensor:
        """See `Decoder.draw`."""
        return draw_rows(logits, largest, batch, rows)

    def allocate(self, device: torch.device) -> None:
        """Take memory for the weights of a model made on the meta device."""
        self.to_empty(device=device)

    def placements(self) -> Iterator[tuple[str, Place]]:
        """Canonical tensor names and where each goes, for `load_weights`."""
        for name, target in self._targets():
            yield name, TensorPlace(target)

    def _targets(self) -> Iterator[tuple[str, Tensor]]:
        yield "model.embed_tokens.weight", self.embed_tokens
        yield "model.norm.weight", self.norm.weight
        if self.lm_head is not None:
            yield "lm_head.weight", self.lm_head
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            for name, target in _layer_placements(layer, self.config):
                yield f"model.layers.{index}.{name}", target


def _layer_placements(layer: DecoderLayer, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """One layer's names and places; a fused matrix is filled by consecutive rows."""
    yield "input_layernorm.weight", layer.input_layernorm.weight
    yield "post_attention_layernorm.weight", layer.post_attention_layernorm.weight
    rows_q, rows_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    parts: list[tuple[nn.Linear, dict[str, int]]] = [
        (
            layer.self_attn.qkv_proj,
            {"self_attn.q_proj": rows_q, "self_attn.k_proj": rows_kv, "self_attn.v_proj": rows_kv},
        ),
        (layer.self_attn.o_proj, {"self_attn.o_proj": config.hidden_size}),
        (layer.mlp.gate_up_proj, {"mlp.gate_proj": inner, "mlp.up_proj": inner}),
        (layer.mlp.down_proj, {"mlp.down_proj": config.hidden_size}),
    ]
    for linear, rows in parts:
        ends = [sum(list(rows.values())[:count]) for count in range(len(rows) + 1)]
        for name, (begin, end) in zip(rows, pairwise(ends), strict=True):
            yield f"{name}.weight", linear.weight[begin:end]
            if linear.bias is not None:
                yield f"{name}.bias", linear.bias[begin:end]
