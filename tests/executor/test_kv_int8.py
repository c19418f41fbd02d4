"""KV in eight and four bits: logits near the exact ones, and the same tokens however blocks come and go."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from pagewise_executor.model_runner import ModelRunner
from pagewise_kernels.kv_layer import INT4, INT8
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_shared.errors import ModelError
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from benchmarks.quantization.rounding import Rounding, to_int4, to_int8
from tests.cpu_kernels import need_cpu_kernels
from tests.executor.driver import request, run_requests
from tests.executor.runners import BLOCK_SIZE, build_runner, peers_at
from tests.model_builders import VOCAB_SIZE, build_model, model_fixture

FAMILIES = ("llama", "gemma3", "qwen3_next")
"""One group of layers, windows beside full attention, and recurrent layers, whose states stay in the model's type."""

model_path = model_fixture(*FAMILIES, seed=7, head_dim=32)
llama = model_fixture("llama", seed=7, head_dim=32)
BITS = ("int8", "int4")


def small_runner(path: Path, kv_dtype: str, *, kernels: str = "cpu", **options: object) -> ModelRunner:
    if kernels == "cpu":
        need_cpu_kernels()
    return build_runner(path, kernels=kernels, kv_dtype=kv_dtype, **options)


def attend_to(rounded: Rounding) -> Any:
    """Return attention with K and V that are rounded by token and head."""

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *mask: Any, **options: Any
    ) -> Any:
        interfaces: Any = AttentionInterface
        return interfaces()["sdpa"](module, query, rounded(key), rounded(value), *mask, **options)

    return attend


@pytest.mark.parametrize(
    ("family", "kv_dtype", "kernels"),
    [
        *((family, kv_dtype, "cpu") for family in FAMILIES for kv_dtype in BITS),
        ("gemma4", "int8", "cpu"),
        ("gemma4_moe", "int8", "cpu"),
        ("qwen3", "int4", "triton"),
    ],
)
def test_logits_are_those_of_transformers_with_rounded_kv(
    family: str, kv_dtype: str, kernels: str, tmp_path: Path
) -> None:
    AttentionInterface.register("rounded", attend_to({"int8": to_int8, "int4": to_int4}[kv_dtype]))
    AttentionMaskInterface.register("rounded", sdpa_mask)
    build_model(family, tmp_path, seed=7, **({} if family.startswith("gemma4") else {"head_dim": 32}))
    prompt = list(range(5, 50))
    runner = small_runner(tmp_path, kv_dtype, kernels=kernels)
    _, outputs = run_requests(runner, [request(prompt, 1, prompt_logprobs=0)], max_num_batched_tokens=23)
    runner.close()
    found = [entry.logprob for out in outputs for _, entries in out.prompt_logprobs for entry in entries]
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="rounded")
    with torch.inference_mode():
        expected = model.eval()(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert found == pytest.approx(expected[torch.arange(44), torch.tensor(prompt[1:])].tolist(), abs=0.01)


@pytest.mark.parametrize("kv_dtype", BITS)
def test_logits_in_bfloat16_are_nearly_the_exact_ones(model_path: Path, kv_dtype: str) -> None:
    found = []
    for options in {"kv_dtype": kv_dtype}, {}:
        need_cpu_kernels()
        runner = build_runner(model_path, kernels="cpu", dtype="bfloat16", **options)
        _, outputs = run_requests(runner, [request(list(range(5, 50)), 1, prompt_logprobs=0)], max_num_batched_tokens=7)
        found.append([entry.logprob for out in outputs for _, entries in out.prompt_logprobs for entry in entries])
        runner.close()
    small, exact = found
    assert len(exact) == 44
    assert small != exact
    assert small == pytest.approx(exact, abs=0.1 if kv_dtype == "int8" else 2)


def test_a_block_has_values_and_scales(llama: Path) -> None:
    runner, exact = small_runner(llama, "int8"), build_runner(llama, kernels="cpu")
    heads, dim = runner._pool.keys[0].shape[2:]
    layers = len(runner._pool.keys)
    assert {one.dtype for one in runner._pool.keys} == {INT8}
    assert runner.info.bytes_per_block == 2 * layers * BLOCK_SIZE * heads * (dim + 4)
    assert exact.info.bytes_per_block == 2 * layers * BLOCK_SIZE * heads * 4 * dim
    runner.close()
    exact.close()
    runner = small_runner(llama, "int4")
    assert {one.dtype for one in runner._pool.keys} == {INT4}
    assert runner.info.bytes_per_block == 2 * layers * BLOCK_SIZE * heads * (dim // 2 + 4)
    runner.close()


def test_four_bits_need_heads_of_whole_groups(tmp_path: Path) -> None:
    build_model("llama", tmp_path)
    with pytest.raises(ModelError, match="heads of 12 numbers are no multiple of 32"):
        small_runner(tmp_path, "int4")
    with pytest.raises(ModelError, match="int4 needs the Triton kernels, or the CPU operations in C"):
        build_runner(tmp_path, kernels="torch", kv_dtype="int4")


@pytest.mark.parametrize("kv_dtype", BITS)
def test_tokens_do_not_depend_on_reuse_preemption_or_the_host(model_path: Path, kv_dtype: str) -> None:
    """Blocks that are found again, recomputed or loaded hold the numbers that were written first."""
    rng = random.Random(3)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(2 * BLOCK_SIZE + 3)]
    prompts = [[*shared, *(rng.randrange(3, VOCAB_SIZE) for _ in range(length))] for length in (1, 9, 17, 30)]

    def tokens(runner: ModelRunner, num_blocks: int | None, **options: object) -> tuple[list[list[int]], Scheduler]:
        asked = [request(prompt, 24, f"r{i}") for i, prompt in enumerate([*prompts, *prompts])]
        scheduler, _ = run_requests(runner, asked, num_blocks=num_blocks, **options)  # type: ignore[arg-type]
        return [one.sequences[0].output_token_ids.tolist() for one in asked], scheduler

    runner = small_runner(model_path, kv_dtype)
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
        for kv_dtype in ("auto", *BITS)
        for dtype in ("float32", "bfloat16")
    ]
    assert len({runner.info.block_format for runner in runners}) == 6
    for runner in runners:
        runner.close()
