"""Greedy tokens equal transformers' ``generate()``, token for token, for every family."""

import random
from pathlib import Path

import pytest
import torch
import transformers
from pagewise_executor.model_runner import ModelRunner
from pagewise_shared.config import ExecutorConfig

from tests.executor.driver import request, run_requests
from tests.executor.references import reference
from tests.model_builders import FAMILIES, VOCAB_SIZE, build_model

LENGTHS = [(1, 30), (3, 40), (17, 25), (40, 9), (33, 1), (64, 20), (5, 40), (90, 16)]


def check_family(
    family: str, path: Path, device: str, block_size: int, attention: str = "sdpa", kernels: str = "auto"
) -> None:
    build_model(family, path, seed=7)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager" if family == "gemma2" else attention
    ).to(device)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length, _ in LENGTHS]
    expected = reference(model, prompts, [length for _, length in LENGTHS], device)
    assert len({tuple(tokens) for tokens in expected}) == len(expected), "a model this dull would prove nothing"
    runner = ModelRunner(
        ExecutorConfig(
            model=str(path),
            device=device,  # type: ignore[arg-type]
            dtype="float32",
            kernels=kernels,  # type: ignore[arg-type]
            block_size=block_size,
            num_blocks=600,
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
        assert scheduler.kv.num_available == num_blocks
    check_sharing(runner, model, prompts[7], device)


def check_sharing(runner: ModelRunner, model: transformers.PreTrainedModel, base: list[int], device: str) -> None:
    """Prompts that begin alike, ending inside and between blocks, some with several outputs, come one by one."""
    prompts = [base[:shared] + [3 + shared] * more for shared, more in ((90, 0), (64, 3), (47, 9), (80, 1), (90, 0))]
    expected = reference(model, prompts, [12] * len(prompts), device)
    requests = [request(prompt, 12, name=f"s{n}", n=(1, 4, 2)[n % 3]) for n, prompt in enumerate(prompts)]
    blocks = -(-500 // runner.info.block_size)
    scheduler, _ = run_requests(
        runner, requests, num_blocks=blocks, max_num_seqs=6, max_num_batched_tokens=50, arrive_every=3
    )
    for asked, tokens in zip(requests, expected, strict=True):
        assert all(sequence.output_token_ids.tolist() == tokens for sequence in asked.sequences)
    assert scheduler.num_prefix_hits > 0.5 * scheduler.num_prefix_queries
    assert scheduler.kv.num_available == blocks


@pytest.mark.parametrize(("family", "block_size"), [(f, (16, 5, 1)[i % 3]) for i, f in enumerate(FAMILIES)])
def test_greedy_tokens_equal_generate(family: str, block_size: int, tmp_path: Path) -> None:
    check_family(family, tmp_path, "cpu", block_size)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_generate_on_cuda(family: str, tmp_path: Path) -> None:
    check_family(family, tmp_path, "cuda", 16)
