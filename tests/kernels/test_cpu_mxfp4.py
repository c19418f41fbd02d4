"""Experts in MXFP4 in C against an oracle in float64, in every build of the library that this processor runs."""

import pytest
import torch
from pagewise_kernels.cpu.mxfp4_experts import PackedMxfp4Experts

from tests.kernels.mxfp4_layers import ALPHA, LIMIT, SHAPES, TOLERANCE, drawn_layer, error, oracle

pytestmark = pytest.mark.usefixtures("build")

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", SHAPES)
def test_operations_in_c_compute_what_the_oracle_does(shape: tuple[int, ...]) -> None:
    x, gate_up, down, chosen, weights = drawn_layer(shape, torch.float32, CPU)
    packed = PackedMxfp4Experts(gate_up, down, LIMIT, ALPHA)
    expected = oracle(x, gate_up, down, chosen, weights)
    for choice in (chosen, chosen.int()):
        assert error(packed.sums(x, choice, weights), expected) <= TOLERANCE[torch.float32]


def test_a_token_has_the_same_sum_with_other_tokens_beside_it() -> None:
    x, gate_up, down, chosen, weights = drawn_layer((130, 5, 2, 96, 64), torch.float32, CPU)
    packed = PackedMxfp4Experts(gate_up, down, LIMIT, ALPHA)
    together = packed.sums(x, chosen, weights)
    for token in (0, 64, 129):
        alone = packed.sums(x[token : token + 1], chosen[token : token + 1], weights[token : token + 1])
        assert torch.equal(alone[0], together[token])


def test_a_token_that_is_no_number_leaves_the_others_as_they_are() -> None:
    x, gate_up, down, chosen, weights = drawn_layer((3, 4, 2, 96, 64), torch.float32, CPU)
    packed = PackedMxfp4Experts(gate_up, down, LIMIT, ALPHA)
    before = packed.sums(x, chosen, weights)
    x[1] = float("nan")
    found = packed.sums(x, chosen, weights)
    assert torch.equal(found[::2], before[::2])
    assert found[1].isnan().all()


def test_what_does_not_fit_the_operations_in_c_is_refused() -> None:
    x, gate_up, down, chosen, weights = drawn_layer((3, 4, 2, 96, 64), torch.float32, CPU)
    packed = PackedMxfp4Experts(gate_up, down, LIMIT, ALPHA)
    for wrong in (4, -1, -2):
        with pytest.raises(ValueError, match="not among the 4"):
            packed.sums(x, torch.full_like(chosen, wrong), weights)
    with pytest.raises(ValueError, match=r"of 3 tokens are \[tokens, k\]"):
        packed.sums(x, chosen[:2], weights)
    with pytest.raises(TypeError, match="float32"):
        packed.sums(x.bfloat16(), chosen, weights)
    with pytest.raises(ValueError, match="experts in MXFP4 with 96 inputs and 128 outputs"):
        PackedMxfp4Experts(gate_up._replace(scales=gate_up.scales[:, 1:]), down, LIMIT, ALPHA)
    with pytest.raises(TypeError, match="codes and scales uint8"):
        PackedMxfp4Experts(gate_up._replace(scales=gate_up.scales.int()), down, LIMIT, ALPHA)
    with pytest.raises(ValueError, match="are contiguous"):
        PackedMxfp4Experts(gate_up, down._replace(bias=torch.randn(96, 4).t()), LIMIT, ALPHA)
