"""The sampling kernels against the sampler of the CPU executor, token for token."""

import dataclasses
import random
from typing import Any

import pytest
import torch
from pagewise_executor.sampling.token_sampler import gumbel_noise
from pagewise_executor.sampling.token_sampler import sample_tokens as sample_in_torch
from pagewise_kernels.logprobs import token_logprobs
from pagewise_kernels.penalties import penalise
from pagewise_kernels.sampling import SamplingTensors, sample
from pagewise_shared.sampling import SamplingParams

KINDS = [
    {},
    {"temperature": 0.6},
    {"top_k": 5},
    {"top_k": 1},
    {"top_k": 10_000},
    {"top_p": 0.8},
    {"top_p": 0.01},
    {"top_k": 20, "top_p": 0.5, "temperature": 1.7},
    {"min_p": 0.1},
    {"min_p": 0.02, "top_k": 50, "top_p": 0.9},
]


def draw(
    logits: torch.Tensor, params: list[SamplingParams], seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(p, name) for p in params], dtype=dtype, device=logits.device)

    order = torch.randperm(len(params)).to(logits.device)  # parameters of a row may stand anywhere
    where = torch.empty_like(order)
    where[order] = torch.arange(len(params), device=logits.device)
    parameters = SamplingTensors(
        column("temperature", torch.float32)[order],
        column("top_k", torch.int32)[order],
        column("top_p", torch.float32)[order],
        column("min_p", torch.float32)[order],
        seeds[order],
    )
    return sample(logits, parameters, where.to(torch.int32), positions)


def check(vocab_size: int, rounds: int, device: torch.device, coarse: bool) -> None:
    rng = random.Random(vocab_size)
    for number in range(rounds):
        params = [SamplingParams(**({"temperature": 1.0} | rng.choice(KINDS))) for _ in range(5)]
        logits = 3 * torch.randn(5, vocab_size, device=device)
        if coarse:  # many entries are equal: ties go by index
            logits = (2 * logits).round() / 2
        seeds = torch.randint(-(2**62), 2**62, (5,), device=device)
        positions = torch.randint(0, 2**40 if number % 2 else 1000, (5,), device=device)
        expected = sample_in_torch(logits, params, seeds, positions)
        assert torch.equal(draw(logits, params, seeds, positions), expected), params


@pytest.mark.parametrize("coarse", [False, True])
def test_the_same_tokens_as_on_the_cpu(coarse: bool, device: torch.device) -> None:
    check(300, 12, device, coarse)


@pytest.mark.parametrize(
    "params", [{"top_k": 7}, {"top_p": 0.6}, {"top_k": 40, "top_p": 0.9}, {"top_k": 5, "top_p": 0.5}, {"top_k": 290}]
)
def test_logits_of_all_sizes_are_filtered_alike(params: dict[str, Any], device: torch.device) -> None:
    rows = [
        torch.zeros(300),
        torch.randn(300) * 1e-30,
        torch.randn(300) * 1e30,
        torch.where(torch.arange(300) % 50 == 0, torch.randn(300), float("-inf")),
        torch.where(torch.arange(300) % 3 == 0, torch.randn(300), -1e38),
        torch.randn(300).relu(),
        torch.full((300,), -2.5).index_fill(0, torch.tensor([4, 299]), -1.0),
        torch.randn(300).bfloat16().float() + 20,
        torch.full((300,), -0.0),
        torch.where(torch.arange(300) % 2 == 0, 0.0, -0.0),
        torch.full((300,), -0.0).index_fill(0, torch.tensor([7]), 3.0).index_fill(0, torch.tensor([200]), -4.0),
    ]
    logits = torch.stack(rows).to(device)
    given = [SamplingParams(temperature=1.0, **params)] * len(rows)
    for position in range(2):
        seeds = torch.arange(len(rows), device=device)
        positions = torch.full_like(seeds, position)
        assert torch.equal(draw(logits, given, seeds, positions), sample_in_torch(logits, given, seeds, positions))


@pytest.mark.gpu
@pytest.mark.parametrize("coarse", [False, True])
def test_the_same_tokens_with_real_vocabularies(coarse: bool, device: torch.device) -> None:
    """Sums of 150,000 probabilities differ in their last bits: tokens at the very edge of top_p may differ."""
    rng = random.Random(1)
    wrong = 0
    for _ in range(20):
        params = [SamplingParams(**({"temperature": 1.0} | rng.choice(KINDS))) for _ in range(8)]
        logits = 3 * torch.randn(8, 151_936, device=device)
        logits = (2 * logits).round() / 2 if coarse else logits
        seeds, positions = (torch.randint(0, 2**40, (8,), device=device) for _ in range(2))
        wrong += int(
            (draw(logits, params, seeds, positions) != sample_in_torch(logits, params, seeds, positions)).sum()
        )
    assert wrong <= 1


def test_greedy_takes_the_first_of_the_likeliest(device: torch.device) -> None:
    logits = torch.zeros(3, 100, device=device)
    logits[0, 40] = logits[0, 60] = 5.0
    logits[1] = float("-inf")
    logits[1, 99] = -3.0
    zeros = torch.zeros(3, dtype=torch.int64, device=device)
    params = [SamplingParams(temperature=0.0, top_k=3, top_p=0.5, min_p=0.5)] * 3
    assert draw(logits, params, zeros, zeros).tolist() == [40, 99, 0]


def test_frequencies_follow_the_softmax(device: torch.device) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0], device=device).repeat(400, 1)
    seeds = torch.arange(400, device=device)
    tokens = draw(logits, [SamplingParams(temperature=1.0)] * 400, seeds, seeds * 7)
    seen = torch.bincount(tokens, minlength=4) / 400
    torch.testing.assert_close(seen, logits[0].softmax(0), atol=0.07, rtol=0)


def test_noise_is_standard_gumbel_and_always_finite() -> None:
    noise = gumbel_noise(torch.arange(40), torch.arange(40), 150_000)
    assert abs(float(noise.mean()) - 0.5772) < 0.002
    assert noise.isfinite().all()
    uniform = torch.tensor([0, 2**23 - 1]).to(torch.float32)
    assert ((uniform + 0.5) * 2.0**-23).tolist() == [2.0**-24, 1 - 2.0**-24], "what the ends of the words become"


def test_what_is_filtered_out_is_never_sampled(device: torch.device) -> None:
    logits = torch.full((1, 3000), -30.0, device=device)
    logits[0, 5] = 30.0
    seeds, positions = torch.tensor([7], device=device), torch.tensor([1], device=device)
    for params in ({}, {"top_k": 10}, {"top_p": 0.5}):
        filtered = [SamplingParams(temperature=1.0, **params)]
        assert draw(logits, filtered, seeds, positions).tolist() == [5]
        assert sample_in_torch(logits, filtered, seeds, positions).tolist() == [5]


def test_penalties(device: torch.device) -> None:
    logits = torch.randn(3, 50, device=device)
    counts = torch.randint(0, 3, (5, 50), dtype=torch.int32, device=device)
    in_prompt = torch.rand(5, 50, device=device) < 0.3
    rows = torch.tensor([4, 0, 2], dtype=torch.int32, device=device)
    repetition, presence, frequency = (
        torch.tensor(v, device=device) for v in ([1.3, 1.0, 0.8], [0.5, 0.0, -1.0], [0.1, 0.2, 0.0])
    )
    result = penalise(logits, rows, counts, in_prompt, repetition=repetition, presence=presence, frequency=frequency)
    held = counts[rows.long()]
    seen = (held > 0) | in_prompt[rows.long()]
    factor = repetition[:, None]
    expected = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
    expected = expected - frequency[:, None] * held - presence[:, None] * (held > 0)
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_and_ranks(dtype: torch.dtype, device: torch.device) -> None:
    logits = torch.randn(4, 1000, device=device).to(dtype)
    tokens = torch.tensor([0, 999, 17, int(logits[3].argmax())], device=device)
    logprobs, ranks = token_logprobs(logits, tokens)
    expected = logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=1e-4)
    own = logits.gather(1, tokens[:, None])
    assert ranks.tolist() == ((logits > own).sum(1) + 1).tolist()
    assert ranks[3] == 1


def test_what_does_not_fit_is_refused() -> None:
    logits, ids = torch.zeros(2, 10), torch.zeros(2, dtype=torch.int64)
    floats, ks = torch.ones(2), torch.zeros(2, dtype=torch.int32)
    given = SamplingTensors(floats, ks, floats, floats, ids)
    with pytest.raises(ValueError, match="top_p has one value for each of 2 rows"):
        sample(logits, dataclasses.replace(given, top_p=torch.ones(3)), ks, ids)
    with pytest.raises(TypeError, match=r"top_k is torch\.int32"):
        sample(logits, dataclasses.replace(given, top_k=floats), ks, ids)
    with pytest.raises(ValueError, match="positions has one value"):
        sample(logits, given, ks, ids[:1])
    with pytest.raises(ValueError, match="logits are"):
        sample(torch.zeros(10), given, ks, ids)
