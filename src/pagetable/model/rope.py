"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864): position enters by turning pairs of a head's numbers.

Dimension i is paired with i + head_dim / 2, as Hugging Face lays heads out. Frequencies, tables and the turning itself
are float32 whatever the model's type, because bfloat16 cannot tell position 1001 from 1002.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pagetable.model.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each pair, (head_dim / 2,) float32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    inv_freq = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return inv_freq
    if scaling.kind == "linear":
        return inv_freq / scaling.factor
    if scaling.kind == "factors":
        return inv_freq / torch.tensor(scaling.factors, dtype=torch.float32)
    return _llama3(inv_freq, scaling)


def _llama3(inv_freq: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's rule (its reference code, `apply_scaling`): long waves are stretched, short kept, between blended."""
    context = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    blend = (context / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(
        0.0, 1.0
    )  # 0: longer than context / low_freq_factor; 1: shorter than context / high_freq_factor
    return (1 - blend) * inv_freq / scaling.factor + blend * inv_freq


def rope_table(config: ModelConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin for positions 0 to length - 1, each (length, head_dim / 2) float32.

    A table rather than a computation in each step, so that a position has the same bits in every batch.
    """
    angles = torch.arange(length, dtype=torch.float32)[:, None] * inverse_frequencies(config)
    return angles.cos().to(device), angles.sin().to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x (T, heads, head_dim) by the angles of its tokens, cos and sin (T, head_dim / 2)."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
