"""Mixtures of experts against an oracle in float64, whatever tokens choose."""

from typing import Any

import pytest
import torch
from pagewise_kernels.experts import choose_experts, sum_of_experts

from tests.kernels import oracles

TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}
"""Errors of results in each type, relative to the largest of all; they are rounded five times."""
# Tokens, experts, experts of a token, hidden, inner: of each tile of pairs; sizes of whole tiles and of cut ones.
SHAPES: list[Any] = [(1, 4, 2, 64, 32), (7, 6, 3, 40, 20), (20, 18, 4, 32, 16), (70, 4, 2, 48, 40), (200, 3, 2, 40, 24)]
REAL: list[Any] = [
    pytest.param((tokens, *shape), marks=pytest.mark.gpu)
    for tokens in (1, 3, 64, 300, 2000)
    for shape in ((128, 8, 2048, 768), (8, 2, 4096, 1792), (60, 4, 2048, 1408))
]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [*SHAPES, *REAL])
def test_experts_compute_what_the_oracle_does(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x, gate_up, down = oracles.drawn_experts(shape, dtype, device)
    tokens, experts, top_k, _, _ = shape
    weights, chosen = choose_experts(torch.randn(tokens, experts, device=device).to(dtype), top_k, normalise=True)
    found, expected = (
        sum_of_experts(x, gate_up, down, chosen, weights),
        oracles.sum_of_experts(x, gate_up, down, chosen, weights),
    )
    assert found.dtype == dtype
    assert float((found.double() - expected).abs().max() / expected.abs().max()) <= TOLERANCE[dtype]
    assert torch.equal(sum_of_experts(x, gate_up, down, chosen, weights), found), "the order of sums is one"


@pytest.mark.parametrize("tokens", [1, 16, 17, 90])
def test_all_tokens_may_choose_the_same_experts(tokens: int, device: torch.device) -> None:
    x, gate_up, down = oracles.drawn_experts((tokens, 5, 2, 32, 32), torch.float32, device)
    chosen = torch.tensor([[4, 0]], dtype=torch.int32, device=device).repeat(tokens, 1)
    weights = torch.rand(tokens, 2, device=device)
    expected = oracles.sum_of_experts(x, gate_up, down, chosen, weights)
    found = sum_of_experts(x, gate_up, down, chosen, weights)
    assert float((found.double() - expected).abs().max() / expected.abs().max()) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (60, 4), (8, 2), (3, 3), (1, 1)])
def test_the_experts_with_the_largest_logits_are_chosen(
    experts: int, top_k: int, normalise: bool, device: torch.device
) -> None:
    logits = torch.randn(9, experts, device=device).half()
    logits[0] = 0.5  # of equal ones the first
    weights, chosen = choose_experts(logits, top_k, normalise=normalise, dtype=torch.float32)
    wanted = logits.float().sort(dim=-1, descending=True, stable=True)
    assert chosen.tolist() == wanted.indices[:, :top_k].tolist()
    shares = torch.softmax(logits.float(), dim=-1).gather(1, chosen.long())
    torch.testing.assert_close(weights, shares / shares.sum(dim=-1, keepdim=True) if normalise else shares)


def test_a_token_that_is_no_number_leaves_the_others_as_they_are(device: torch.device) -> None:
    x, gate_up, down = oracles.drawn_experts((3, 4, 2, 32, 32), torch.float32, device)
    logits = torch.randn(3, 4, device=device)
    weights, chosen = choose_experts(logits, 2, normalise=True)
    alone = sum_of_experts(x, gate_up, down, chosen, weights)
    x[1], logits[1] = float("nan"), float("nan")
    weights, chosen = choose_experts(logits, 2, normalise=True)
    assert set(chosen.flatten().tolist()) <= set(range(4))
    found = sum_of_experts(x, gate_up, down, chosen, weights)
    assert found[1].isnan().all()
    torch.testing.assert_close(found[[0, 2]], alone[[0, 2]])


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    x, gate_up, down = oracles.drawn_experts((3, 4, 2, 32, 16), torch.float32, device)
    chosen, weights = torch.zeros(3, 2, dtype=torch.int32, device=device), torch.zeros(3, 2, device=device)
    for error, match, call in (
        (ValueError, "5 experts cannot be chosen", lambda: choose_experts(x[:, :4], 5, normalise=True)),
        (ValueError, "does not fit", lambda: sum_of_experts(x, gate_up[:, :31], down, chosen, weights)),
        (ValueError, "do not fit 3 rows", lambda: sum_of_experts(x, gate_up, down, chosen[:2], weights)),
        (ValueError, "do not fit 3 rows", lambda: sum_of_experts(x, gate_up, down, chosen, weights[:, :1])),
        (ValueError, "are contiguous", lambda: sum_of_experts(x, gate_up, down.mT.contiguous().mT, chosen, weights)),
        (TypeError, "experts int32", lambda: sum_of_experts(x, gate_up, down, chosen.long(), weights)),
        (TypeError, "of one floating-point type", lambda: sum_of_experts(x.half(), gate_up, down, chosen, weights)),
    ):
        with pytest.raises(error, match=match):
            call()
