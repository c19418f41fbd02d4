"""Models with several groups of layers: their tokens, shared memory, and blocks that are never read."""

import logging
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from pagewise_executor.attention.registry import Kernels
from pagewise_executor.group_choice import choose_pages
from pagewise_executor.kv.page_pool import PagePool
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.models.loader import load_model
from pagewise_executor.page_map import NULL_PAGE
from pagewise_executor.runner import Runner
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_shared.config import ExecutorConfig, SpeculativeConfig
from pagewise_shared.protocol import LayerGroup

from tests.cpu_kernels import need_cpu_kernels
from tests.executor.driver import request, run_requests
from tests.executor.parity import check_family, check_mixture, check_recovery
from tests.executor.poisoned_runner import PoisonedRunner
from tests.executor.ranks.groups import ThreadGroup, config_of
from tests.executor.references import reference
from tests.executor.runners import build_runner
from tests.model_builders import EAGER, VOCAB_SIZE, build_model, model_fixture

FAMILIES = ("gemma3", "gpt_oss", "gemma4", "llama4", "olmo3")
FURTHER = ("gemma4_moe", "ministral", "gemma2", "gemma3n")

model_path = model_fixture(*FAMILIES, *(pytest.param(one, marks=pytest.mark.long) for one in FURTHER), seed=7)

gemma3 = model_fixture("gemma3", seed=7)


def test_groups_share_the_memory_of_all_layers(gemma3: Path) -> None:
    runner = build_runner(gemma3, host_memory=None, num_blocks=50)
    info, pool = runner.info, runner._pool
    assert info.groups == (LayerGroup(1, 1), LayerGroup(6, 6, 9))
    assert isinstance(pool, PagePool)
    assert info.num_pages * info.page_bytes == 50 * 7 * 2 * 8 * 2 * 16 * 4
    assert (info.num_blocks, info.bytes_per_block) == (info.num_pages, info.page_bytes)
    assert pool.num_blocks == 1 + info.num_pages
    memory = {layer.keys.untyped_storage().data_ptr() for layer in pool.layers}
    assert len(memory) == 1
    assert "do not keep all tokens" in info.no_segments
    runner.close()


def test_olmo_3_equals_generate(tmp_path: Path) -> None:
    check_family("olmo3", tmp_path, "cpu", 5)


@pytest.mark.parametrize("kernels", [pytest.param("torch", marks=pytest.mark.long), "cpu"])
def test_everything_mixed_at_random(model_path: Path, kernels: str) -> None:
    """Beams, several outputs, prefix hits and preemption, in too little memory."""
    if kernels == "cpu":
        need_cpu_kernels()
    check_mixture(model_path, len(kernels), kernels=kernels, block_size=3, host_memory=None)


@pytest.mark.long
def test_conversations_are_computed_again(gemma3: Path) -> None:
    check_recovery(gemma3, "recompute", 17, n=2, host_memory=None)


def serve(runner: Runner, **options: object) -> tuple[Scheduler, list[list[int]]]:
    """The greedy outputs of prompts, some of which repeat themselves, in memory for a few of them."""
    rng = random.Random(3)
    phrase = [rng.randrange(3, VOCAB_SIZE) for _ in range(5)]
    prompts = [[3 + number, *phrase * (1 + number)] for number in range(4)]
    prompts.append([rng.randrange(3, VOCAB_SIZE) for _ in range(40)])
    requests = [request(prompt, 20, f"r{number}", allowed=(*phrase, 7)) for number, prompt in enumerate(prompts)]
    scheduler, _ = run_requests(
        runner, requests, num_blocks=14, max_num_seqs=4, max_num_batched_tokens=19, arrive_every=2,
        **options,  # type: ignore[arg-type]
    )  # fmt: skip
    return scheduler, [one.sequences[0].output_token_ids.tolist() for one in requests]


@pytest.mark.parametrize("kernels", ["torch", "cpu"])
def test_drafts_are_verified(gemma3: Path, kernels: str) -> None:
    if kernels == "cpu":
        need_cpu_kernels()
    runner = build_runner(gemma3, kernels=kernels, host_memory=None)
    _, expected = serve(runner)
    speculative = SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_max=2, prompt_lookup_min=1)
    scheduler, found = serve(runner, speculative=speculative)
    assert found == expected
    assert scheduler.features.drafts.num_accepted_tokens > 5
    assert runner.info.groups


def test_ranks_have_the_same_groups(gemma3: Path) -> None:
    _, expected = serve(ModelRunner(config_of(gemma3, 1)))
    group = ThreadGroup(gemma3, 2)
    assert group.info.groups
    scheduler, found = serve(group)  # type: ignore[arg-type]
    group.close()
    assert found == expected
    assert scheduler.num_preemptions > 0


@pytest.mark.interpreted
def test_triton_kernels_read_pages(gemma3: Path, device: torch.device) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(gemma3, dtype=torch.float32).to(device)
    prompts = [[3, *range(10, 26)], [4, *range(40, 45)], [3, *range(10, 18)]]
    expected = reference(model, prompts, [5] * 3, device.type)
    runner = build_runner(
        gemma3, device.type, kernels="triton", host_memory=None, block_size=4, max_num_seqs=32,
        max_num_batched_tokens=32,
    )  # fmt: skip
    assert runner.info.groups
    requests = [request(prompt, 5, f"r{number}") for number, prompt in enumerate(prompts)]
    run_requests(runner, requests, num_blocks=14, max_num_seqs=3, max_num_batched_tokens=11, arrive_every=2)
    assert [one.sequences[0].output_token_ids.tolist() for one in requests] == expected


# ---- one group -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernels", "options", "reason"),
    [
        ("torch", {"layer_groups": False}, "--no-layer-groups"),
        ("torch", {"kv_mapping": "mmu"}, "--kv-mapping mmu"),
        *(("triton", {"attention": name}, f"--attention {name}") for name in ("fa3", "flashinfer", "gluon")),
        *(("triton", {"attention": name}, None) for name in ("auto", "triton")),
    ],
)
def test_features_that_need_one_group_get_it(
    gemma3: Path, kernels: Kernels, options: dict[str, object], reason: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    loaded = replace(load_model(ExecutorConfig(model=str(gemma3), device="cpu", kernels="torch")), kernels=kernels)
    config = ExecutorConfig(model=str(gemma3), **options)  # type: ignore[arg-type]
    pages = choose_pages(config, loaded, torch.float32)
    lines = [record.getMessage() for record in caplog.records if "windowed layers keep all tokens" in record.message]
    if reason is None:
        assert pages is not None
        assert not lines
    else:
        assert pages is None
        (line,) = lines
        assert reason in line


@pytest.mark.parametrize(
    ("family", "shape", "line"),
    [
        ("gemma3", {}, None),
        ("mistral", {}, "3 layers with a window keep all tokens, because no layer sees more"),
        ("gemma3", {"layer_types": ["sliding_attention"] * 7}, "7 layers with a window keep all tokens"),
    ],
)
def test_windows_that_are_kept_whole_are_logged(
    family: str, shape: dict[str, object], line: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    build_model(family, tmp_path, **shape)
    config = ExecutorConfig(model=str(tmp_path), device="cpu", kernels="torch")
    assert (choose_pages(config, load_model(config), torch.float32) is None) == (line is not None)
    assert any("keep all tokens" in record.getMessage() for record in caplog.records) == (line is not None)
    assert line is None or line in caplog.text


@pytest.mark.parametrize("options", [{"kv_mapping": "mmu", "block_size": 32}, {"layer_groups": False}])
def test_executors_with_one_group_move_segments(gemma3: Path, options: dict[str, object]) -> None:
    runner = build_runner(gemma3, kernels="torch", host_memory=None, **options)  # type: ignore[arg-type]
    assert not runner.info.groups
    assert not runner.info.no_segments
    runner.close()


# ---- poisoned pools -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", [pytest.param("torch", marks=pytest.mark.long), "cpu"])
def test_freed_pages_are_never_read(model_path: Path, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels == "cpu":
        need_cpu_kernels()
    eager = any(family in str(model_path) for family in EAGER)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation="eager" if eager else "sdpa"
    )
    runner = PoisonedRunner(
        ExecutorConfig(
            model=str(model_path), device="cpu", dtype="float32", kernels=kernels, block_size=4, num_blocks=200,
            profile=False,
        )  # type: ignore[arg-type]
    )  # fmt: skip
    runner.attend_to(monkeypatch)
    rng = random.Random(4)
    base = [rng.randrange(3, VOCAB_SIZE) for _ in range(70)]
    prompts = [base[: rng.randrange(1, 70)] + [3 + number] * rng.randrange(3) for number in range(6)]
    expected = reference(model, prompts, [14] * len(prompts), "cpu")
    requests = [request(prompt, 14, f"r{number}") for number, prompt in enumerate(prompts)]
    run_requests(runner, requests, num_blocks=26, max_num_seqs=5, max_num_batched_tokens=13, arrive_every=3)
    assert [one.sequences[0].output_token_ids.tolist() for one in requests] == expected
    assert runner.most_poisoned > 5
    assert not runner._pool.regions[0][0, NULL_PAGE].any()
