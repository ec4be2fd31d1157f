"""The layouts of weights: each computes the same product, and the choice between them is by time and stable."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specmeter.eagle import layouts
from specmeter.eagle.layouts import DTYPES, choose_layout, fastest, time_layouts, works
from specmeter.eagle.linear import (
    HALF,
    PACKED_BFLOAT16,
    PACKED_FLOAT32,
    PLAIN_BFLOAT16,
    PLAIN_FLOAT32,
    Int8Linear,
    Layout,
)
from specmeter.errors import SpecmeterError

ALL = (HALF, PACKED_BFLOAT16, PLAIN_BFLOAT16, PACKED_FLOAT32, PLAIN_FLOAT32)
HERE = [layout for layout in ALL if works(layout)]


@pytest.mark.parametrize("layout", HERE, ids=[layout.name for layout in HERE])
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_every_layout_computes_the_product(layout: Layout, rows: int) -> None:
    draw = torch.Generator().manual_seed(rows)
    weight = (torch.randn(96, 64, generator=draw) / 8).bfloat16()
    bias, x = torch.randn(96, generator=draw).bfloat16(), torch.randn(rows, 64, generator=draw).bfloat16()
    other = torch.randn(rows, 96, generator=draw).bfloat16()
    want = x.double() @ weight.double().T + bias.double()
    linear = layout.linear(weight.to(layout.weights), bias.to(layout.activations))
    tolerance = 0.05 if layout.activations is torch.bfloat16 else 1e-5
    with torch.inference_mode():
        got, sums = (
            linear(x.to(layout.activations)),
            linear.plus(x.to(layout.activations), other.to(layout.activations)),
        )
    assert got.dtype is sums.dtype is layout.activations
    torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance)
    torch.testing.assert_close(sums.double(), want + other.double(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 4])
def test_int8_is_off_by_a_little_of_the_outputs_spread(dtype: torch.dtype, rows: int) -> None:
    draw = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(300, 64, generator=draw).bfloat16(), torch.randn(rows, 64, generator=draw).to(dtype)
    weight[7] = 0  # a row without any scale
    want = x.double() @ weight.double().T
    got = Int8Linear(weight)(x)
    assert got.dtype is dtype
    assert float((got.double() - want).abs().max()) < 0.06 * float(want.std())
    torch.testing.assert_close(Int8Linear(weight).plus(x, torch.ones(rows, 300, dtype=dtype)), got + 1)


@pytest.mark.skipif(not works(HALF), reason="this torch has no FBGEMM kernels here")
@given(bits=st.integers(0, 0x7F7F))
def test_bfloat16_weights_are_exact_in_half_or_off_by_less_than_half_a_smallest_step(bits: int) -> None:
    weight = torch.full((16, 16), bits, dtype=torch.int16).view(torch.bfloat16)
    value = float(weight[0, 0])
    if value > 65504:
        with pytest.raises(SpecmeterError, match="float16"):
            HALF.linear(weight)
        return
    x = torch.zeros(1, 16)
    x[0, 0] = 1.0
    got = float(HALF.linear(weight)(x)[0, 0])
    assert got == value if value >= 2**-17 else abs(got - value) <= 2**-25


def test_a_later_layout_must_be_clearly_faster_to_be_chosen() -> None:
    pair = (PACKED_BFLOAT16, PLAIN_BFLOAT16)
    assert fastest(pair, [1.0, 0.95]) is PACKED_BFLOAT16
    assert fastest(pair, [1.0, 0.5]) is PLAIN_BFLOAT16
    assert fastest((*pair, HALF), [1.0, 0.8, 0.75]) is PLAIN_BFLOAT16


def test_times_are_those_of_each_layout() -> None:
    seconds = time_layouts([PLAIN_FLOAT32, PLAIN_FLOAT32])
    assert len(seconds) == 2 and all(0 < each < 10 for each in seconds)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "auto"])
def test_a_named_dtype_is_kept(dtype: str) -> None:
    wanted = torch.float32 if dtype == "float32" else torch.bfloat16
    assert choose_layout(dtype).weights is wanted


def test_what_does_not_work_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "works", lambda layout: layout is PLAIN_FLOAT32)
    assert choose_layout("auto") is PLAIN_FLOAT32
    with pytest.raises(SpecmeterError, match="float16 does not work here"):
        choose_layout("float16")


def test_a_kernel_that_computes_wrongly_does_not_work() -> None:
    class Wrong:
        def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
            self.inner = PLAIN_FLOAT32.linear(weight, bias)

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

        def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    assert not works(Layout("wrong", torch.float32, torch.float32, Wrong))
