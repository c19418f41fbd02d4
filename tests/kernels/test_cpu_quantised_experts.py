"""Experts in four and eight bits in C against linear layers, in every build of the library that this processor runs."""

import pytest
import torch
from pagewise_kernels.cpu.experts import SILU, Activation
from pagewise_kernels.cpu.linear_grouped import GroupedWeight
from pagewise_kernels.cpu.linear_int4 import Int4Weight
from pagewise_kernels.cpu.quantised_experts import GroupedParts, Int4Parts, Parts, QuantisedExperts

from tests.kernels.grouped_layers import FORMS, Drawn
from tests.kernels.int4_layers import drawn

pytestmark = pytest.mark.usefixtures("build")


Halves = tuple[list[Parts], list[Parts]]


def drawn_layer(experts: int, hidden: int, inner: int, group: int, *, biased: bool) -> Halves:
    """Gate and up, and down, in four bits. Every other expert has groups of inputs that are no neighbours."""

    def parts(outs: int, ins: int, expert: int) -> Parts:
        bias = torch.randn(outs) if biased else None
        return Int4Parts(*drawn(outs, ins, group, zeros=expert != 1, scattered=expert % 2 == 1), bias)

    numbers = range(experts)
    return [parts(2 * inner, hidden, one) for one in numbers], [parts(hidden, inner, one) for one in numbers]


def drawn_in_forms(experts: int, hidden: int, inner: int, *, biased: bool) -> Halves:
    """Gate and up, and down, in four bits and in all forms with scales in two steps, in turns."""

    def parts(outs: int, ins: int, number: int) -> Parts:
        bias, form = torch.randn(outs) if biased else None, (None, *FORMS)[number % (1 + len(FORMS))]
        if form is None:
            return Int4Parts(*drawn(outs, ins, 32, zeros=True, scattered=False), bias)
        one = Drawn(form, outs, ins // (form.group * max(1, form.span)))
        return GroupedParts(
            one.codes, form.bits, form.zero, one.scales, one.steps, one.leasts, one.least_steps, bias
        )  # fmt: skip

    numbers = range(experts)
    return [parts(2 * inner, hidden, one) for one in numbers], [parts(hidden, inner, one + 1) for one in numbers]


def linear(parts: Parts, x: torch.Tensor, *, exact: bool) -> torch.Tensor:
    """The linear layer alone."""
    weight = Int4Weight(*parts) if isinstance(parts, Int4Parts) else GroupedWeight(*parts)
    return weight.linear(x.contiguous(), exact=exact)


def expected(
    x: torch.Tensor, halves: Halves, chosen: torch.Tensor, weights: torch.Tensor, activation: Activation,
    *, exact: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The weighted sums, from linear layers one after the other."""
    found, (alpha, shift, limit) = torch.zeros(len(x), x.shape[1], dtype=torch.float64), activation
    for expert, (first, second) in enumerate(zip(*halves, strict=True)):
        tokens, place = (chosen == expert).nonzero(as_tuple=True)
        gate, up = linear(first, x[tokens], exact=exact).chunk(2, dim=1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        outs = linear(second, gate * torch.sigmoid(alpha * gate) * (up + shift), exact=exact).double()
        found.index_add_(0, tokens, outs * weights[tokens, place, None].double())
    return found


@pytest.mark.parametrize(
    ("tokens", "experts", "hidden", "inner", "group", "biased"),
    [
        (1, 4, 64, 32, 32, False), (7, 6, 96, 160, 32, True), (70, 3, 128, 83, 64, False), (0, 2, 64, 32, 32, False),
        (40, 6, 256, 512, 0, True), (3, 6, 512, 256, 0, False),
    ],
)  # fmt: skip
def test_experts_compute_what_linear_layers_do(
    tokens: int, experts: int, hidden: int, inner: int, group: int, biased: bool
) -> None:
    if group:
        halves = drawn_layer(experts, hidden, inner, group, biased=biased)
    else:
        halves = drawn_in_forms(experts, hidden, inner, biased=biased)
    activation = Activation(1.702, 1.0, 1.5) if biased else SILU
    layer = QuantisedExperts(*halves, activation)
    x = torch.randn(tokens, hidden + 5)[:, :hidden]
    chosen = torch.rand(tokens, experts).argsort(dim=1)[:, :2].contiguous()
    weights = torch.rand(tokens, 2)
    found, wanted = layer.sums(x, chosen, weights), expected(x, halves, chosen, weights, activation)
    # An activated number that lies between two of eight bits may go to either.
    assert tokens == 0 or float((found - wanted).abs().max() / wanted.abs().max()) < 2e-3
    assert torch.equal(layer.sums(x[:1], chosen[:1], weights[:1]), found[:1]), "a token depends on others"
    layer.exact = True
    exact = expected(x, halves, chosen, weights, activation, exact=True)
    assert tokens == 0 or float((layer.sums(x, chosen, weights) - exact).abs().max() / exact.abs().max()) < 1e-5
    layer.exact = False
    if tokens > 1:
        x[1] = torch.nan
        again = layer.sums(x, chosen, weights)
        assert again[1].isnan().all()
        assert torch.equal(again[::2], found[::2])


def test_what_does_not_fit_is_refused() -> None:
    gate_up, down = drawn_layer(3, 64, 32, 32, biased=False)
    layer = QuantisedExperts(gate_up, down)
    assert layer.num_weights == layer.in_four_bits == 3 * 3 * 64 * 32
    in_forms = QuantisedExperts(*drawn_in_forms(2, 256, 256, biased=False))  # down of one expert has eight bits
    assert in_forms.in_four_bits == 5 * 256 * 256
    for wrong in (3, -1):
        with pytest.raises(ValueError, match="not among the 3"):
            layer.sums(torch.zeros(2, 64), torch.full((2, 1), wrong), torch.ones(2, 1))
    with pytest.raises(ValueError, match="do not fit together"):
        QuantisedExperts(down, gate_up)
    for half in (gate_up, down):
        parts = half[1]
        half[1] = parts._replace(bias=torch.ones(len(parts.codes) - 1))
        with pytest.raises(ValueError, match="bias"):
            QuantisedExperts(gate_up, down)
        half[1] = parts
