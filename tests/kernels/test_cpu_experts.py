"""Mixtures of experts in C against oracles in float64, in every build of the library that this processor runs."""

import pytest
import torch
from pagewise_kernels.cpu.experts import Activation, Choice, Mixture, PackedExperts, Router
from pagewise_kernels.cpu.operations import rms_norm

from tests.kernels import oracles

pytestmark = pytest.mark.usefixtures("build")

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


def test_experts_have_biases_and_a_limit_of_activations() -> None:
    x, gate_up, down = oracles.drawn_experts((9, 5, 2, 70, 37), torch.float32, CPU)
    biases = torch.randn(5, 74), torch.randn(5, 70)
    chosen, weights = chosen_by(9, 5, 2)
    expected = torch.zeros(9, 70, dtype=torch.float64)
    for token, slot in torch.cartesian_prod(torch.arange(9), torch.arange(2)).tolist():
        expert = int(chosen[token, slot])
        gate, up = (gate_up[expert].double() @ x[token].double() + biases[0][expert]).chunk(2)
        gate, up = gate.clamp(max=0.7), up.clamp(-0.7, 0.7)
        made = down[expert].double() @ (gate * torch.sigmoid(1.7 * gate) * (up + 1)) + biases[1][expert]
        expected[token] += weights[token, slot] * made
    found = PackedExperts(gate_up, down, *biases, Activation(1.7, 1.0, 0.7)).sums(x, chosen, weights)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-4)


def choices(experts: int, top_k: int) -> list[Choice]:
    correction = torch.randn(experts) / 4
    return [
        Choice(top_k), Choice(top_k, normalise=False), Choice(top_k, True, 2.5, correction),
        Choice(top_k, False, 1.0, correction, 4, 2),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 64, 8), (3, 60, 5), (300, 128, 8), (5, 8, 1), (0, 8, 2)])
def test_a_router_chooses_what_the_oracle_does(tokens: int, experts: int, top_k: int, number: int) -> None:
    torch.manual_seed(0)  # of numbers without near ties
    choice = choices(experts, top_k)[number]
    x, weight, bias = torch.randn(tokens, 40), torch.randn(experts, 40) / 4, torch.randn(experts)
    logits, weights, chosen = Router(weight, bias, choice).choose(x)
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(logits.double(), expected, atol=1e-5, rtol=1e-4)
    scores = torch.softmax(expected, 1) if choice.correction is None else torch.sigmoid(expected)
    for_choice = scores if choice.correction is None else scores + choice.correction
    if choice.groups > 1:
        groups = for_choice.view(tokens, choice.groups, experts // choice.groups)
        best = groups.topk(2).values.sum(-1).topk(choice.top_groups).indices
        others = torch.ones(groups.shape[:2], dtype=torch.bool).scatter(1, best, False)
        for_choice = groups.masked_fill(others[..., None], -9)
    wanted = for_choice.reshape(tokens, experts).topk(top_k).indices
    assert torch.equal(chosen, wanted)
    shares = scores.gather(1, wanted)
    shares = choice.scale * (shares / shares.sum(1, keepdim=True) if choice.normalise else shares)
    torch.testing.assert_close(weights.double(), shares, atol=1e-6, rtol=1e-5)


def test_equal_experts_are_chosen_in_order_and_a_token_that_is_no_number_chooses_some() -> None:
    x = torch.ones(2, 16)
    x[1] = float("nan")
    for choice in choices(12, 3):
        constant = choice._replace(correction=None if choice.correction is None else torch.zeros(12))
        _, weights, chosen = Router(torch.zeros(12, 16), None, constant).choose(x)
        assert chosen[0].tolist() == [0, 1, 2]
        assert bool(((chosen[1] >= 0) & (chosen[1] < 12)).all())
        assert weights[1].isnan().all()


@pytest.mark.parametrize("tokens", [1, 37])
def test_a_mixture_is_its_norm_its_router_and_its_experts(tokens: int) -> None:
    x, gate_up, down = oracles.drawn_experts((tokens, 12, 3, 72, 40), torch.float32, CPU)
    router, experts = Router(torch.randn(12, 72), None, Choice(3)), PackedExperts(gate_up, down)
    mixture, norm, residual = Mixture(router, experts), torch.randn(72), torch.randn(tokens, 72)
    _, weights, chosen = router.choose(x)
    assert torch.equal(mixture.sums(x), experts.sums(x, chosen, weights))
    sums = residual.clone()
    normed = rms_norm(x, norm, 1e-6, sums)
    _, weights, chosen = router.choose(normed)
    assert torch.equal(mixture.sums(x, norm, 1e-6, residual), experts.sums(normed, chosen, weights))
    assert torch.equal(residual, sums)


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
    with pytest.raises(ValueError, match="biases"):
        PackedExperts(gate_up, down, torch.zeros(4, 32), torch.zeros(4, 32))
    for wrong_choice in (Choice(5), Choice(0), Choice(2, groups=2), Choice(3, True, 1.0, torch.zeros(4), 2, 1)):
        with pytest.raises(ValueError, match="4 experts cannot choose"):
            Router(torch.zeros(4, 32), None, wrong_choice)
    with pytest.raises(ValueError, match=r"a router of \[experts, hidden\]"):
        Mixture(Router(torch.zeros(5, 32), None, Choice(2)), packed)
