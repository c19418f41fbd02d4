"""Linear layers with scales in two steps, in every build of the library that this processor runs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagewise_kernels.cpu.build import Variant
from pagewise_kernels.cpu.linear_grouped import GroupedWeight

from tests.cpu_kernels import need_cpu_kernels
from tests.kernels.grouped_layers import FORMS, Drawn, Form


def rounded(x: torch.Tensor, group: int) -> torch.Tensor:
    """The inputs in eight bits, with a scale for each group of a row, in float64."""
    grouped = x.view(len(x), -1, group)
    scales = grouped.abs().amax(dim=2, keepdim=True) / 127
    scales = torch.where(scales > 0, scales, 1.0)
    return ((grouped * (1 / scales)).round().double() * scales.double()).view(x.shape)


def check(form: Form, rows: int, outs: int, spans: int, biased: bool) -> None:
    drawn = Drawn(form, outs, spans)
    ins = drawn.codes.shape[1]
    x, bias = torch.randn(rows, ins + 3)[:, :ins], torch.randn(outs) if biased else None
    layer, added = drawn.layer(bias), 0 if bias is None else bias.double()
    for exact, inputs in ((True, x.double()), (False, rounded(x, form.group))):
        found, expected = layer.linear(x, exact=exact), inputs @ drawn.weights.t() + added
        # A sum has the products with codes, and apart from these the ones with leasts.
        parts = drawn.weights.abs() + 2 * (
            0 if drawn.leasts is None else drawn._wide(drawn.leasts, drawn.least_steps).abs()
        )
        assert float((found - expected).abs().max()) <= 1e-6 * (float((inputs.abs() @ parts.t()).max()) + 1)
        for row in {0, rows // 2, rows - 1}:
            alone = layer.linear(x[row : row + 1], exact=exact)[0]
            assert torch.equal(alone, found[row]), "a row depends on the rows beside it"


@settings(max_examples=25)
@given(
    form=st.sampled_from(FORMS), rows=st.integers(1, 9), outs=st.integers(1, 150), spans=st.integers(1, 3),
    biased=st.booleans(),
)  # fmt: skip
def test_a_linear_layer_is_a_product_of_codes_with_scales_in_two_steps(
    form: Form, rows: int, outs: int, spans: int, biased: bool
) -> None:
    need_cpu_kernels()
    check(form, rows, outs, spans, biased)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_build_computes_linear_layers(build: Variant, form: Form) -> None:
    for rows, outs in ((1, 64), (7, 83), (111, 3)):
        check(form, rows, outs, 2, biased=rows != 7)


def test_the_largest_sums_of_every_build_fit(build: Variant) -> None:
    for bits, code, zero in ((8, 255, 0), (8, 0, 128), (4, 15, 0)):
        layer = GroupedWeight(torch.full((3, 64), code).byte(), bits, zero, torch.ones(3, 2).half())
        for sign in (1, -1):
            assert torch.equal(
                layer.linear(torch.full((5, 64), 0.5 * sign)), torch.full((5, 3), 32.0 * sign * (code - zero))
            )


def test_unpacked_weights_are_those_of_float32_and_what_is_no_number_spoils_its_own_row_alone(build: Variant) -> None:
    drawn = Drawn(FORMS[0], 7, 1)
    layer = drawn.layer()
    expected = drawn._wide(drawn.scales, drawn.steps).float() * drawn.codes
    assert drawn.leasts is not None
    expected -= drawn._wide(drawn.leasts, drawn.least_steps).float()
    assert torch.equal(layer.linear(torch.eye(256), exact=True), expected.t())
    x = torch.randn(5, 256)
    before = layer.linear(x)
    x[1, 39], x[2, 0], x[3] = torch.nan, torch.inf, 0
    found = layer.linear(x)
    assert found.isfinite().all(dim=1).tolist() == [True, False, False, True, True]
    assert torch.equal(found[[0, 4]], before[[0, 4]])
    assert not found[3].any()
    assert layer.linear(x[:0]).shape == (0, 7)


@pytest.mark.parametrize(("form", "bits"), list(zip(FORMS, (4.625, 8.625, 8.5625, 8.5, 6), strict=True)))
def test_weights_take_little_more_than_their_codes(form: Form, bits: float) -> None:
    need_cpu_kernels()
    drawn = Drawn(form, 128, 1)
    assert drawn.layer().num_bytes * 8 == bits * drawn.codes.numel()


def test_what_does_not_fit_is_refused() -> None:
    need_cpu_kernels()
    codes, scales = torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 2).half()
    for wrong, error in (
        ((codes.int(), 8, 0, scales), TypeError),
        ((codes, 8, 0, scales.float()), TypeError),
        ((codes, 5, 0, scales), TypeError),
        ((codes, 8, 0, scales[:3]), ValueError),
        ((codes, 8, 0, scales, torch.ones(4, 3, dtype=torch.int8)), ValueError),
        ((codes, 8, 0, scales, None, scales[:, :1]), ValueError),
        ((codes, 8, 0, scales[:, :1]), ValueError),
        ((codes, 8, 128, scales, None, scales), ValueError),
    ):
        with pytest.raises(error):
            GroupedWeight(*wrong)
