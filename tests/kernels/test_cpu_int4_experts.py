"""Experts in four bits in C against linear layers, in every build of the library that this processor runs."""

import pytest
import torch
from pagewise_kernels.cpu.experts import SILU, Activation
from pagewise_kernels.cpu.int4_experts import Int4Experts, Int4Parts
from pagewise_kernels.cpu.linear_experts import LinearExperts
from pagewise_kernels.cpu.linear_int4 import Int4Weight

from tests.kernels.int4_layers import drawn

pytestmark = pytest.mark.usefixtures("build")


def drawn_layer(
    experts: int, hidden: int, inner: int, group: int, *, biased: bool
) -> tuple[list[Int4Parts], list[Int4Parts]]:
    """Gate and up, and down. Every other expert has groups of inputs that are no neighbours."""

    def parts(outs: int, ins: int, expert: int) -> Int4Parts:
        bias = torch.randn(outs) if biased else None
        return Int4Parts(*drawn(outs, ins, group, zeros=expert != 1, scattered=expert % 2 == 1), bias)

    numbers = range(experts)
    return [parts(2 * inner, hidden, one) for one in numbers], [parts(hidden, inner, one) for one in numbers]


def expected(
    x: torch.Tensor, gate_up: list[Int4Parts], down: list[Int4Parts], chosen: torch.Tensor, weights: torch.Tensor,
    activation: Activation,
) -> torch.Tensor:  # fmt: skip
    """The weighted sums, from linear layers one after the other."""
    found, (alpha, shift, limit) = torch.zeros(len(x), x.shape[1], dtype=torch.float64), activation
    for expert, (first, second) in enumerate(zip(gate_up, down, strict=True)):
        tokens, place = (chosen == expert).nonzero(as_tuple=True)
        gate, up = Int4Weight(*first).linear(x[tokens].contiguous()).chunk(2, dim=1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        made = gate * torch.sigmoid(alpha * gate) * (up + shift)
        outs = Int4Weight(*second).linear(made.contiguous()).double()
        found.index_add_(0, tokens, outs * weights[tokens, place, None].double())
    return found


@pytest.mark.parametrize(
    ("tokens", "experts", "hidden", "inner", "group", "biased"),
    [(1, 4, 64, 32, 32, False), (7, 6, 96, 160, 32, True), (70, 3, 128, 83, 64, False), (0, 2, 64, 32, 32, False)],
)
def test_experts_compute_what_linear_layers_do(
    tokens: int, experts: int, hidden: int, inner: int, group: int, biased: bool
) -> None:
    gate_up, down = drawn_layer(experts, hidden, inner, group, biased=biased)
    activation = Activation(1.702, 1.0, 1.5) if biased else SILU
    layer = Int4Experts(gate_up, down, activation)
    x = torch.randn(tokens, hidden + 5)[:, :hidden]
    chosen = torch.rand(tokens, experts).argsort(dim=1)[:, :2].contiguous()
    weights = torch.rand(tokens, 2)
    found, wanted = layer.sums(x, chosen, weights), expected(x, gate_up, down, chosen, weights, activation)
    # An activated number that lies between two of eight bits may go to either.
    assert tokens == 0 or float((found - wanted).abs().max() / wanted.abs().max()) < 2e-3
    assert torch.equal(layer.sums(x[:1], chosen[:1], weights[:1]), found[:1]), "a token depends on others"
    if tokens > 1:
        x[1] = torch.nan
        again = layer.sums(x, chosen, weights)
        assert again[1].isnan().all()
        assert torch.equal(again[::2], found[::2])


def test_experts_of_two_products_each_compute_the_same() -> None:
    halves = drawn_layer(6, 96, 160, 32, biased=False)
    layer = LinearExperts(*([Int4Weight(*one) for one in half] for half in halves))
    x, chosen, weights = torch.randn(7, 96), torch.rand(7, 6).argsort(dim=1)[:, :2].contiguous(), torch.rand(7, 2)
    wanted = expected(x, *halves, chosen, weights, SILU)
    assert float((layer.sums(x, chosen, weights) - wanted).abs().max() / wanted.abs().max()) < 2e-3
    assert layer.in_four_bits == layer.num_weights
    with pytest.raises(ValueError, match="do not fit together"):
        LinearExperts([Int4Weight(*one) for one in halves[1]], [Int4Weight(*one) for one in halves[0]])


def test_what_does_not_fit_is_refused() -> None:
    gate_up, down = drawn_layer(3, 64, 32, 32, biased=False)
    layer = Int4Experts(gate_up, down)
    assert layer.num_weights == 3 * 3 * 64 * 32
    for wrong in (3, -1):
        with pytest.raises(ValueError, match="not among the 3"):
            layer.sums(torch.zeros(2, 64), torch.full((2, 1), wrong), torch.ones(2, 1))
    with pytest.raises(ValueError, match="do not fit together"):
        Int4Experts(down, gate_up)
