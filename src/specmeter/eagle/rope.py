"""Rotary position embedding (Su et al., arXiv 2104.09864) in the half-split layout of Hugging Face's Llama."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specmeter.eagle.config import LlamaConfig, RopeScaling


class RotaryTable:
    """cos and sin for each position, so that rotating is ``x * cos + roll(x, head_dim / 2) * sin``.

    The sign of the rotation lies in ``sin`` (its first half is negated). Both are [positions, 1, head_dim]. With
    ``pairs`` the rotation is ``PairRotation``'s.
    """

    def __init__(
        self,
        config: LlamaConfig,
        positions: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
        *,
        pairs: bool = False,
    ) -> None:
        inverse = 1.0 / config.rope_theta ** (
            torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        )
        if config.rope_scaling is not None:
            inverse = _scale_llama3(inverse, config.rope_scaling)
        angles = torch.arange(positions, dtype=torch.float64)[:, None] * inverse
        self.cos = torch.cat([angles.cos(), angles.cos()], dim=-1).to(dtype)[:, None].to(device)
        self.sin = torch.cat([-angles.sin(), angles.sin()], dim=-1).to(dtype)[:, None].to(device)
        self.phase = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)[:, None] if pairs else None
        self.half = config.head_dim // 2

    def at(self, positions: Tensor) -> Rotation:
        """The rotation of rows at ``positions`` [rows]."""
        if self.phase is not None:
            return PairRotation(self.phase.index_select(0, positions))
        return HalfRotation(self.cos.index_select(0, positions), self.sin.index_select(0, positions), self.half)


class Rotation(Protocol):
    """What one forward does to its queries and keys."""

    def turn_(self, qkv: Tensor, heads: int) -> None:
        """Rotates the first ``heads`` heads of ``qkv`` [rows, width] in place."""


@dataclass(frozen=True)
class HalfRotation:
    """``cos`` and ``sin`` [rows, 1, head_dim], for heads whose pairs lie ``half`` = head_dim / 2 apart."""

    cos: Tensor
    sin: Tensor
    half: int

    def turn_(self, qkv: Tensor, heads: int) -> None:
        """As Rotation.turn_."""
        dim = 2 * self.half
        x = qkv.as_strided((qkv.shape[0], heads, dim), (qkv.shape[1], dim, 1))
        swapped = torch.roll(x, self.half, -1)
        x.mul_(self.cos).addcmul_(swapped, self.sin)


@dataclass(frozen=True)
class PairRotation:
    """``phase`` [rows, 1, head_dim / 2], complex64, for float32 heads whose pairs lie side by side (``pair_up``).

    One complex product in place of a roll and two products: in a forward of small products each call counts.
    """

    phase: Tensor

    def turn_(self, qkv: Tensor, heads: int) -> None:
        """As Rotation.turn_."""
        half = self.phase.shape[2]
        pairs = qkv.view(torch.complex64)
        pairs.as_strided((pairs.shape[0], heads, half), (pairs.shape[1], half, 1)).mul_(self.phase)


def pair_up(rows: Tensor, head_dim: int) -> Tensor:
    """``rows`` [heads * head_dim, ...] with dimension i of each head beside i + head_dim / 2, its pair.

    A query's product with a key does not change if both have their dimensions in the same other order.
    """
    shape = rows.shape
    return rows.view(-1, 2, head_dim // 2, *shape[1:]).transpose(1, 2).reshape(shape)


def _scale_llama3(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    # Llama 3.1's rule: long wavelengths are stretched by the factor, short ones kept, those between blended.
    length = scaling.original_max_position_embeddings
    wavelength = 2 * math.pi / inverse
    blend = (length / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * inverse / scaling.factor + blend * inverse
