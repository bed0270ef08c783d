"""Configurations of both formats: what is understood, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pagetable.model import ModelConfig, ModelError, RopeScaling, load_config, open_checkpoint
from pagetable.model.rope import inverse_frequencies
from tests.model.tiny_models import LLAMA3, gguf_tensors, llama3_factors, tiny_llama, write_gguf

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49152,
}


def read(folder: Path, **changes: Any) -> ModelConfig:
    """PLAIN with changes; None removes."""
    values = {key: value for key, value in {**PLAIN, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "model.safetensors").touch()
    return load_config(open_checkpoint(folder))


def test_a_plain_config(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.rope_theta, config.rope_scaling, config.checkpoint_dtype) == (100000.0, None, "bfloat16")
    assert config.tie_word_embeddings
    assert not config.attention_bias
    # 30 layers, K and V, 3 heads of 64, 2 bytes.
    assert config.kv_bytes_per_token(torch.bfloat16) == 30 * 2 * 3 * 64 * 2
    assert config.kv_bytes_per_token(torch.float32) == 30 * 2 * 3 * 64 * 4


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    left_out = ("num_key_value_heads", "rope_theta", "tie_word_embeddings", "rms_norm_eps", "max_position_embeddings")
    config = read(tmp_path, **dict.fromkeys(left_out), torch_dtype=None)
    assert (config.num_kv_heads, config.rope_theta, config.tie_word_embeddings) == (9, 10000.0, False)
    assert (config.rms_norm_eps, config.max_position_embeddings, config.checkpoint_dtype) == (1e-6, 2048, "float32")


def test_transformers_5_spells_two_things_anew(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 5e5}
    config = read(tmp_path, rope_theta=None, rope_parameters=rope, torch_dtype=None, dtype="float16")
    assert (config.rope_theta, config.rope_scaling, config.checkpoint_dtype) == (5e5, None, "float16")
    config = read(tmp_path, rope_theta=None, rope_parameters=LLAMA3)
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 32)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_the_older_spellings_of_rope_scaling(tmp_path: Path, key: str) -> None:
    assert read(tmp_path, rope_scaling={key: "linear", "factor": 2.0}).rope_scaling == RopeScaling("linear", 2.0)
    llama3 = {key: "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    config = read(tmp_path, rope_scaling={**llama3, "original_max_position_embeddings": 8192})
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert config.rope_theta == 100000.0


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        LLAMA3,
        {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 8192, "factor": 32.0},
    ],
)
def test_frequencies_equal_transformers(tmp_path: Path, rope: dict[str, Any]) -> None:
    config = read(tmp_path, rope_theta=None, rope_parameters=rope)
    reference = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=576, num_attention_heads=9, head_dim=64, rope_parameters=rope)
    )
    torch.testing.assert_close(inverse_frequencies(config), reference.inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM.*supported: LlamaForCausalLM"),
        ({"architectures": None, "model_type": "gpt2"}, "supported: LlamaForCausalLM"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"architectures": [["x"]]}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'.*silu"),
        ({"sliding_window": 4096}, "sliding_window is '4096'"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq.*GGUF"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'.*supported: default, linear, llama3"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "above low_freq_factor"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn.*supported: float32"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is '0'"),
        ({"num_hidden_layers": -3}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers"),
        ({"num_hidden_layers": "30"}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": 30.0}, "num_hidden_layers"),
        ({"vocab_size": 2**31}, "vocab_size"),
        ({"hidden_size": 577}, "not a multiple of the 9 heads"),
        ({"num_key_value_heads": 4}, "9 heads cannot share 4"),
        ({"head_dim": 63}, "head_dim is 63"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read(tmp_path, **changes)
    assert len(str(caught.value)) < 600
    assert "config.json" in str(caught.value)


def test_a_sliding_window_that_is_switched_off_is_allowed(tmp_path: Path) -> None:
    read(tmp_path, sliding_window=4096, use_sliding_window=False)


def read_gguf(folder: Path, extra: dict[str, np.ndarray] | None = None, **metadata: Any) -> ModelConfig:
    model = tiny_llama()
    renamed = {key if "general" in key else f"llama.{key}": value for key, value in metadata.items()}
    path = write_gguf(model, folder / "m.gguf", tensors={**gguf_tensors(model), **(extra or {})}, metadata=renamed)
    return load_config(open_checkpoint(path))


def test_a_gguf_config(tmp_path: Path) -> None:
    config = read_gguf(tmp_path)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.vocab_size, config.intermediate_size, config.max_position_embeddings) == (160, 96, 256)
    assert (config.rope_theta, config.rope_scaling, config.checkpoint_dtype) == (10000.0, None, "float32")
    assert not config.tie_word_embeddings


def test_gguf_linear_scaling_in_both_spellings(tmp_path: Path) -> None:
    new = read_gguf(tmp_path, **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    old = read_gguf(tmp_path, **{"rope.scale_linear": 4.0})
    off = read_gguf(tmp_path, **{"rope.scaling.type": "none", "rope.scaling.factor": 4.0})
    assert new.rope_scaling == old.rope_scaling == RopeScaling("linear", 4.0)
    assert off.rope_scaling is None


def test_gguf_llama3_factors_give_the_frequencies_of_the_rule(tmp_path: Path) -> None:
    model = tiny_llama(rope_parameters=LLAMA3)
    config = read_gguf(tmp_path, {"rope_freqs.weight": llama3_factors(model)})
    assert config.rope_scaling is not None
    assert len(set(config.rope_scaling.factors)) > 2, "the case must reach the blended range"
    reference = model.model.rotary_emb.inv_freq
    torch.testing.assert_close(inverse_frequencies(config), reference, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "qwen2"}, "'qwen2', supported: llama"),
        ({"expert_count": 8}, "llama.expert_count is '8'.*experts"),
        ({"rope.scaling.type": "yarn"}, "'yarn'.*supported: none, linear"),
        ({"rope.scaling.attn_factor": 2.0}, "attn_factor"),
        ({"rope.dimension_count": 8}, "rope.dimension_count is '8'"),
        ({"attention.value_length": 32}, "attention.value_length"),
        ({"attention.sliding_window": 128}, "sliding_window"),
        ({"attention.head_count_kv": [2, 4]}, "head_count_kv"),
        ({"block_count": None}, "lacks llama.block_count"),
        ({"context_length": None}, "lacks llama.context_length"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "epsilon"),
        ({"attention.head_count": 0}, "head_count is '0'"),
    ],
)
def test_gguf_settings_that_are_refused_by_name(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read_gguf(tmp_path, **metadata)
    assert "m.gguf" in str(caught.value)


@pytest.mark.parametrize("factors", [np.ones(7, np.float32), np.zeros(8, np.float32), np.full(8, np.nan, np.float32)])
def test_damaged_rope_factors_are_refused(tmp_path: Path, factors: np.ndarray) -> None:
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        read_gguf(tmp_path, {"rope_freqs.weight": factors})
