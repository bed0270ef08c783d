"""What a model is made of, read from either kind of checkpoint and checked before anything is allocated.

A configuration is outside input like the weights are. What this package cannot compute is refused here, by name:
running a model as if it were a plain Llama when it is not gives fluent nonsense, the worst kind of error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pagetable.checkpoint import Checkpoint, ModelError

HF_ARCHITECTURES = {"LlamaForCausalLM": "llama"}
GGUF_ARCHITECTURES = {"llama": "llama"}


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies are stretched for contexts longer than the first training's.

    `linear` divides all by `factor`. `llama3` divides the low ones and blends between two wavelengths. `factors`
    divides each by its own number: the form in which a GGUF file carries llama3's result.
    """

    kind: Literal["linear", "llama3", "factors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    factors: tuple[float, ...] = ()  # head_dim / 2 of them


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a decoder of the Llama family. Names are those of Hugging Face where it has one."""

    architecture: str  # "llama"
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    attention_bias: bool  # on q, k, v and o
    mlp_bias: bool  # on gate, up and down
    checkpoint_dtype: str  # as the weights are stored: "float32", "bfloat16", "float16", or ggml's name, "Q4_1"

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that the K and V of one token take over all layers, stored as `dtype`."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


def load_config(checkpoint: Checkpoint) -> ModelConfig:
    """Read the configuration of `checkpoint`. Raises `ModelError` for what is missing, absurd or not supported."""
    return _from_gguf(checkpoint) if checkpoint.kind == "gguf" else _from_hf(checkpoint)


class _Fields:
    """Checked access to one mapping of settings; every complaint says where the setting stands."""

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.values = values
        self.where = where
        self.prefix = prefix

    def get(self, key: str) -> Any:
        return self.values.get(self.prefix + key)

    def refuse(self, key: str, problem: str) -> ModelError:
        return ModelError(f"{self.where}: {self.prefix}{key} is {str(self.get(key))[:80]!r}, {problem}")

    def integer(self, key: str, most: int, default: int | None = None) -> int:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.where} lacks {self.prefix}{key}: is the file complete?")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.refuse(key, f"but must be an integer from 1 to {most}")
        return value

    def number(self, key: str, least: float, most: float, default: float | None = None) -> float:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.where} lacks {self.prefix}{key}: is the file complete?")
        # Compare before float(): an integer of a thousand digits is legal JSON and no float.
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self.refuse(key, f"but must be a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(key, "but must be true or false")
        return value

    def only(self, key: str, allowed: tuple[Any, ...], what: str) -> None:
        """Refuse a setting that changes the arithmetic in a way that is not implemented."""
        if self.get(key) not in allowed:
            raise self.refuse(key, f"and {what}")


def _sizes(fields: _Fields, names: Mapping[str, str]) -> dict[str, int]:
    """The integers that both formats have, under the keys that `names` gives. The limits only catch nonsense."""
    hidden = fields.integer(names["hidden_size"], 1 << 17)
    heads = fields.integer(names["num_heads"], 1 << 10)
    if fields.get(names["head_dim"]) is None and hidden % heads:
        raise fields.refuse(names["hidden_size"], f"not a multiple of the {heads} heads")
    kv_heads = fields.integer(names["num_kv_heads"], 1 << 10, default=heads)
    if heads % kv_heads:
        raise ModelError(f"{fields.where}: {heads} heads cannot share {kv_heads} KV heads evenly")
    head_dim = fields.integer(names["head_dim"], 1 << 10, default=max(hidden // heads, 1))
    if head_dim % 2:
        raise ModelError(f"{fields.where}: head_dim is {head_dim}, but rotary embeddings turn pairs: it must be even")
    return {
        "num_layers": fields.integer(names["num_layers"], 1 << 10),
        "hidden_size": hidden,
        "intermediate_size": fields.integer(names["intermediate_size"], 1 << 20),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
    }


# -------------------------------------------------------------------------------------------------------- Hugging Face

_HF_NAMES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}


def _from_hf(checkpoint: Checkpoint) -> ModelConfig:
    values = checkpoint.json("config.json")
    where = str(checkpoint.path / "config.json")
    if values is None:
        raise ModelError(f"{where} is missing")
    fields = _Fields(values, where)
    architecture = _hf_architecture(fields)
    fields.only("hidden_act", (None, "silu", "swish"), "only silu is implemented")
    fields.only(
        "quantization_config", (None,), "quantised folders are not read: use the original weights or a GGUF file"
    )
    if fields.get("use_sliding_window") is not False:
        fields.only("sliding_window", (None,), "sliding-window attention is not implemented")
    theta, scaling = _hf_rope(fields)
    return ModelConfig(
        architecture=architecture,
        **_sizes(fields, _HF_NAMES),
        vocab_size=fields.integer("vocab_size", 1 << 22),
        max_position_embeddings=fields.integer("max_position_embeddings", 1 << 24, default=2048),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-12, 1.0, default=1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        checkpoint_dtype=_hf_dtype(fields),
    )


def _hf_architecture(fields: _Fields) -> str:
    names = fields.get("architectures")
    if names is None and fields.get("model_type") == "llama":
        return "llama"
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if not isinstance(name, str) or name not in HF_ARCHITECTURES:
        raise fields.refuse("architectures", f"supported: {', '.join(HF_ARCHITECTURES)}")
    return HF_ARCHITECTURES[name]


def _hf_dtype(fields: _Fields) -> str:
    # transformers 5 writes `dtype`, earlier ones `torch_dtype`.
    key = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    name = fields.get(key)
    if name is None:
        return "float32"
    if name not in ("float32", "float16", "bfloat16"):
        raise fields.refuse(key, "supported: float32, float16, bfloat16")
    return str(name)


def _hf_rope(fields: _Fields) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from transformers 5's `rope_parameters` or the older `rope_theta` and `rope_scaling`."""
    fields.only("partial_rotary_factor", (None, 1, 1.0), "rotating a part of each head is not implemented")
    key = "rope_parameters" if fields.get("rope_parameters") is not None else "rope_scaling"
    values = fields.get(key)
    if values is None:
        return fields.number("rope_theta", 1.0, 1e15, default=10000.0), None
    if not isinstance(values, dict):
        raise fields.refuse(key, "but must be an object")
    rope = _Fields(values, f"{fields.where}, {key}")
    rope.only("partial_rotary_factor", (None, 1, 1.0), "rotating a part of each head is not implemented")
    theta = rope.number("rope_theta", 1.0, 1e15, default=fields.number("rope_theta", 1.0, 1e15, default=10000.0))
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", factor=rope.number("factor", 1e-3, 1e6))
    if kind != "llama3":
        raise ModelError(f"{rope.where}: rope type is {str(kind)[:80]!r}, supported: default, linear, llama3")
    longest = fields.integer("max_position_embeddings", 1 << 24, default=2048)
    scaling = RopeScaling(
        "llama3",
        factor=rope.number("factor", 1e-3, 1e6),
        low_freq_factor=rope.number("low_freq_factor", 1e-3, 1e6),
        high_freq_factor=rope.number("high_freq_factor", 1e-3, 1e6),
        original_max_position_embeddings=rope.integer("original_max_position_embeddings", 1 << 24, default=longest),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise rope.refuse("high_freq_factor", f"but must be above low_freq_factor, {scaling.low_freq_factor:g}")
    return theta, scaling


# ---------------------------------------------------------------------------------------------------------------- GGUF

_GGUF_NAMES = {
    "num_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
}
_GGUF_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def _from_gguf(checkpoint: Checkpoint) -> ModelConfig:
    assert checkpoint.gguf is not None
    where, tensors = str(checkpoint.path), checkpoint.gguf.tensors
    architecture = checkpoint.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in GGUF_ARCHITECTURES:
        supported = ", ".join(GGUF_ARCHITECTURES)
        raise ModelError(f"{where}: general.architecture is {str(architecture)[:80]!r}, supported: {supported}")
    fields = _Fields(checkpoint.metadata, where, prefix=f"{architecture}.")
    if (embedding := tensors.get("token_embd.weight")) is None or len(embedding.shape) != 2:
        raise ModelError(f"{where} has no matrix token_embd.weight: it is not a whole model")
    sizes = _sizes(fields, _GGUF_NAMES)
    fields.only("expert_count", (None, 0), "mixtures of experts are not implemented")
    fields.only("attention.value_length", (None, sizes["head_dim"]), "only values as wide as keys are implemented")
    fields.only("attention.sliding_window", (None, 0), "sliding-window attention is not implemented")
    fields.only("rope.dimension_count", (None, sizes["head_dim"]), "rotating a part of each head is not implemented")
    if embedding.shape[0] > 1 << 22:
        raise ModelError(f"{where}: token_embd.weight has {embedding.shape[0]} rows")
    return ModelConfig(
        architecture=GGUF_ARCHITECTURES[architecture],
        **sizes,
        # The tensor, not the metadata: fine-tunes that add tokens are known to leave the number behind.
        vocab_size=embedding.shape[0],
        max_position_embeddings=fields.integer("context_length", 1 << 24),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon", 1e-12, 1.0),
        rope_theta=fields.number("rope.freq_base", 1.0, 1e15, default=10000.0),
        rope_scaling=_gguf_rope_scaling(checkpoint, fields, sizes["head_dim"]),
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        checkpoint_dtype=_gguf_dtype(checkpoint),
    )


def _gguf_rope_scaling(checkpoint: Checkpoint, fields: _Fields, head_dim: int) -> RopeScaling | None:
    """llama.cpp keeps linear scaling in the metadata and llama3's as a tensor of divisors, `rope_freqs.weight`."""
    assert checkpoint.gguf is not None
    fields.only("rope.scaling.attn_factor", (None, 1.0), "scaling of attention by length is not implemented")
    fields.only(
        "rope.scaling.type", (None, "none", "linear"), "supported: none, linear, and llama3 by rope_freqs.weight"
    )
    # Before `type` and `factor` there was `scale_linear`; llama.cpp falls back on it in the same way.
    key = "rope.scaling.factor" if fields.get("rope.scaling.factor") is not None else "rope.scale_linear"
    linear = fields.number(key, 1e-3, 1e6, default=1.0) if fields.get("rope.scaling.type") != "none" else 1.0
    freqs = checkpoint.gguf.tensors.get("rope_freqs.weight")
    if freqs is None:
        return RopeScaling("linear", factor=linear) if linear != 1.0 else None
    if freqs.type_name != "F32" or freqs.shape != (head_dim // 2,):
        shape, kind = list(freqs.shape), freqs.type_name
        raise ModelError(f"{fields.where}: rope_freqs.weight is {kind} {shape}, expected F32 [{head_dim // 2}]")
    factors = tuple(float(factor) * linear for factor in freqs.data.view("<f4"))
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise ModelError(f"{fields.where}: rope_freqs.weight holds values that are not positive numbers")
    return RopeScaling("factors", factors=factors)


def _gguf_dtype(checkpoint: Checkpoint) -> str:
    """The type that most bytes of the file's matrices have."""
    assert checkpoint.gguf is not None
    sizes: dict[str, int] = {}
    for tensor in checkpoint.gguf.tensors.values():
        sizes[tensor.type_name] = sizes.get(tensor.type_name, 0) + tensor.data.nbytes
    commonest = max(sizes, key=lambda name: sizes[name])
    return _GGUF_FLOATS.get(commonest, commonest)
