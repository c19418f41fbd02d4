"""Mixtures of experts in C against an oracle in float64, whatever tokens choose."""

import pytest
import torch
from pagewise_kernels.cpu.experts import PackedExperts

from tests.kernels import oracles

CPU = torch.device("cpu")
# Tokens, experts, experts of a token, hidden, inner: whole and cut panels, more rows or inputs than a block has.
SHAPES = [
    (1, 4, 2, 64, 64),
    (0, 4, 2, 64, 32),
    (7, 6, 3, 40, 20),
    (5, 90, 8, 129, 65),
    (230, 2, 1, 33, 7),
    (3, 3, 3, 1100, 16),
]


def chosen_by(tokens: int, experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(tokens, experts).argsort(dim=1)[:, :top_k], torch.rand(tokens, top_k)


@pytest.mark.parametrize("shape", SHAPES)
def test_experts_compute_what_the_oracle_does(shape: tuple[int, ...]) -> None:
    x, gate_up, down = oracles.drawn_experts(shape, torch.float32, CPU)
    chosen, weights = chosen_by(*shape[:3])
    expected = oracles.sum_of_experts(x, gate_up, down, chosen, weights)
    packed = PackedExperts(gate_up, down)
    for choice in (chosen, chosen.int()):  # transformers' routers have both
        torch.testing.assert_close(packed.sums(x, choice, weights).double(), expected, atol=1e-5, rtol=1e-4)


def test_a_token_has_the_same_sum_with_other_tokens_beside_it() -> None:
    x, gate_up, down = oracles.drawn_experts((130, 5, 2, 96, 48), torch.float32, CPU)
    chosen, weights = chosen_by(130, 5, 2)
    packed = PackedExperts(gate_up, down)
    together = packed.sums(x, chosen, weights)
    for token in (0, 64, 129):
        alone = packed.sums(x[token : token + 1], chosen[token : token + 1], weights[token : token + 1])
        assert torch.equal(alone[0], together[token])


def test_a_token_that_is_no_number_leaves_the_others_as_they_are() -> None:
    x, gate_up, down = oracles.drawn_experts((3, 4, 2, 32, 32), torch.float32, CPU)
    chosen, weights = chosen_by(3, 4, 2)
    packed = PackedExperts(gate_up, down)
    before = packed.sums(x, chosen, weights)
    x[1] = float("nan")
    found = packed.sums(x, chosen, weights)
    assert torch.equal(found[::2], before[::2])
    assert found[1].isnan().all()


def test_what_does_not_fit_is_refused() -> None:
    x, gate_up, down = oracles.drawn_experts((3, 4, 2, 32, 32), torch.float32, CPU)
    packed = PackedExperts(gate_up, down)
    chosen, weights = chosen_by(3, 4, 2)
    for wrong in (4, -1):
        with pytest.raises(ValueError, match="not among the 4"):
            packed.sums(x, torch.full_like(chosen, wrong), weights)
    with pytest.raises(ValueError, match=r"of 3 tokens are \[tokens, k\]"):
        packed.sums(x, chosen[:2], weights)
    with pytest.raises(ValueError, match="rows of 32"):
        packed.sums(x[:, :31], chosen, weights)
    with pytest.raises(TypeError, match="float32"):
        packed.sums(x.bfloat16(), chosen, weights)
    with pytest.raises(ValueError, match="experts have gate and up"):
        PackedExperts(gate_up[:, 1:], down)
    with pytest.raises(TypeError, match="float32"):
        PackedExperts(gate_up.bfloat16(), down)
