"""Linear layers whose weights are laid out once for the fastest kernel at hand.

At batch 1 decoding reads every weight once a token, so the layout that streams memory best wins. oneDNN's packed
weights beat the plain layout about twofold in bfloat16; where torch lacks these operators the plain one is used.
The weights' values are never changed.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear(Protocol):
    """x -> x W^T + b, and the same with a residual added. All take and give [rows, n]."""

    def __call__(self, x: Tensor) -> Tensor:
        """x W^T + b."""

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """(x W^T + b) + other."""


class PlainLinear:
    """The weights as they were loaded, [out, in]; works for every dtype and every torch."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight.contiguous()
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias).add_(other)


class PackedLinear:
    """The weights in oneDNN's blocked layout; what follows the product is fused into its epilogue in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)
        self.bias = bias
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._binary = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = self._product(x, self.weight, self.bias, "none", [], "")
        return result

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        result: Tensor = self._binary(x, other, self.weight, self.bias, "add")
        return result


def can_pack(dtype: torch.dtype) -> bool:
    """True if this torch, on this machine, computes ``dtype`` products with packed weights, correctly."""
    if dtype not in (torch.bfloat16, torch.float32):
        return False
    weight = torch.linspace(-1, 1, 32 * 16, dtype=torch.float32).reshape(32, 16).to(dtype)
    x = torch.linspace(-1, 1, 2 * 16, dtype=torch.float32).reshape(2, 16).to(dtype)
    try:
        with torch.inference_mode():
            packed, plain = PackedLinear(weight), PlainLinear(weight)
            got = packed.plus(x, packed(x))
            want = plain.plus(x, plain(x))
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(got.float(), want.float(), rtol=0.02, atol=0.05)


def make_linear(weight: Tensor, bias: Tensor | None = None, *, packed: bool) -> Linear:
    """A linear layer over ``weight`` [out, in] in the packed or in the plain layout."""
    return PackedLinear(weight, bias) if packed else PlainLinear(weight, bias)
