"""KV in eight bits on the CPU: logits near the exact ones, and the same tokens however blocks come and go."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from pagewise_executor.model_runner import ModelRunner
from pagewise_kernels.kv_layer import INT8
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from tests.cpu_kernels import need_cpu_kernels
from tests.executor.driver import request, run_requests
from tests.executor.runners import BLOCK_SIZE, build_runner, peers_at
from tests.model_builders import VOCAB_SIZE, build_model, model_fixture

FAMILIES = ("llama", "gemma3", "qwen3_next")
"""One group of layers, windows beside full attention, and recurrent layers, whose states stay in the model's type."""

model_path = model_fixture(*FAMILIES, seed=7)
llama = model_fixture("llama", seed=7)


def int8_runner(path: Path, **options: object) -> ModelRunner:
    need_cpu_kernels()
    return build_runner(path, kernels="cpu", kv_dtype="int8", **options)


def attend_to_rounded(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *mask: Any, **options: Any
) -> Any:
    """Compute attention with K and V that are rounded to eight bits, with a scale by token and head."""
    scales = [part.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127 for part in (key, value)]
    key, value = ((part / one).round() * one for part, one in zip((key, value), scales, strict=True))
    interfaces: Any = AttentionInterface
    return interfaces()["sdpa"](module, query, key, value, *mask, **options)


@pytest.mark.parametrize("family", [*FAMILIES, "gemma4", "gemma4_moe"])
def test_logits_are_those_of_transformers_with_rounded_kv(family: str, tmp_path: Path) -> None:
    AttentionInterface.register("rounded", attend_to_rounded)
    AttentionMaskInterface.register("rounded", sdpa_mask)
    build_model(family, tmp_path, seed=7)
    prompt = list(range(5, 50))
    runner = int8_runner(tmp_path)
    _, outputs = run_requests(runner, [request(prompt, 1, prompt_logprobs=0)], max_num_batched_tokens=7)
    runner.close()
    found = [entry.logprob for out in outputs for _, entries in out.prompt_logprobs for entry in entries]
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="rounded")
    with torch.inference_mode():
        expected = model.eval()(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert found == pytest.approx(expected[torch.arange(44), torch.tensor(prompt[1:])].tolist(), abs=0.01)


def test_logits_in_bfloat16_are_nearly_the_exact_ones(model_path: Path) -> None:
    found = []
    for options in {"kv_dtype": "int8"}, {}:
        need_cpu_kernels()
        runner = build_runner(model_path, kernels="cpu", dtype="bfloat16", **options)
        _, outputs = run_requests(runner, [request(list(range(5, 50)), 1, prompt_logprobs=0)], max_num_batched_tokens=7)
        found.append([entry.logprob for out in outputs for _, entries in out.prompt_logprobs for entry in entries])
        runner.close()
    int8, exact = found
    assert len(exact) == 44
    assert int8 != exact
    assert int8 == pytest.approx(exact, abs=0.1)


def test_a_block_has_values_and_scales(llama: Path) -> None:
    runner, exact = int8_runner(llama), build_runner(llama, kernels="cpu")
    heads, dim = runner._pool.keys[0].shape[2:]
    layers = len(runner._pool.keys)
    assert {one.dtype for one in runner._pool.keys} == {INT8}
    assert runner.info.bytes_per_block == 2 * layers * BLOCK_SIZE * heads * (dim + 4)
    assert exact.info.bytes_per_block == 2 * layers * BLOCK_SIZE * heads * 4 * dim
    runner.close()
    exact.close()


def test_tokens_do_not_depend_on_reuse_preemption_or_the_host(model_path: Path) -> None:
    """Blocks that are found again, recomputed or loaded hold the numbers that were written first."""
    rng = random.Random(3)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(2 * BLOCK_SIZE + 3)]
    prompts = [[*shared, *(rng.randrange(3, VOCAB_SIZE) for _ in range(length))] for length in (1, 9, 17, 30)]

    def tokens(runner: ModelRunner, num_blocks: int | None, **options: object) -> tuple[list[list[int]], Scheduler]:
        asked = [request(prompt, 24, f"r{i}") for i, prompt in enumerate([*prompts, *prompts])]
        scheduler, _ = run_requests(runner, asked, num_blocks=num_blocks, **options)  # type: ignore[arg-type]
        return [one.sequences[0].output_token_ids.tolist() for one in asked], scheduler

    runner = int8_runner(model_path)
    alone = [tokens_of(runner, prompt, 24) for prompt in prompts] * 2
    reused, scheduler = tokens(runner, None, arrive_every=3, max_num_batched_tokens=19)
    assert reused == alone
    blocks = -(-(max(map(len, prompts)) + 24) // BLOCK_SIZE) + 2
    for recovery in ("swap", "recompute"):
        found, scheduler = tokens(runner, blocks, recovery=recovery)
        assert scheduler.num_preemptions > 0
        assert found == alone, recovery
    runner.close()


def tokens_of(runner: ModelRunner, prompt: list[int], count: int) -> list[int]:
    asked = request(prompt, count)
    run_requests(runner, [asked])
    return asked.sequences[0].output_token_ids.tolist()


def test_blocks_of_another_type_are_never_taken(llama: Path) -> None:
    """Peers and stores find blocks by the model and this format."""
    need_cpu_kernels()
    runners = [
        build_runner(llama, exchange=peers_at(), kernels="cpu", kv_dtype=kv_dtype, dtype=dtype)
        for kv_dtype in ("auto", "int8")
        for dtype in ("float32", "bfloat16")
    ]
    assert len({runner.info.block_format for runner in runners}) == 4
    for runner in runners:
        runner.close()
