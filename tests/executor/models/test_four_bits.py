"""Weights of linear layers in four bits, before they are packed."""

import pytest
import torch
from pagewise_executor.models import four_bit_weight
from pagewise_executor.models.four_bit_weight import FourBitWeight, join_outputs, quantise


def drawn(outs: int, group_of: torch.Tensor, *, zeros: bool) -> FourBitWeight:
    shape = outs, int(group_of.max()) + 1
    codes = torch.randint(16, (outs, len(group_of)), dtype=torch.uint8)
    given = torch.randint(16, shape, dtype=torch.uint8) if zeros else None
    return FourBitWeight(codes, torch.rand(shape), given, group_of)


@pytest.mark.parametrize("zeros", [True, False])
def test_weights_are_cut_and_joined_with_their_scales(zeros: bool) -> None:
    weight = drawn(24, torch.arange(96)[torch.randperm(96)] // 32, zeros=zeros)
    exact = weight.dequantised()
    zero = 8 if weight.zeros is None else int(weight.zeros[5, weight.group_of[7]])
    assert exact[5, 7] == (int(weight.codes[5, 7]) - zero) * weight.scales[5, weight.group_of[7]]
    for start, stop in ((0, 12), (5, 24)):
        assert torch.equal(weight.rows(start, stop).dequantised(), exact[start:stop])
        assert torch.equal(weight.columns(start, stop).dequantised(), exact[:, start:stop])
    others = drawn(3, weight.group_of, zeros=True)
    joined = join_outputs([weight, others])
    assert joined is not None
    assert torch.equal(joined.dequantised(), torch.cat([exact, others.dequantised()]))
    assert join_outputs([weight, drawn(3, torch.arange(96) // 32, zeros=True)]) is None, (
        "their inputs are in other groups"
    )


@pytest.mark.parametrize("ins", [256, 70])
def test_weights_are_quantised_by_group_with_the_least_error_of_some_ranges(
    ins: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(50, ins)
    weight[3], weight[4], weight[5] = 0, weight[4].abs() + 1, 0.5
    made, error = quantise(weight)
    found = made.dequantised()
    assert error == pytest.approx(float((found - weight).square().sum()), rel=1e-5)
    assert error < 0.0079 * float(weight[6:].square().sum()) + 0.02 * float(weight[:6].square().sum())
    assert torch.equal(found[3], weight[3])
    assert torch.allclose(found[5], weight[5]), "zero and the only other value are codes"
    # From the least weight or zero to the largest, there are 15 steps.
    padded = torch.nn.functional.pad(weight, (0, -ins % 64)).view(50, -1, 64)
    steps = (padded.amax(dim=2).clamp(min=0) - padded.amin(dim=2).clamp(max=0)) / 15
    assert bool((made.scales <= steps.clamp(min=1e-9) * 1.001 + (steps == 0)).all())
    monkeypatch.setattr(four_bit_weight, "_AT_ONCE", 700)
    pieces, same = quantise(weight.t().contiguous().t())  # as the weights of Conv1D are laid out
    assert same == pytest.approx(error, rel=1e-5)
    for name in ("codes", "scales", "zeros"):
        assert torch.equal(getattr(pieces, name), getattr(made, name))
