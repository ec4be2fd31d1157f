"""Linear layers whose weights are laid out once for the fastest kernel at hand.

At batch 1 decoding reads every weight once a token, so the layout that streams memory best wins. Which one that is
depends on the machine and on torch, so ``eagle.layouts`` times them at start-up. Known are:

- plain: the weights as they were loaded, for every dtype and every torch;
- packed: oneDNN's blocked layout, with what follows the product fused into its epilogue;
- int8: a draft's output layer alone, see ``Int8Linear``;
- half: FBGEMM's fp16 layout under float32 activations. A bfloat16 weight of magnitude 2^-17 to 65504 is exact in it, a
  smaller one is off by 3e-8 at most, so the result is nearer the exact one than a bfloat16 product's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specmeter.errors import SpecmeterError

_FP16_MAX = 65504.0
CPU = torch.device("cpu")


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


class HalfLinear:
    """The weights in FBGEMM's fp16 layout; input, sums and output are float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        weight = weight.float().contiguous()
        if float(weight.abs().max()) > _FP16_MAX:
            raise SpecmeterError(
                "A weight does not fit float16.", f"It is larger than {_FP16_MAX:.0f}.", "Start with --dtype bfloat16."
            )
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight, None if bias is None else bias.float())
        self._product = torch.ops.quantized.linear_dynamic_fp16.default

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = self._product(x, self._packed)
        return result

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        result: Tensor = self._product(x, self._packed)
        return result.add_(other)


class Int8Linear:
    """int8 weights with a scale a row, the input quantized to 8 bits at each call: half the bytes of fp16.

    Inexact by about 1 % of the output's spread, so it is for what a target checks afterwards: a draft's guesses.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        weight = weight.float()
        rows = weight.shape[0]
        scales = (weight.abs().amax(1) / 127).clamp_(min=1e-12).double()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch moves eager quantization elsewhere, and says so at each call
            eights = torch.quantize_per_channel(weight, scales, torch.zeros(rows, dtype=torch.int64), 0, torch.qint8)
            self._packed = torch.ops.quantized.linear_prepack(eights, None if bias is None else bias.float())
        self._product = torch.ops.quantized.linear_dynamic.default

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = self._product(x.float(), self._packed)
        return result.to(x.dtype)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return self(x).add_(other)


@dataclass(frozen=True)
class Layout:
    """A way to hold the weights. ``weights`` is the dtype of matrices and embeddings, ``activations`` that of all the
    rest: states, norms and the key-value cache. ``device`` is where all of it lies. With ``pairs``, which
    needs float32 activations, each dimension of a query or key lies beside the one it is rotated with."""

    name: str
    weights: torch.dtype
    activations: torch.dtype
    make: Callable[[Tensor, Tensor | None], Linear]
    device: torch.device = CPU
    pairs: bool = False

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A linear layer over ``weight`` [out, in]."""
        return self.make(weight, bias)


PLAIN_FLOAT32 = Layout("float32, plain", torch.float32, torch.float32, PlainLinear)
PACKED_FLOAT32 = Layout("float32, oneDNN packed", torch.float32, torch.float32, PackedLinear)
PLAIN_BFLOAT16 = Layout("bfloat16, plain", torch.bfloat16, torch.bfloat16, PlainLinear)
PACKED_BFLOAT16 = Layout("bfloat16, oneDNN packed", torch.bfloat16, torch.bfloat16, PackedLinear)
# The matrices are converted one by one as they are packed; until then they stay as small as they were.
HALF = Layout("float16 weights, FBGEMM", torch.bfloat16, torch.float32, HalfLinear, pairs=True)
