"""Checks that a runner and transformers generate the same tokens, for tests of several engines."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
import transformers
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.models.four_bit_experts import quantise_experts
from pagewise_executor.models.four_bit_weight import round_alone
from pagewise_executor.models.packed_linear import Quantization, pack_linears, quantisation_of
from pagewise_executor.models.preparation import parts_of
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.tiers.recovery_plan import RecoveryMode
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.sampling import BeamParams

from tests.core_requests import change
from tests.executor.driver import assert_nothing_is_held, request, run_requests
from tests.executor.references import beam_reference, reference
from tests.executor.runners import build_runner
from tests.model_builders import EAGER, VOCAB_SIZE, build_model

Early = bool | Literal["never"]

LENGTHS = [(1, 30), (3, 40), (17, 25), (40, 9), (33, 1), (64, 20), (5, 40), (90, 16)]


# ---- greedy tokens ------------------------------------------------------------------------------------------


def check_family(
    family: str,
    path: Path,
    device: str,
    block_size: int,
    kernels: str = "auto",
    quantization: Quantization = "none",
    shape: Mapping[str, int] | None = None,
    **options: object,
) -> None:
    """``shape``: settings of the model that differ from the family's. ``options``: further ones of the executor."""
    build_model(family, path, seed=7, **(shape or {}))
    same = (family, device, quantization, *sorted((shape or {}).items()))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager" if family in EAGER else "sdpa"
    ).to(device)
    if quantization != "none":
        absorbed = {name: layer for name, layer in model.named_modules() if name.endswith("kv_b_proj")}
        for part in list(parts_of(model)):
            if quantization == "int4":
                quantise_experts(model, part, round_alone)
            pack_linears(model, "cpu", quantisation_of(part, quantization), part)
        for name, layer in absorbed.items():  # the executor absorbs it, and does not round it
            model.set_submodule(name, layer)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length, _ in LENGTHS]
    expected = _reference_once(same, model, prompts, [length for _, length in LENGTHS])
    assert len({tuple(tokens) for tokens in expected}) == len(expected), "a model this dull would prove nothing"
    runner = ModelRunner(
        ExecutorConfig(
            model=str(path),
            device=device,  # type: ignore[arg-type]
            dtype="float32",
            kernels=kernels,  # type: ignore[arg-type]
            quantization=quantization,
            block_size=block_size,
            num_blocks=600,
            **({"max_num_seqs": 32, "profile": False} | options),  # type: ignore[arg-type] # few, because each number gets a CUDA graph
        )
    )
    everyone = list(range(len(LENGTHS)))
    # Short prompts with long outputs, twice each, in a pool that holds hardly one of them at full length.
    growing = [i for i in everyone if LENGTHS[i][0] <= 17] * 2
    for members, num_blocks, budget, arrive_every in (
        (everyone, 300, 19, 2),
        (growing, -(-60 // block_size) + (2 if block_size < 32 else 1), 64, 0),
    ):
        requests = [request(prompts[i], LENGTHS[i][1], name=f"r{n}") for n, i in enumerate(members)]
        scheduler, _ = run_requests(
            runner,
            requests,
            num_blocks=num_blocks,
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            arrive_every=arrive_every,
        )
        assert [r.sequences[0].output_token_ids.tolist() for r in requests] == [expected[i] for i in members]
        assert (scheduler.num_preemptions > 0) == (members is growing)
        assert_nothing_is_held(scheduler, num_blocks)
    check_sharing(runner, model, prompts[7], same)


_REFERENCES: dict[tuple[object, ...], list[list[int]]] = {}
"""Tokens of the models of families, for several kernels, and for tests of other files in this process."""


def _reference_once(
    same: tuple[object, ...], model: transformers.PreTrainedModel, prompts: list[list[int]], lengths: list[int]
) -> list[list[int]]:
    """``reference()``, computed once per process for all models that are the ``same``: equal weights and layers."""
    key = (*same, repr(prompts), *lengths)
    if key not in _REFERENCES:
        _REFERENCES[key] = reference(model, prompts, lengths, str(model.device))
    return _REFERENCES[key]


def check_sharing(
    runner: ModelRunner, model: transformers.PreTrainedModel, base: list[int], same: tuple[object, ...]
) -> None:
    """Prompts that begin alike, ending inside and between blocks, some with several outputs, come one by one."""
    prompts = [base[:shared] + [3 + shared] * more for shared, more in ((90, 0), (64, 3), (47, 9), (80, 1), (90, 0))]
    expected = _reference_once(same, model, prompts, [12] * len(prompts))
    requests = [request(prompt, 12, name=f"s{n}", n=(1, 4, 2)[n % 3]) for n, prompt in enumerate(prompts)]
    blocks = -(-500 // runner.info.block_size)
    scheduler, _ = run_requests(
        runner, requests, num_blocks=blocks, max_num_seqs=6, max_num_batched_tokens=50, arrive_every=3
    )
    for asked, tokens in zip(requests, expected, strict=True):
        assert all(sequence.output_token_ids.tolist() == tokens for sequence in asked.sequences)
    queries, hits = scheduler.prefix_hits
    size, groups = runner.info.block_size, runner.info.groups
    if any(group.state for group in groups):
        # # The snapshot of a prompt is at one place, while windows have one in each of the last 64 tokens. So a prompt
        # that leaves the path before this place computes its shared tokens again, as the second and the third one do
        # here; where they leave it, they keep the states for later ones.
        ends = [len(prompt) // size for prompt in prompts]
        kept = [size * (end - 1 if end > 1 else end) for end in ends]
        assert hits >= sum(_shared_with_earlier(prompts, kept))
    else:
        assert hits > 0.5 * queries
        if groups:
            # Each prompt leaves an earlier one in the last 64 tokens of that prompt, where its snapshot lets sequences
            # begin behind every whole block.
            assert hits >= sum(shared // size * size for shared in _shared_with_earlier(prompts))
    assert_nothing_is_held(scheduler, blocks)


def _shared_with_earlier(prompts: list[list[int]], places: Sequence[int] | None = None) -> list[int]:
    """How many tokens each prompt shares with an earlier one, without its last token, which is computed.

    ``places``: the only number of tokens of each prompt behind which a sequence can begin; None: any.
    """

    def shared(prompt: list[int], number: int) -> int:
        pairs = enumerate(zip(prompt[:-1], prompts[number], strict=False))
        least = min(len(prompt) - 1, len(prompts[number]))
        count = next((place for place, (left, right) in pairs if left != right), least)
        if places is None:
            return count
        return places[number] if places[number] <= count else 0

    return [
        max((shared(prompt, earlier) for earlier in range(number)), default=0) for number, prompt in enumerate(prompts)
    ]


# ---- KV that comes back -------------------------------------------------------------------------------------


def revisits(rng: random.Random) -> tuple[list[list[int]], list[int]]:
    """Conversations that come back after others have taken their blocks, some with more, some cut inside a block."""
    base = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (70, 50, 64, 33, 90)]
    again = [base[0] + [7, 8, 9], [*base[1][:43], 5], base[2], base[4][:60], base[3] + [4] * 20, base[0]]
    prompts = base + again
    return prompts, [rng.choice([6, 11, 17]) for _ in prompts]


def check_recovery(
    path: Path, mode: RecoveryMode, num_blocks: int, device: str = "cpu", n: int = 1, **options: object
) -> tuple[ModelRunner, int]:
    rng = random.Random(num_blocks)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)
    prompts, lengths = revisits(rng)
    expected = reference(model, prompts, lengths, device)
    runner = build_runner(path, device, **options)
    requests: list[Request] = [
        request(prompt, length, name=f"r{i}", n=n if i % 3 == 0 else 1)
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    scheduler, _ = run_requests(
        runner, requests, num_blocks=num_blocks, max_num_batched_tokens=24, arrive_every=9, recovery=mode
    )
    for served, tokens in zip(requests, expected, strict=True):
        for sequence in served.sequences:
            assert sequence.output_token_ids.tolist() == tokens
    assert_nothing_is_held(scheduler, num_blocks)
    return runner, scheduler.kv.pool.counters.loaded


def check_mixture(model_path: Path, seed: int, **options: object) -> None:
    """Beams, several outputs, prompts that come back whole, longer, and cut inside a block, in too little memory."""
    rng = random.Random(seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    runner = build_runner(model_path, **options)
    texts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(5, 60))] for _ in range(4)]
    requests, expected = [], []
    for number in range(14):
        base = rng.choice(texts)
        prompt = base[: rng.randrange(1, len(base) + 1)] + [rng.randrange(3, VOCAB_SIZE)] * rng.choice([0, 0, 1, 9])
        length, n = rng.randrange(1, 18), rng.choice([1, 1, 2, 4])
        made = request(prompt, length, name=f"r{number}", n=n)
        if rng.random() < 0.3:
            beam = BeamParams(max(2, n))
            change(made, beam=beam)
            expected.append(beam_reference(model, prompt, length, beam, n, []))
        else:
            expected.append(reference(model, [prompt], [length], "cpu") * n)
        requests.append(made)
    longest = max(len(made.prompt_token_ids) + made.max_tokens for made in requests)
    num_blocks = -(-longest // runner.info.block_size) + rng.randrange(2, 9)
    run_requests(
        runner,
        requests,
        num_blocks=num_blocks,
        max_num_seqs=rng.choice([4, 8]),
        max_num_batched_tokens=rng.choice([8, 33]),
        arrive_every=rng.choice([0, 2, 7]),
        recovery=rng.choice(["auto", "swap", "recompute", "both"]),
    )
    assert [[sequence.output_token_ids.tolist() for sequence in made.sequences] for made in requests] == expected


# ---- beams --------------------------------------------------------------------------------------------------


def beam_request(prompt: list[int], max_tokens: int, beam: BeamParams, n: int, ends: list[int], name: str) -> Request:
    made = request(prompt, max_tokens, name=name, n=n, stop_token_ids=tuple(ends))
    change(made, beam=beam)
    return made


def check_beams(
    runner: ModelRunner, model: transformers.PreTrainedModel, width: int, n: int, early_stopping: Early
) -> None:
    """Beams, some of which end early, equal the beams of ``generate``."""
    rng = random.Random(width)
    requests, wanted = [], []
    num_blocks = runner.info.num_blocks
    for number, (length, max_tokens, penalty, num_ends) in enumerate(
        [(1, 12, 1.0, 0), (7, 20, 1.0, 12), (16, 16, 0.0, 40), (21, 9, 2.0, 25), (13, 18, -0.5, 30)]
    ):
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
        ends = sorted(rng.sample(range(3, VOCAB_SIZE), num_ends))
        beam = BeamParams(width, penalty, early_stopping)
        wanted.append(beam_reference(model, prompt, max_tokens, beam, n, ends))
        requests.append(beam_request(prompt, max_tokens, beam, n, ends, f"b{number}"))
    scheduler, _ = run_requests(runner, requests, max_num_seqs=32, max_num_batched_tokens=48)
    assert [[sequence.output_token_ids.tolist() for sequence in made.sequences] for made in requests] == wanted
    assert_nothing_is_held(scheduler, num_blocks)
    assert scheduler.kv.pool.counters.copied > 0 or width == 1
