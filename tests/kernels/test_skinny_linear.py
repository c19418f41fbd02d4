"""Linear layers for few rows, in 16 bits and in float8, against their oracles in float64."""

from typing import Any

import pytest
import torch
from pagewise_kernels.kv_layer import FP8
from pagewise_kernels.quantised import quantise_rows
from pagewise_kernels.skinny_linear import MOST_ROUNDED_ROWS, MOST_ROWS, skinny_linear

from tests.kernels import oracles

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Errors of results in each type, relative to the largest of a row; with a gate they are rounded three times."""
TENSOR_CORES_FP8 = 2e-3
"""The same for sums of float8 products, of which Hopper's tensor cores keep about 14 bits; 7e-4 was seen on an H200."""
# Outputs of one tile and of many, whole and cut; inputs of one part and of several, whole and cut.
SHAPES: list[Any] = [(1, 40, 20), (17, 128, 75), (2, 512, 32), (130, 96, 40)]
REAL: list[Any] = [
    pytest.param((rows, *shape), marks=pytest.mark.gpu)
    for rows in (1, 2, 16, 17, 64, 200)
    for shape in ((4096, 6144), (4096, 4096), (4096, 14336), (14336, 4096), (1000, 4000))
]


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """The same random numbers each time: how much rounding to float8 differs depends on them."""
    torch.manual_seed(1)


def weights(outs: int, ins: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """float8 weights with a scale per output, by which products of ``ins`` normal inputs are about 1."""
    values = (torch.randn(outs, ins, device=device) * 100).clamp(-448, 448).to(FP8)
    return values, (torch.rand(outs, device=device) + 0.5) / (100 * ins**0.5)


def expect(gate_up: torch.Tensor, gated: bool) -> torch.Tensor:
    return oracles.silu_mul(gate_up) if gated else gate_up


def check(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, least: float = 0.0) -> None:
    """``least``: the smallest error that is allowed in any type."""
    assert found.dtype == dtype
    largest = expected.abs().amax(dim=1, keepdim=True)
    assert float(((found.double() - expected).abs() / largest).max()) <= max(TOLERANCE[dtype], least)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, *REAL])
def test_products_of_few_rows(
    shape: tuple[int, int, int], gated: bool, dtype: torch.dtype, device: torch.device
) -> None:
    rows, ins, size = shape
    outs = 2 * size if gated else size
    x = torch.randn(rows, ins + 8, device=device).to(dtype)[:, :ins]
    weight = (torch.randn(outs, ins, device=device) / ins**0.5).to(dtype)
    bias = torch.randn(outs, device=device).to(dtype)
    for given in (None, bias):
        exact = x.double() @ weight.double().T + (0 if given is None else given.double())
        check(skinny_linear(x, weight, given, gated=gated), expect(exact, gated), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, *REAL])
def test_products_of_few_rows_in_float8(
    shape: tuple[int, int, int], gated: bool, dtype: torch.dtype, device: torch.device
) -> None:
    rows, ins, size = shape
    outs = 2 * size if gated else size
    weight, weight_scales = weights(outs, ins, device)
    x = torch.randn(rows, ins, device=device).to(dtype)
    x[0] *= 8.0  # a scale of its own
    bias = torch.randn(outs, device=device).to(dtype)
    values, x_scales = quantise_rows(x, FP8)
    exact = oracles.scaled_linear(values, x_scales, weight, weight_scales[:, None], (1, ins), bias)
    scales = {"x_scales": x_scales[:, 0], "weight_scales": weight_scales}
    found = skinny_linear(values, weight, bias, **scales, gated=gated, dtype=dtype)
    check(found, expect(exact, gated), dtype, TENSOR_CORES_FP8 if device.type == "cuda" else 0.0)
    if rows <= MOST_ROUNDED_ROWS:
        # A value between two of float8 may go to either, as the quotient of the scale is rounded differently.
        rounded = skinny_linear(x, weight, bias, weight_scales=weight_scales, gated=gated)
        error = (rounded.double() - found.double()).norm() / found.double().norm()
        assert float(error) < 2e-2


@pytest.mark.parametrize("rows", [1, 2])
def test_a_nan_stays_one_in_all_outputs_of_its_row(rows: int, device: torch.device) -> None:
    weight, scales = weights(48, 64, device)
    x = torch.randn(rows, 64, device=device)
    x[0, 40] = -float("nan")
    out = skinny_linear(x, weight, weight_scales=scales)
    assert out.isnan().all(1).tolist() == [True, False][:rows]
    x[0] = 0.0
    assert not skinny_linear(x, weight, weight_scales=scales)[0].any()


def test_the_same_product_has_the_same_bits_again_and_the_counters_are_zero_after_it(device: torch.device) -> None:
    x, weight = torch.randn(3, 512, device=device).half(), torch.randn(40, 512, device=device).half()
    first = skinny_linear(x, weight)
    for _ in range(3):
        assert torch.equal(skinny_linear(x, weight), first)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    x, weight = torch.zeros(3, 64, device=device), torch.zeros(8, 64, device=device)
    values, small = x.to(FP8), weight.to(FP8)
    rows, outs = torch.ones(3, device=device), torch.ones(8, device=device)
    for error, match, call in (
        (ValueError, "skinny_linear takes", lambda: skinny_linear(x, weight[:, :7])),
        (ValueError, "at most 256 rows", lambda: skinny_linear(torch.zeros(MOST_ROWS + 1, 64, device=device), weight)),
        (ValueError, "and two for a gate", lambda: skinny_linear(x, weight[:7], gated=True)),
        (ValueError, "a value of each output", lambda: skinny_linear(x, weight, outs[:7])),
        (ValueError, "bias is .*contiguous", lambda: skinny_linear(x, weight, torch.ones(16, device=device)[::2])),
        (TypeError, "of one floating-point type", lambda: skinny_linear(x, weight.half())),
        (TypeError, "as the result is", lambda: skinny_linear(x, weight, dtype=torch.int32)),
        (TypeError, "with scales are float8", lambda: skinny_linear(x, weight, weight_scales=outs)),
        (
            TypeError,
            "of the weight's type with scales",
            lambda: skinny_linear(x, small, x_scales=rows, weight_scales=outs, dtype=x.dtype),
        ),
        (ValueError, "3 rows cannot be rounded", lambda: skinny_linear(x, small, weight_scales=outs)),
        (
            ValueError,
            "x_scales has one value for each of 3 rows",
            lambda: skinny_linear(values, small, x_scales=outs, weight_scales=outs, dtype=x.dtype),
        ),
    ):
        with pytest.raises(error, match=match):
            call()
