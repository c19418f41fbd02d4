"""Linear layers in four bits, in every build of the library that this processor runs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagewise_kernels.cpu.build import Variant
from pagewise_kernels.cpu.linear_int4 import Int4Weight

from tests.cpu_kernels import need_cpu_kernels
from tests.kernels.int4_layers import Parts, dequantised, drawn


def rounded(x: torch.Tensor, layer: Int4Weight) -> torch.Tensor:
    """The inputs in eight bits, with a scale for each group of slots, in float64."""
    filled = -(-x.shape[1] // layer.group) * layer.group
    slots = torch.arange(filled) if layer.order is None else layer.order.long()
    slots[slots >= x.shape[1]] = -1
    grouped = (x[:, slots] * (slots >= 0)).view(len(x), -1, layer.group)
    scales = grouped.abs().amax(dim=2, keepdim=True) / 127
    scales = torch.where(scales > 0, scales, 1.0)
    values = (grouped * (1 / scales)).round().double() * scales.double()
    found = torch.zeros_like(x, dtype=torch.float64)
    found[:, slots[slots >= 0]] = values.view(len(x), -1)[:, slots >= 0]
    return found


def check(parts: Parts, rows: int, biased: bool) -> Int4Weight:
    outs, ins = parts[0].shape
    x, bias = torch.randn(rows, ins + 3)[:, :ins], torch.randn(outs) if biased else None
    layer, weight = Int4Weight(*parts, bias), dequantised(*parts)
    added = 0 if bias is None else bias.double()
    for exact, inputs in ((True, x.double()), (False, rounded(x, layer))):
        found, expected = layer.linear(x, exact=exact), inputs @ weight.t() + added
        largest = float((inputs.abs() @ weight.abs().t()).max()) + 1
        assert float((found - expected).abs().max()) <= 1e-6 * largest
        for row in {0, rows // 2, rows - 1}:
            alone = layer.linear(x[row : row + 1], exact=exact)[0]
            assert torch.equal(alone, found[row]), "a row depends on the rows beside it"
    return layer


@settings(max_examples=40)
@given(
    rows=st.integers(1, 9), ins=st.integers(1, 300), outs=st.integers(1, 150), zeros=st.booleans(),
    group=st.sampled_from((16, 32, 48, 64, 128)), scattered=st.booleans(), biased=st.booleans(),
)  # fmt: skip
def test_a_linear_layer_is_a_product_of_codes_with_scales_and_zeros(
    rows: int, ins: int, outs: int, group: int, zeros: bool, scattered: bool, biased: bool
) -> None:
    need_cpu_kernels()
    check(drawn(outs, ins, group, zeros=zeros, scattered=scattered), rows, biased)


@pytest.mark.parametrize("outs", [1, 48, 64, 83])
@pytest.mark.parametrize(("group", "zeros"), [(32, True), (64, False), (64, True), (128, True)])
def test_every_build_computes_linear_layers(build: Variant, outs: int, group: int, zeros: bool) -> None:
    for rows, scattered in ((1, False), (7, True), (111, False)):
        layer = check(drawn(outs, 512, group, zeros=zeros, scattered=scattered), rows, biased=rows != 7)
        assert (layer.group, layer.order is None) == (group, not scattered)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def test_every_build_computes_numbers_in_e2m1(build: Variant) -> None:
    for rows, outs, ins in ((1, 64, 512), (7, 83, 90), (9, 83, 90), (111, 5, 16)):
        codes, unit = torch.randint(16, (outs, ins), dtype=torch.uint8), 0.003
        scales = torch.rand(outs, -(-ins // 16)).mul(448).to(torch.float8_e4m3fn).float() * unit
        of, x = torch.arange(ins) // 16, torch.randn(rows, ins)
        layer = Int4Weight(codes, scales, None, of, unit=unit)
        assert layer.num_bytes * 8 == (4 + 1) * layer.packed[..., 0].numel() * 8 * layer.packed.shape[-1]
        weight = E2M1[codes.int()] * scales.double()[:, of]
        for exact, inputs in ((True, x.double()), (False, rounded(x, layer))):
            expected = inputs @ weight.t()
            largest = float((inputs.abs() @ weight.abs().t()).max())
            assert float((layer.linear(x, exact=exact) - expected).abs().max()) <= 1e-6 * largest


def test_the_largest_sums_of_numbers_in_e2m1_fit(build: Variant) -> None:
    for code, number in ((7, 6), (15, -6)):
        codes = torch.full((3, 64), code, dtype=torch.uint8)
        layer = Int4Weight(codes, torch.ones(3, 4), None, torch.arange(64) // 16, unit=1.0)
        for sign in (1, -1):
            assert torch.equal(layer.linear(torch.full((5, 64), 0.5 * sign)), torch.full((5, 3), 32.0 * sign * number))


def test_the_largest_sums_of_every_build_fit(build: Variant) -> None:
    for code, zero in ((15, 0), (0, 16)):
        parts = torch.full((3, 256), code), torch.ones(3, 2), torch.full((3, 2), zero)
        layer = Int4Weight(parts[0].byte(), parts[1], parts[2].byte(), torch.arange(256) // 128)
        for sign in (1, -1):
            x = torch.full((5, 256), 0.5 * sign)
            assert torch.equal(layer.linear(x), torch.full((5, 3), 128.0 * sign * (code - zero)))


def test_zeros_stay_zeros_and_what_is_no_number_spoils_its_own_row_alone(build: Variant) -> None:
    layer = Int4Weight(*drawn(7, 40, 32, zeros=True, scattered=False))
    x = torch.randn(5, 40)
    before = layer.linear(x)
    x[1, 39], x[2, 0], x[3] = torch.nan, torch.inf, 0
    found = layer.linear(x)
    assert found.isfinite().all(dim=1).tolist() == [True, False, False, True, True]
    assert torch.equal(found[[0, 4]], before[[0, 4]])
    assert not found[3].any()
    assert layer.linear(x[:0]).shape == (0, 7)


@pytest.mark.parametrize(("kind", "least"), [(torch.float16, -24), (torch.bfloat16, -34)])
def test_scales_of_16_bits_keep_their_values(build: Variant, kind: torch.dtype, least: int) -> None:
    """The smallest one of float16 too, and of bfloat16 those down to 2^-30 of the largest, which is 1/16 here."""
    codes, scales = (
        torch.full((40, 32), 9, dtype=torch.uint8),
        (torch.rand(40, 1) + 1) * 2.0 ** torch.arange(-44, -4)[:, None],
    )
    scales = scales.to(kind).float() * (scales >= 2.0**least)
    layer = Int4Weight(codes, scales, None, torch.zeros(32, dtype=torch.int64))
    x = torch.zeros(1, 32)
    x[0, 3] = 1
    assert torch.equal(layer.linear(x, exact=True)[0], scales[:, 0])


def test_weights_take_little_more_than_four_bits() -> None:
    need_cpu_kernels()
    for group, zeros, bits in ((32, False, 4.5), (64, False, 4.25), (64, True, 4.375), (128, True, 4.1875)):
        layer = Int4Weight(*drawn(128, 512, group, zeros=zeros, scattered=True))
        assert layer.num_bytes * 8 == bits * 128 * 512


def test_groups_of_other_sizes_take_slots_of_smaller_ones() -> None:
    """Empty slots cost less than scales for few slots: 100 and 28 inputs have a scale for 128 slots or 32."""
    need_cpu_kernels()
    whole = Int4Weight(*drawn(5, 96, 96, zeros=True, scattered=False))
    assert (whole.group, whole.order) == (32, None)
    codes, scales, zeros, _ = drawn(5, 128, 64, zeros=True, scattered=False)
    uneven = check((codes, scales, zeros, (torch.arange(128) >= 100).long()), 3, biased=True)
    assert uneven.order is not None
    assert sorted(uneven.order.tolist()) == [-1] * (len(uneven.order) - 128) + list(range(128))


def test_what_does_not_fit_is_refused() -> None:
    need_cpu_kernels()
    codes, scales, zeros, group_of = drawn(2, 64, 32, zeros=True, scattered=False)
    for wrong, error, why in (
        ((codes.int(), scales, zeros, group_of), TypeError, "codes uint8"),
        ((codes, scales.half(), zeros, group_of), TypeError, "scales float32"),
        ((codes, scales[:1], zeros, group_of), ValueError, "do not fit together"),
        ((codes, scales, zeros[:, :1] if zeros is not None else None, group_of), ValueError, "do not fit together"),
        ((codes, scales, zeros, group_of[1:]), ValueError, "do not fit together"),
        ((codes, scales, zeros, group_of + 1), ValueError, "of group 1 or 2 of 2"),
        ((codes, scales / 0, zeros, group_of), ValueError, "not finite"),
    ):
        with pytest.raises(error, match=why):
            Int4Weight(*wrong)
    layer = Int4Weight(codes, scales, zeros, group_of)
    with pytest.raises(ValueError, match="rows of 64"):
        layer.linear(torch.zeros(1, 63))
    with pytest.raises(TypeError, match="float32"):
        layer.linear(torch.zeros(1, 64).double())
