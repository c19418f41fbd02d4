"""``--kv-mapping mmu`` gives the tokens of transformers and of block tables, with all copies of KV."""

import random
from pathlib import Path

import pytest
import torch
import transformers
from pagewise_executor.attention import mapped_attention
from pagewise_executor.attention.mapped_attention import MappedBackend
from pagewise_executor.kv.cuda_memory import CudaMemory, load_driver
from pagewise_executor.kv.page_tables import PageTables
from pagewise_executor.model_runner import ModelRunner
from pagewise_scheduler.core.tiers.recovery_plan import RecoveryMode
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError
from pagewise_shared.protocol import unpack_float32s

from tests.executor.cuda_driver import FakeDriver
from tests.executor.driver import request, run_requests
from tests.executor.parity import check_beams, check_family, check_mixture, check_recovery
from tests.executor.references import reference
from tests.executor.runners import build_runner
from tests.model_builders import VOCAB_SIZE, model_fixture

MMU = {"kv_mapping": "mmu", "max_num_seqs": 32}
SHAPES = {
    "llama": {"head_dim": 16},
    "mistral": {"head_dim": 16},  # with a sliding window
    "gemma2": {},  # and a softcap
    "gemma3": {},
    "gpt_oss": {},  # with attention sinks
    "qwen3_moe": {},
    "gpt2": {"n_embd": 64},  # a KV head for each query head
}
"""Models of which 32 tokens take whole pages."""

model_path = model_fixture("llama", seed=5, head_dim=64)  # 8 tokens take a page


def pages_of(runner: ModelRunner) -> PageTables:
    assert isinstance(runner._forward_pass.attention, MappedBackend)
    pages = runner._forward_pass.attention._pages
    assert pages is not None
    return pages


@pytest.mark.parametrize(("family", "layout"), [(f, ("layers", "blocks")[i % 2]) for i, f in enumerate(SHAPES)])
def test_greedy_tokens_equal_generate(family: str, layout: str, tmp_path: Path) -> None:
    check_family(family, tmp_path, "cpu", 32, shape=SHAPES[family], kv_layout=layout, **MMU)


@pytest.mark.parametrize("layout", ["layers", "blocks"])
@pytest.mark.parametrize(("mode", "n"), [("swap", 1), ("both", 4), ("recompute", 1), ("auto", 4)])
def test_greedy_tokens_stay_equal_whichever_method_recovers_kv(
    model_path: Path, mode: RecoveryMode, n: int, layout: str
) -> None:
    runner, loaded = check_recovery(model_path, mode, 17, n=n, kernels="torch", kv_layout=layout, **MMU)
    assert (loaded > 0) == (mode != "recompute")
    assert pages_of(runner).num_mapped > 17


@pytest.mark.parametrize("seed", range(6))
def test_everything_mixed_at_random(model_path: Path, seed: int) -> None:
    layout = ("layers", "blocks")[seed % 2]
    check_mixture(
        model_path, seed, kernels="torch", kv_layout=layout, block_size=random.Random(seed).choice([8, 16]), **MMU
    )


@pytest.mark.parametrize(("width", "n"), [(2, 2), (5, 5)])
def test_beams_equal_those_of_transformers(model_path: Path, width: int, n: int) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    check_beams(build_runner(model_path, kernels="torch", **MMU), model, width, n, False)


def test_samples_and_log_probabilities_are_those_of_block_tables(model_path: Path) -> None:
    settings = [
        {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 1.0, "logprobs": 0},
        {"temperature": 0.8, "top_k": 7, "repetition_penalty": 1.2, "logprobs": 0},
    ]
    sampled, found = [], []
    for mapping in ("table", "mmu"):
        runner = build_runner(model_path, kernels="torch", **MMU | {"kv_mapping": mapping})
        requests = [
            request(list(range(3, 44 + i)), 30, f"r{i}", n=3, seed=11 + i, **setting)
            for i, setting in enumerate(settings)
        ]
        _, steps = run_requests(runner, requests, num_blocks=40, max_num_batched_tokens=13, arrive_every=2)
        sampled.append([one.output_token_ids.tolist() for asked in requests for one in asked.sequences])
        entries = [entry for step in steps for _, own in step.prompt_logprobs for entry in own]
        for asked in requests:
            entries += [step.logprobs[one] for one in asked.sequences for step in steps if one in step.logprobs]
        found.append([number for entry in entries for number in (entry.logprob, *unpack_float32s(entry.top_logprobs))])
    assert sampled[0] == sampled[1]
    assert found[1] == pytest.approx(found[0], abs=1e-4)


def test_what_sequences_share_is_the_same_memory_at_several_addresses(model_path: Path) -> None:
    runner = build_runner(model_path, kernels="torch", **MMU)
    prompt = [3 + i % 190 for i in range(40)]
    asked = request(prompt, 4, n=4)
    scheduler, _ = run_requests(runner, [asked], max_num_batched_tokens=48)
    pages = pages_of(runner)
    shared = [pages.context(row).keys[1][:40] for row in range(4)]
    assert len({tensor.data_ptr() for tensor in shared}) == 4
    assert pages.num_mapped > scheduler.kv.pool.counters.by_name()["copied"] + 20, "each row maps the five blocks"
    block = int(pages._mapped[0, 0])
    runner._pool.keys[1][block] = 7.0
    assert all((tensor[:8] == 7.0).all() for tensor in shared)
    assert not any((tensor[8:] == 7.0).all(dim=-1).any() for tensor in shared)


def test_a_runner_takes_batches_of_other_sizes(model_path: Path) -> None:
    runner = build_runner(model_path, kernels="torch", **MMU)
    prompt = list(range(3, 40))
    tokens = []
    for rows in (1, 32, 4):
        asked = request(prompt, 9)
        run_requests(runner, [asked], max_num_seqs=rows)
        tokens.append(asked.sequences[0].output_token_ids.tolist())
    assert tokens[0] == tokens[1] == tokens[2]


def test_the_driver_of_a_gpu_gives_the_same_tokens(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the driver itself, which is a fake, and the device."""
    memories: list[CudaMemory] = []

    def fake_memory(device: torch.device) -> CudaMemory:
        driver = FakeDriver(8192, 64 * 2**20)
        memories.append(CudaMemory(driver, device, driver.tensor_at))
        return memories[-1]

    monkeypatch.setattr(mapped_attention, "physical_memory", fake_memory)
    for layout in ("layers", "blocks"):
        _, loaded = check_recovery(model_path, "both", 10, n=4, kernels="torch", block_size=16, kv_layout=layout, **MMU)
        assert loaded > 0
        driver = memories[-1]._driver
        assert driver.calls["unmap"] > 0
        assert set(driver.mapped) == driver.accessible


def test_what_cannot_be_mapped_is_refused(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is no whole number of pages of 4096: take a multiple of 8 as --block-size"):
        build_runner(model_path, block_size=12, kernels="torch", **MMU)
    with pytest.raises(
        ModelError, match=r"can take 98305 memory maps.*--kv-layout blocks, one map for a block instead of 6"
    ):
        build_runner(model_path, kernels="torch", kv_mapping="mmu")
    with pytest.raises(ModelError, match="on a GPU needs cuda-bindings: pip install cuda-bindings"):
        load_driver()
    runner = ModelRunner(
        ExecutorConfig(model=str(model_path), kv_mapping="mmu", kv_layout="blocks", num_blocks=20, profile=False)
    )
    assert runner.info.kernels == "torch", "auto takes what can"
    prompt = [random.Random(1).randrange(3, VOCAB_SIZE) for _ in range(30)]
    asked = request(prompt, 8)
    run_requests(runner, [asked])
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    assert [asked.sequences[0].output_token_ids.tolist()] == reference(model, [prompt], [8], "cpu")
