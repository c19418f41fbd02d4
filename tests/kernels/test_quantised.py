"""Quantisation of inputs, and linear layers with weights in eight bits, against their oracles."""

from typing import Any

import pytest
import torch
from pagewise_kernels.kv_layer import FP8
from pagewise_kernels.quantised import MOST, computable, quantise_rows, scaled_linear

from tests.kernels import oracles

REAL = [pytest.param(True, marks=pytest.mark.gpu), False]
TYPES = [FP8, torch.int8]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Errors of results in each type, relative to the largest of them."""


def weights(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Normal numbers, of which a few among millions exceed the type's range: float8 would make them NaN."""
    numbers = torch.randn(shape, device=device)
    if dtype == FP8:
        return (numbers * 100).clamp(-MOST[FP8], MOST[FP8]).to(FP8)
    return (numbers * 40).round().clamp(-128, 127).to(torch.int8)


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert float(error) <= TOLERANCE[found.dtype]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("group", [None, 32, 128])
@pytest.mark.parametrize("real", REAL)
def test_inputs_are_quantised_by_row_or_group(
    dtype: torch.dtype, group: int | None, real: bool, device: torch.device
) -> None:
    rows, size = (3000, 14336) if real else (5, 200)
    x = torch.randn(rows, size + 3, device=device, dtype=torch.bfloat16)[:, :size] * 30
    x[1] = 0.0
    x[2, 4] = 1e4
    values, scales = quantise_rows(x, dtype, group=group)
    assert values.dtype == dtype
    assert scales.shape == (rows, -(-size // (group or size)))
    spread = oracles.spread(scales, (1, group or size), x.shape)
    exact = (x.double() / spread).float()
    wanted = exact.to(FP8) if dtype == FP8 else exact.round().to(torch.int8)
    # The kernel divides in float32, so a value between two may go to either; float8 below 2^-6 is a multiple of 2^-9.
    torch.testing.assert_close(values.float(), wanted.float(), atol=1.0 if dtype == torch.int8 else 2**-9, rtol=0.13)
    assert float((values.float() != wanted.float()).float().mean()) < 0.02
    back = values.double() * spread
    errors = (back - x.double()).abs()
    assert bool((errors <= (spread * 0.501 if dtype == torch.int8 else x.double().abs() / 15 + spread / 500)).all())
    assert not values[1].float().any()  # CUDA has no ``any`` of float8
    assert bool((values[0].float().abs().amax() == MOST[dtype]).all())


def test_scales_are_rounded_up_to_powers_of_two(device: torch.device) -> None:
    x = torch.randn(6, 256, device=device) * 30
    x[0], x[1, 5], x[2, :128] = 0.0, float("nan"), 448 * 2**-3 / (1 + torch.arange(128, device=device))
    x[3, 128] = 448 * 2 * (1 + 2**-20)
    _, plain = quantise_rows(x, FP8, group=128)
    values, scales = quantise_rows(x, FP8, group=128, ue8m0=True)
    assert torch.equal(scales.isnan(), plain.isnan())
    mantissa, _ = torch.frexp(scales.nan_to_num(1.0))
    assert (mantissa == 0.5).all()
    assert ((plain <= scales) & (scales < 2 * plain) | plain.isnan()).all()
    assert (scales[2, 0], scales[3, 1]) == (2**-3, 4)
    back = values.double() * oracles.spread(scales, (1, 128), x.shape)
    errors, known = (back - x.double()).abs(), ~x.isnan() & ~x.isnan().any(dim=1, keepdim=True)
    allowed = x.double().abs() / 15 + oracles.spread(scales, (1, 128), x.shape) / 500
    assert (errors <= allowed)[known.expand_as(errors)].all()


# NumPy warns of it in the interpreter of Triton 3.7, and the int8 values are of no interest.
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("group", [None, 32, "static"])
def test_a_nan_stays_one_in_all_outputs(dtype: torch.dtype, group: Any, device: torch.device) -> None:
    """int8 has none, so its scale does, and the outputs of a broken layer are never taken for tokens."""
    x = torch.randn(4, 64, device=device)
    x[1, 40], x[2, 3], x[3] = float("nan"), -float("nan"), 0.0
    static = torch.ones(1, device=device) if group == "static" else None
    group = None if group == "static" else group
    values, scales = quantise_rows(x, dtype, group=group, static_scale=static)
    expected = x.view(4, -1, group or 64).isnan().any(2)
    assert torch.equal(scales.isnan(), expected)
    weight = weights((16, 64), dtype, device)
    ones = torch.ones(16, 64 // (group or 64), device=device)
    out = scaled_linear(values, scales, weight, ones, (1, group or 64), group=group, dtype=torch.float32)
    assert out.isnan().any(1).tolist() == out.isnan().all(1).tolist() == [False, True, True, False]


@pytest.mark.parametrize("dtype", TYPES)
def test_a_static_scale_cuts_off_what_is_larger(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.tensor([[1.0, -3.0, 1e6, -1e6], [0.0, 0.26, 100.0, 2.0]], device=device)
    values, scales = quantise_rows(x, dtype, static_scale=torch.tensor([0.5], device=device))
    assert scales.tolist() == [[0.5], [0.5]]
    most = MOST[dtype]
    small, large = (1.0, 127.0) if dtype == torch.int8 else (0.5, 192.0)
    assert values.float().tolist() == [[2.0, -6.0, most, -most], [0.0, small, large, 4.0]]


CASES: list[tuple[tuple[int, int, int], tuple[int, int] | None, int | None]] = [
    ((3, 80, 48), None, None),  # per output
    ((20, 33, 70), (33, 70), None),  # the whole weight
    ((5, 130, 200), (64, 64), 64),  # blocks that end in the middle
    ((17, 40, 96), (1, 32), None),  # groups of inputs of an output
    ((4, 70, 144), (6, 96), 32),  # blocks as a join or a shard makes them
]
LARGE: list[Any] = [
    pytest.param(((rows, 6144, 4096), block, block and 128), marks=pytest.mark.gpu)
    for rows in (1, 16, 50, 500)
    for block in (None, (128, 128))
]


@pytest.mark.parametrize("case", [*CASES, *LARGE])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("eight_bits", [True, False])
def test_linear_layers_with_weights_in_eight_bits(
    case: tuple[tuple[int, int, int], tuple[int, int] | None, int | None],
    dtype: torch.dtype,
    eight_bits: bool,
    device: torch.device,
) -> None:
    (rows, outs, ins), block, group = case
    block = (1, ins) if block is None else block
    weight = weights((outs, ins), dtype, device)
    scales = torch.rand(-(-outs // block[0]), -(-ins // block[1]), device=device) + 0.1
    result = torch.float32 if rows == 3 else torch.bfloat16
    bias = torch.randn(outs, device=device, dtype=result) * 100 if rows % 2 else None
    x = torch.randn(rows, ins, device=device, dtype=result)
    values, x_scales = quantise_rows(x, dtype, group=group) if eight_bits else (x, None)
    group = group if eight_bits else None
    found = scaled_linear(values, x_scales, weight, scales, block, bias, group=group, dtype=result)
    assert found.dtype == result
    check(found, oracles.scaled_linear(values, x_scales, weight, scales, block, bias, group))


@pytest.mark.parametrize("dtype", TYPES)
def test_sixteen_inputs_share_a_scale_where_inputs_are_not_quantised(dtype: torch.dtype, device: torch.device) -> None:
    weight, scales = weights((70, 144), dtype, device), torch.rand(12, 3, device=device) + 0.1
    x = torch.randn(4, 144, device=device, dtype=torch.bfloat16)
    found = scaled_linear(x, None, weight, scales, (6, 48))
    check(found, oracles.scaled_linear(x, None, weight, scales, (6, 48)))


def test_bits_of_float8_are_numbers() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    numbers = bits.view(FP8).float()
    found = e4m3_of(bits)
    assert torch.equal(found[~numbers.isnan()], numbers[~numbers.isnan()])


def e4m3_of(bits: torch.Tensor) -> torch.Tensor:
    """The kernel's values of ``bits``: products with the unit matrix."""
    weight = bits.view(FP8).view(16, 16)
    return scaled_linear(torch.eye(16), None, weight, torch.ones(16, 1), (1, 16)).T.flatten()


def test_what_does_not_fit_is_refused() -> None:
    x, weight, scales = torch.zeros(3, 64), torch.zeros(8, 64, dtype=torch.int8), torch.ones(8, 1)
    scaled_linear(x, None, weight, scales, (1, 64))
    with pytest.raises(TypeError, match="the result is"):
        scaled_linear(x.to(torch.int8), torch.ones(3, 1), weight, scales, (1, 64))
    with pytest.raises(ValueError, match=r"weights \[8, 64\] in blocks \[2, 64\] have scales in float32 \[4, 1\]"):
        scaled_linear(x, None, weight, scales, (2, 64))
    with pytest.raises(ValueError, match=r"contiguous rows, not torch\.float32 \[8, 4\] with strides \[1, 8\]"):
        scaled_linear(x, None, weight, torch.ones(4, 8).t(), (1, 16))
    with pytest.raises(ValueError, match=r"not torch\.bfloat16 \[8, 1\]"):
        scaled_linear(x, None, weight, scales.bfloat16(), (1, 64))
    with pytest.raises(ValueError, match=r"3 rows in groups of 64 have scales in float32 \[3, 1\]"):
        scaled_linear(x.to(torch.int8), torch.ones(2, 1), weight, scales, (1, 64), dtype=torch.float32)
    with pytest.raises(ValueError, match="multiples of 16"):
        scaled_linear(x, None, weight, torch.ones(8, 8), (1, 8))
    with pytest.raises(ValueError, match="multiples of 32"):
        scaled_linear(x.to(torch.int8), torch.ones(3, 1), weight, torch.ones(8, 4), (1, 16), dtype=torch.float32)
    with pytest.raises(ValueError, match="bias is"):
        scaled_linear(x, None, weight, scales, (1, 64), torch.zeros(16)[::2])
    with pytest.raises(TypeError, match="of the weight's type with scales"):
        scaled_linear(x.double(), None, weight, scales, (1, 64))
    with pytest.raises(TypeError, match=r"not torch\.float32 and torch\.float32"):
        scaled_linear(x, None, weight.float(), scales, (1, 64))
    with pytest.raises(ValueError, match="bias is"):
        scaled_linear(x, None, weight, scales, (1, 64), torch.zeros(7))
    with pytest.raises(TypeError, match="of floats"):
        quantise_rows(weight, torch.int8)
    with pytest.raises(ValueError, match="without groups"):
        quantise_rows(x, torch.int8, group=32, static_scale=torch.ones(1))
    assert computable(64, 64, quantised=True)
    assert computable(64, 16, 48, quantised=False)
    assert computable(64, 32, quantised=True)
    assert not computable(64, 16, quantised=True)
    assert not computable(96, 96, 48, quantised=True)
    assert not computable(64, 24, quantised=False)
    assert not computable(64, 64, 8, quantised=False)
