"""Linear layers in eight bits, in every build of the library that this processor runs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagewise_kernels.cpu import linear_int8
from pagewise_kernels.cpu.build import Variant
from pagewise_kernels.cpu.linear_int8 import MAX_INPUTS, Int8Weight

from tests.cpu_kernels import need_cpu_kernels


def oracle(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of both sides rounded to whole numbers from -127 to 127, in float64."""
    scales = [side.abs().amax(dim=1) / 127 for side in (x, weight)]
    rows, columns = (torch.where(scale > 0, scale, 1.0) for scale in scales)
    left, right = (x * (1 / rows)[:, None]).round(), (weight / columns[:, None]).round()
    product = (left.double() @ right.double().t()) * (rows[:, None].double() * columns.double())
    return product if bias is None else product + bias.double()


def check(rows: int, ins: int, outs: int, biased: bool) -> torch.Tensor:
    torch.manual_seed(rows + ins + outs)
    x, weight = torch.randn(rows, ins + 3)[:, :ins], torch.randn(outs, ins)
    bias = torch.randn(outs) if biased else None
    layer = Int8Weight(weight, bias)
    found = layer.linear(x)
    torch.testing.assert_close(found.double(), oracle(x, weight, bias), rtol=1e-5, atol=1e-5)
    # Within the rounding errors of both sides of the exact product.
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    assert float((found - exact).abs().max()) < 0.1 * ins**0.5 + 1e-5
    for row in range(rows):
        assert torch.equal(layer.linear(x[row : row + 1])[0], found[row]), "a row depends on the rows beside it"
    return found


@settings(max_examples=40)
@given(rows=st.integers(1, 30), ins=st.integers(1, 70) | st.just(2100), outs=st.integers(1, 200), biased=st.booleans())
def test_a_linear_layer_is_a_product_of_rounded_sides(rows: int, ins: int, outs: int, biased: bool) -> None:
    need_cpu_kernels()
    check(rows, ins, outs, biased)


@pytest.mark.parametrize("outs", [1, 16, 32, 48, 64, 83, 129])
def test_every_build_computes_linear_layers(build: Variant, outs: int) -> None:
    for rows in (1, 7, 100):
        check(rows, 1100, outs, biased=rows != 7)


def test_all_builds_compute_the_same_bits(build: Variant) -> None:
    found = check(5, 131, 70, biased=True)
    if not _FIRST:
        _FIRST.append(found)
    assert torch.equal(found, _FIRST[0])


_FIRST: list[torch.Tensor] = []


def test_weights_that_are_int8_already_keep_their_scales() -> None:
    need_cpu_kernels()
    values = torch.randint(-128, 128, (70, 131), dtype=torch.int8)
    values[3] = -128
    scales, bias, x = torch.rand(70) + 0.1, torch.randn(70), torch.randn(5, 131)
    found = Int8Weight(values, bias, scales).linear(x)
    rows = x.abs().amax(dim=1) / 127
    product = (x * (1 / rows)[:, None]).round().double() @ values.double().t()
    expected = product * (rows[:, None].double() * scales.double()) + bias
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    with pytest.raises(TypeError, match=r"weights are torch\.int8"):
        Int8Weight(values.float(), bias, scales)


def test_extremes(build: Variant) -> None:
    """The largest possible sums fit; zeros stay zeros, and NaN makes NaN in its own row alone."""
    ones = torch.ones(3, MAX_INPUTS)
    torch.testing.assert_close(Int8Weight(-ones).linear(ones), torch.full((3, 3), -float(MAX_INPUTS)))
    weight = torch.randn(7, 40)
    weight[3] = 0
    x = torch.randn(5, 40)
    x[1, 39], x[2, 0], x[3] = torch.nan, torch.inf, 0
    found = Int8Weight(weight).linear(x)
    assert found.isfinite().all(dim=1).tolist() == [True, False, False, True, True]
    assert not found[3].any()
    assert not found[[0, 4], 3].any()
    torch.testing.assert_close(found[[0, 4]].double(), oracle(x[[0, 4]], weight, None), rtol=1e-5, atol=1e-5)
    assert Int8Weight(weight).linear(x[:0]).shape == (0, 7)


def test_weights_that_are_rounded_in_pieces_are_rounded_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    need_cpu_kernels()
    weight = torch.randn(100, 31).t()  # as the weights of Conv1D are laid out
    whole = Int8Weight(weight)
    monkeypatch.setattr(linear_int8, "_AT_ONCE", 700)
    pieces = Int8Weight(weight)
    for name in ("packed", "scales", "offsets"):
        assert torch.equal(getattr(whole, name), getattr(pieces, name))
    scales = weight.abs().amax(dim=1, keepdim=True) / 127
    error = float((weight - (weight / scales).round() * scales).square().sum())
    for one in (whole, pieces):
        assert (one.squared_error, one.squares) == pytest.approx((error, float(weight.square().sum())), rel=1e-4)
    assert Int8Weight(torch.zeros(3, 5)).squared_error == 0


def test_what_does_not_fit_is_refused() -> None:
    need_cpu_kernels()
    with pytest.raises(ValueError, match="too many"):
        Int8Weight(torch.zeros(1, MAX_INPUTS + 1))
    with pytest.raises(TypeError, match="float32"):
        Int8Weight(torch.zeros(2, 2).half())
    layer = Int8Weight(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="rows of 3"):
        layer.linear(torch.zeros(1, 4))
    with pytest.raises(TypeError, match="float32"):
        layer.linear(torch.zeros(1, 3).double())
