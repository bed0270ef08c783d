"""Tiny Llamas with random weights, made by transformers and written in both formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

TYPES = gguf.GGMLQuantizationType
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,  # so that at head size 16 all three ranges of wavelength occur
}


def tiny_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Two layers, float32, in eval mode; weights large enough that logits differ clearly."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "rms_norm_eps": 1e-5,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # transformers starts them at one and zero: no test of anything
                weight.copy_(torch.randn_like(weight) * 0.2 + (1.0 if "norm" in name else 0.0))
    return model


def save_hf(model: LlamaForCausalLM, folder: Path, max_shard_size: str = "1GB") -> Path:
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's convert_hf_to_gguf.py does to the rows of q and k."""
    shape = weight.shape
    return np.ascontiguousarray(weight.reshape(heads, 2, shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(shape))


def gguf_name(name: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, _, kind = name.rpartition(".")
    if stem in top:
        return f"{top[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[inner]}.{kind}"


def gguf_tensors(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    """Float32 tensors under llama.cpp's names and in its order of rows."""
    config, tensors = model.config, {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = weight.float().numpy()
        if "q_proj" in name or "k_proj" in name:
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = permute(array, heads)
        tensors[gguf_name(name)] = array
    return tensors


def write_gguf(
    model: LlamaForCausalLM,
    path: Path,
    matrix_type: TYPES = TYPES.F32,
    *,
    tensors: dict[str, np.ndarray] | None = None,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """Write `tensors` (default: those of `model`); matrices as `matrix_type`, vectors float32. None removes a key."""
    config = model.config
    values: dict[str, Any] = {
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.rope.dimension_count": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "llama.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        **(metadata or {}),
    }
    writer = gguf.GGUFWriter(path, values.pop("general.architecture", "llama"))
    for key, value in values.items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    for name, array in (gguf_tensors(model) if tensors is None else tensors).items():
        kind = matrix_type if array.ndim == 2 else TYPES.F32
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama3_factors(model: LlamaForCausalLM) -> np.ndarray:
    """rope_freqs.weight as llama.cpp's converter computes it, with its loop over frequencies."""
    rope = model.config.rope_parameters
    context, low, high = (
        rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    factors = []
    for i in range(0, model.config.head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / model.config.head_dim)
        if wavelength < context / high:
            factors.append(1.0)
        elif wavelength > context / low:
            factors.append(rope["factor"])
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)
