"""Rotary position embedding (Su et al., arXiv 2104.09864) in the half-split layout of Hugging Face's Llama."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specmeter.eagle.config import LlamaConfig, RopeScaling


class RotaryTable:
    """cos and sin for each position, so that rotating is ``x * cos + roll(x, head_dim / 2) * sin``.

    The sign of the rotation lies in ``sin`` (its first half is negated). Both are [positions, 1, head_dim].
    """

    def __init__(self, config: LlamaConfig, positions: int, dtype: torch.dtype) -> None:
        inverse = 1.0 / config.rope_theta ** (
            torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        )
        if config.rope_scaling is not None:
            inverse = _scale_llama3(inverse, config.rope_scaling)
        angles = torch.arange(positions, dtype=torch.float64)[:, None] * inverse
        self.cos = torch.cat([angles.cos(), angles.cos()], dim=-1).to(dtype)[:, None]
        self.sin = torch.cat([-angles.sin(), angles.sin()], dim=-1).to(dtype)[:, None]
        self.half = config.head_dim // 2

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [rows, 1, head_dim] for ``positions`` [rows]."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, half: int) -> None:
    """Rotates ``x`` [rows, heads, head_dim] in place."""
    swapped = torch.roll(x, half, -1)
    x.mul_(cos).addcmul_(swapped, sin)


def _scale_llama3(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    # Llama 3.1's rule: long wavelengths are stretched by the factor, short ones kept, those between blended.
    length = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / inverse
    blend = (length / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * inverse / scaling.factor + blend * inverse
