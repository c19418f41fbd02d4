"""Sampling against plain oracles."""

import gc
import statistics
import time
from contextlib import nullcontext

import msgspec
import numpy as np
import pytest
import torch
from pagewise_executor.graph_capture import waiting_is_an_error
from pagewise_executor.sampling.constraint_tables import ConstraintTables
from pagewise_executor.sampling.logprobs import compute_logprobs
from pagewise_executor.sampling.penalties import TorchPenalties, TritonPenalties
from pagewise_executor.sampling.sampler import Sampler
from pagewise_executor.sampling.token_sampler import TorchTokenSampler, TritonTokenSampler, gumbel_noise, philox
from pagewise_executor.structured.structured_rows import StructuredRows
from pagewise_kernels.logprobs import token_logprobs
from pagewise_shared.protocol import unpack_int32s
from pagewise_shared.sampling import SamplingParams, TokenConstraints, token_constraints

from tests.sampling import sampling_params

VOCAB = 50


def sampler_for(params: list[SamplingParams], tokens: list[int] | None = None, prompt: int = 3) -> Sampler:
    device = torch.device("cpu")
    sampler = Sampler(
        TorchTokenSampler(device),
        TorchPenalties(VOCAB, device),
        ConstraintTables(VOCAB, device),
        compute_logprobs,
        device,
        StructuredRows(None, "there is no tokenizer", VOCAB, device),
    )
    known = np.array(tokens if tokens is not None else [1, 2, 3], np.int32)
    for row, one in enumerate(params):
        sampler.join(row, known, prompt, one)
    return sampler


def draw(sampler: Sampler, logits: torch.Tensor, rows: list[int], positions: list[int]) -> list[int]:
    tokens, _ = sampler.sample(logits[None].repeat(len(rows), 1), rows, torch.tensor(positions))
    return tokens.tolist()


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 2


def distribution(params: SamplingParams, logits: torch.Tensor, count: int = 20_000) -> torch.Tensor:
    sampler = sampler_for([params])
    tokens, _ = sampler.sample(logits[None].repeat(count, 1), [0] * count, torch.arange(count))
    return torch.bincount(tokens, minlength=VOCAB) / count


def filtered(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution that the parameters describe, step by step."""
    probabilities = (logits / params.temperature).softmax(-1)
    keep = probabilities >= params.min_p * probabilities.max()
    if params.top_k:
        keep &= probabilities >= probabilities.sort(descending=True).values[params.top_k - 1]
    probabilities = torch.where(keep, probabilities, 0)
    probabilities /= probabilities.sum()
    order = probabilities.argsort(descending=True)
    total = 0.0
    nucleus = torch.zeros_like(keep)
    for token in order.tolist():
        if total >= params.top_p:
            break
        nucleus[token] = True
        total += float(probabilities[token])
    probabilities = torch.where(nucleus, probabilities, 0)
    return probabilities / probabilities.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02),
    ],
)
def test_samples_follow_the_distribution(params: SamplingParams, logits: torch.Tensor) -> None:
    expected, got = filtered(logits, params), distribution(params, logits)
    assert not got[expected == 0].any()
    assert (expected - got).abs().sum() < 0.05


def test_philox_is_the_published_generator() -> None:
    # Known answers of Random123, philox4x32-10.
    for counter, key, words in (
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ):
        assert [int(w) for w in philox(torch.tensor(key), [torch.tensor(c) for c in counter])] == words


def test_noise_depends_on_seed_and_position_alone() -> None:
    seeds, positions = torch.tensor([1, -5, 1]), torch.tensor([7, 7, 2**33])
    together = gumbel_noise(seeds, positions, 31)
    for i in range(3):
        assert torch.equal(gumbel_noise(seeds[i : i + 1], positions[i : i + 1], 31)[0], together[i])
    assert len({tuple(row.tolist()) for row in together}) == 3
    assert together.isfinite().all()


def test_a_row_samples_the_same_in_any_batch(logits: torch.Tensor) -> None:
    one = SamplingParams(temperature=0.9, seed=2**64 - 3, top_p=0.9)
    others = [SamplingParams(seed=i, top_k=i) for i in range(1, 5)]
    alone = [draw(sampler_for([one]), logits, [0], [position])[0] for position in range(20)]
    beside = [draw(sampler_for([*others, one]), logits, [2, 4, 0], [3, position, 9])[1] for position in range(20)]
    assert alone == beside


def test_greedy_rows_stay_greedy_beside_others(logits: torch.Tensor) -> None:
    sampler = sampler_for([SamplingParams(temperature=0), SamplingParams(temperature=5.0, seed=1)])
    assert all(draw(sampler, logits, [0, 1], [p, p])[0] == int(logits.argmax()) for p in range(10))


@pytest.mark.parametrize("triton", [False, True])
def test_penalties(logits: torch.Tensor, triton: bool, device: torch.device) -> None:
    kind = TritonPenalties(6, VOCAB, device) if triton else TorchPenalties(VOCAB, device)
    tokens = [4, 5, 6, 7, 7, 8]  # the first three are the prompt
    for params in (
        SamplingParams(temperature=0, frequency_penalty=1.5),
        SamplingParams(temperature=0, presence_penalty=1.5),
        SamplingParams(temperature=0, repetition_penalty=1.8),
    ):
        expected = logits.clone()
        for token in range(VOCAB):
            count = tokens[3:].count(token)
            if token in tokens and params.repetition_penalty != 1:
                factor = params.repetition_penalty
                expected[token] = expected[token] / factor if expected[token] > 0 else expected[token] * factor
            expected[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        kind.join(5, np.array(tokens[:5], np.int32), 3, params)
        kind.count([5], torch.tensor([tokens[5]], device=device))
        shaped = logits.repeat(3, 1).to(device)
        kind.apply(shaped, [5], [1])
        torch.testing.assert_close(shaped[1].cpu(), expected)
        torch.testing.assert_close(shaped[[0, 2]].cpu(), logits.repeat(2, 1))


def test_a_token_that_was_sampled_counts_in_the_next_step(logits: torch.Tensor) -> None:
    sampler = sampler_for([SamplingParams(temperature=0, presence_penalty=2.0, frequency_penalty=2.0)])
    sampled = [draw(sampler, logits, [0], [position])[0] for position in range(3)]
    assert len(set(sampled)) > 1


def test_bias_masks_and_bad_words(logits: torch.Tensor) -> None:
    best = int(logits.argmax())
    assert draw(sampler_for([sampling_params(temperature=0, logit_bias={9: 100.0})]), logits, [0], [3]) == [9]
    assert draw(sampler_for([sampling_params(temperature=0, allowed=(11, 12))]), logits, [0], [3])[0] in (
        11,
        12,
    )
    assert draw(sampler_for([sampling_params(temperature=0, bad_words=((best,),))]), logits, [0], [3]) != [best]
    assert draw(sampler_for([sampling_params(temperature=0, bad_words=((2, 3, best),))]), logits, [0], [3]) != [best]
    assert draw(sampler_for([sampling_params(temperature=0, bad_words=((3, 2, best),))]), logits, [0], [3]) == [best]


def test_a_batch_of_everything_samples_what_each_row_samples_alone(logits: torch.Tensor, device: torch.device) -> None:
    """On the kernels all rows at once, and nothing waits for the device; in PyTorch one by one."""
    settings = [
        SamplingParams(temperature=0),
        sampling_params(temperature=1.0, seed=1, logit_bias={5: 2.0, 9: -3.5}, logprobs=2),
        sampling_params(temperature=0.8, seed=2, allowed=(7, 8, 8, 30), logit_bias={7: 1.0}),
        SamplingParams(temperature=1.0, seed=3, presence_penalty=0.7, frequency_penalty=0.3, logprobs=0),
        SamplingParams(temperature=0, repetition_penalty=1.9, stop_token_ids=(4, 6), min_tokens=2),
        sampling_params(temperature=1.0, seed=4, bad_words=((3,), (17,)), top_k=12, top_p=0.8, min_p=0.02),
    ]
    rows, known = [3, 0, 5, 1, 4, 2], np.array([1, 2, 3, 4], np.int32)
    together = Sampler(
        TritonTokenSampler(6, device),
        TritonPenalties(6, VOCAB, device),
        ConstraintTables(VOCAB, device),
        token_logprobs,
        device,
        StructuredRows(None, "there is no tokenizer", VOCAB, device),
    )
    for row, setting in zip(rows, settings, strict=True):
        together.join(row, known, 3, setting)
    alone = [sampler_for([setting], [1, 2, 3, 4]) for setting in settings]
    batch = torch.stack([logits.roll(row) for row in range(len(settings))])
    on_device = batch.to(device)
    with torch.inference_mode():
        for step in range(4):
            positions = torch.full((len(settings),), step + 4, device=device)
            with (
                waiting_is_an_error() if step and device.type == "cuda" else nullcontext()
            ):  # the first compiles and allocates
                tokens, wanted = together.sample(on_device, rows, positions)
            if device.type == "cuda":
                torch.cuda.synchronize()
            assert wanted is not None
            expected = [one.sample(batch[i : i + 1], [0], torch.tensor([step + 4])) for i, one in enumerate(alone)]
            assert tokens.tolist() == [int(sampled) for sampled, _ in expected]
            reports = [reported for _, of_one in expected if of_one is not None for reported in of_one.report()]
            for found, (index, one) in zip(wanted.report(), zip([1, 3], reports, strict=True), strict=True):
                assert (found.index, found.token_id, found.rank) == (index, one.token_id, one.rank)
                assert found.top_ids == one.top_ids
                assert found.logprob == pytest.approx(one.logprob, abs=1e-4)


def test_min_tokens_holds_stop_tokens_back(logits: torch.Tensor) -> None:
    best = int(logits.argmax())
    sampler = sampler_for([SamplingParams(temperature=0, stop_token_ids=(best,), min_tokens=2)])
    sampled = [draw(sampler, logits, [0], [position])[0] for position in range(3)]
    assert best not in sampled[:2]
    assert sampled[2] == best


def test_a_row_needs_the_token_sampler_only_once_it_may_end(logits: torch.Tensor) -> None:
    sampler = sampler_for([SamplingParams(temperature=0, stop_token_ids=(3,), min_tokens=2)])
    simple = [sampler.are_simple([0])]
    for position in range(2):
        draw(sampler, logits, [0], [position])
        simple.append(sampler.are_simple([0]))
    assert simple == [False, False, True]


def test_rows_that_come_and_go_and_change_places_sample_what_each_samples_alone() -> None:
    """The sampler never keeps state of other rows, of another order, or of a row's earlier sequence."""
    rng = np.random.default_rng(7)
    ids = list(range(VOCAB))

    def some(count: int) -> tuple[int, ...]:
        return tuple(rng.choice(ids, count, replace=False).tolist())

    def settings() -> SamplingParams:
        words = tuple((first, second) for first in some(6) for second in some(4))
        return sampling_params(
            temperature=float(rng.choice([0.0, 0.9])),
            seed=int(rng.integers(1000)),
            stop_token_ids=some(20) if rng.random() < 0.5 else (),
            min_tokens=int(rng.integers(6)),
            presence_penalty=float(rng.choice([0.0, 0.0, 0.8])),
            allowed=some(30) if rng.random() < 0.3 else (),
            logit_bias=dict.fromkeys(some(5), 2.0) if rng.random() < 0.3 else None,
            bad_words=words if rng.random() < 0.3 else (),
        )

    together = sampler_for([])
    alone: dict[int, Sampler] = {}
    order: list[int] = []
    known = np.array([1, 2, 3], np.int32)
    generator = torch.Generator().manual_seed(5)
    held_back = 0
    for step in range(150):
        if order and rng.random() < 0.2:
            together.leave(left := int(rng.choice(order)))
            order.remove(left)
        free = [row for row in range(8) if row not in order]
        if free and (not order or rng.random() < 0.4):
            row, params = int(rng.choice(free)), settings()
            together.join(row, known, 2, params)
            alone[row] = sampler_for([params], [1, 2, 3], 2)
            held_back += params.min_tokens > 1 and bool(params.stop_token_ids)
            order.append(row)
        if rng.random() < 0.2:
            rng.shuffle(order)
        batch = torch.randn((len(order), VOCAB), generator=generator)
        positions = torch.full((len(order),), step)
        tokens, _ = together.sample(batch, list(order), positions)
        expected = [alone[row].sample(batch[i : i + 1], [0], positions[:1])[0].item() for i, row in enumerate(order)]
        assert tokens.tolist() == expected
    assert held_back > 5


def test_what_a_sequence_has_counted_is_freed_when_it_leaves() -> None:
    """For its penalties, five bytes of each entry of the vocabulary: half a megabyte with a usual one."""
    penalised = sampling_params(temperature=0.5, presence_penalty=1.0)

    def num_tensors() -> int:
        return sum(type(one) is torch.Tensor for one in gc.get_objects())

    before = num_tensors()
    sampler = sampler_for([penalised] * 20)
    draw(sampler, torch.zeros(VOCAB), list(range(20)), [3] * 20)
    assert num_tensors() >= before + 20
    for row in range(20):
        sampler.leave(row)
    assert num_tensors() <= before + 2


def test_many_tokens_that_are_held_back_cost_a_step_next_to_nothing() -> None:
    """As many as may be, in as many rows as run by default; it was 18 ms a step."""
    vocab, rows, device = 4096, list(range(256)), torch.device("cpu")
    logits, positions = torch.zeros((len(rows), vocab)), torch.zeros(len(rows), dtype=torch.int64)
    seconds: dict[int, list[float]] = {0: [], 10**6: []}
    samplers = {}
    for min_tokens in seconds:
        sampler = samplers[min_tokens] = Sampler(
            TorchTokenSampler(device),
            TorchPenalties(vocab, device),
            ConstraintTables(vocab, device),
            compute_logprobs,
            device,
            StructuredRows(None, "there is no tokenizer", vocab, device),
        )
        params = sampling_params(
            temperature=0, stop_token_ids=tuple(range(1024)), min_tokens=min_tokens, logit_bias={4000: 1.0}
        )
        for row in rows:
            sampler.join(row, np.array([1, 2], np.int32), 2, params)
    for _ in range(11):
        for min_tokens, sampler in samplers.items():
            began = time.thread_time()
            sampler.sample(logits, rows, positions)
            seconds[min_tokens].append(time.thread_time() - began)
    free, held = (statistics.median(each) for each in seconds.values())
    assert held - free < 0.005, f"{(held - free) * 1e3:.1f} ms"


def test_logprobs_are_of_the_raw_logits(logits: torch.Tensor) -> None:
    sampler = sampler_for([sampling_params(temperature=0, logprobs=3, allowed=(7,))])
    _, wanted = sampler.sample(logits[None], [0], torch.tensor([3]))
    assert wanted is not None
    (entry,) = wanted.report()
    raw = logits.log_softmax(-1)
    assert entry.token_id == 7
    assert entry.logprob == pytest.approx(float(raw[7]))
    assert entry.rank == int((raw > raw[7]).sum()) + 1
    assert unpack_int32s(entry.top_ids).tolist() == raw.topk(3).indices.tolist()


def test_constraints_of_a_large_vocabulary_are_those_token_by_token(device: torch.device) -> None:
    """All rows of a request share one table, and the result equals a loop over tokens."""
    vocab, rows = 70_001, 5
    rng = np.random.default_rng(3)
    allowed = tuple(rng.choice(vocab, 40_000, replace=False).tolist())
    bias = {int(token): float(value) for token, value in zip(rng.choice(vocab, 900), rng.normal(size=900), strict=True)}
    single, last = int(allowed[7]), int(allowed[9])
    words = ((single,), (1, 2, 3, last), (9, 2, 3, int(allowed[11])), (3, int(allowed[12])))
    tables = ConstraintTables(vocab, device)
    sampler = Sampler(
        TorchTokenSampler(device),
        TorchPenalties(vocab, device),
        tables,
        compute_logprobs,
        device,
        StructuredRows(None, "there is no tokenizer", vocab, device),
    )
    shared = token_constraints(allowed, bias, words)
    assert shared is not None
    for row in range(rows):  # each comes in a plan of its own, which is decoded anew
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(shared), type=TokenConstraints)
        sampler.join(row, np.array([5, 1, 2, 3], np.int32), 2, SamplingParams(temperature=0, constraints=again))
    assert len(tables) == 1
    logits = torch.randn((rows, vocab), generator=torch.Generator().manual_seed(2)).to(device)
    expected = logits.cpu().clone()
    for token, value in bias.items():
        expected[:, token] += value
    forbidden = torch.ones(vocab, dtype=torch.bool)
    forbidden[list(allowed)] = False
    forbidden[[single, last, int(allowed[12])]] = True
    expected[:, forbidden] = float("-inf")
    tokens, _ = sampler.sample(logits, list(range(rows)), torch.full((rows,), 4, device=device))
    assert tokens.cpu().tolist() == expected.argmax(-1).tolist()
    for row in range(rows):
        sampler.leave(row)
    assert len(tables) == 0


def test_a_bad_word_is_noticed_however_its_beginning_came(logits: torch.Tensor) -> None:
    order = logits.argsort(descending=True).tolist()
    best, second = order[0], order[1]
    words = ((best, best), (best, second, best), (7, 7, 7))
    sampler = sampler_for([sampling_params(temperature=0, bad_words=words)])
    sampled = [draw(sampler, logits, [0], [position])[0] for position in range(4)]
    assert sampled[:2] == [best, second]
    assert sampled[2] == second  # the best would complete the second word
    resumed = sampler_for([sampling_params(temperature=0, bad_words=words)], [1, 2, 3, *sampled[:2]])
    assert [draw(resumed, logits, [0], [position])[0] for position in range(2, 4)] == sampled[2:]


def test_constraints_are_built_fast_enough_to_hold_up_no_step() -> None:
    vocab, device = 200_000, torch.device("cpu")
    constraints = token_constraints(range(0, vocab, 2), dict.fromkeys(range(1024), 1.0), [(1, 2, 3)] * 256)
    assert constraints is not None
    began = time.thread_time()
    ConstraintTables(vocab, device).of(constraints)
    assert time.thread_time() - began < 0.1  # it takes about 1 ms
