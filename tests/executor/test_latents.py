"""Models with multi-head latent attention (MLA): what they keep, where it goes, and what is refused."""

import json
import random
from pathlib import Path

import pytest
import torch
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.models.loader import load_model
from pagewise_executor.sizing import sizing
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError

from tests.executor.parity import check_mixture, check_recovery
from tests.executor.ranks.groups import ThreadGroup, config_of
from tests.executor.ranks.test_families import greedy
from tests.executor.runners import build_runner
from tests.executor.test_segments import check as check_segments
from tests.executor.test_segments import load, rag_requests
from tests.executor.test_triton import LENGTHS
from tests.executor.test_triton import check as check_triton
from tests.model_builders import build_model, spoil_weights


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("latents")
    build_model("deepseek_v3", path, seed=5)
    return path


def test_one_vector_is_kept_for_a_token(model_path: Path) -> None:
    runner = build_runner(model_path, block_size=8, kernels="torch")
    assert runner.info.bytes_per_block == 3 * 8 * (24 + 8) * 4, "3 layers, a latent of 24 and a rotated part of 8"
    runner.close()


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_latents_come_back_from_the_host_and_are_computed_again(model_path: Path, mode: str) -> None:
    _, loaded = check_recovery(model_path, mode, 17, n=2, kernels="torch")  # type: ignore[arg-type]
    assert (loaded > 0) == (mode == "swap")


def test_everything_mixed_at_random(model_path: Path) -> None:
    check_mixture(model_path, 1, block_size=3, kernels="torch")


def test_segments_are_moved(tmp_path: Path) -> None:
    """A key has a part that is rotated by its position: pairs of it are neighbours in one family, in another not."""
    for family, interleaved in (("deepseek_v2", True), ("minicpm3", False)):
        build_model(family, path := tmp_path / family, seed=7)
        runner = build_runner(path, kernels="torch", block_size=8)
        found = load_model(ExecutorConfig(model=str(path), device="cpu", kernels="torch")).rotations
        assert [rotation.interleaved for rotation in found] == [interleaved] * 3
        check_segments(runner, load(path), rag_requests(random.Random(5), 4), max_num_batched_tokens=40)


@pytest.mark.interpreted
def test_triton_kernels_give_the_tokens_of_transformers(tmp_path: Path, device: torch.device) -> None:
    check_triton("deepseek_v3", tmp_path, device.type, LENGTHS, host_memory="1MiB", verify_copies=True)


def test_ranks_divide_the_query_heads(tmp_path: Path) -> None:
    build_model("deepseek_v3", tmp_path, seed=7)
    expected, _ = greedy(ModelRunner(config_of(tmp_path, 1, kernels="torch")))
    group = ThreadGroup(tmp_path, 2, kernels="torch")
    found, preempted = greedy(group)  # type: ignore[arg-type]
    group.close()
    assert found == expected
    assert preempted > 0


def test_the_memory_of_real_models(tmp_path: Path) -> None:
    """DeepSeek V3: 61 layers of 512 + 64 numbers of two bytes."""
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "dtype": "bfloat16"})
    )
    assert sizing(ExecutorConfig(tensor_parallel=16), tmp_path, 141 * 2**30).kv_per_token == 61 * 576 * 2 == 70_272


def test_what_cannot_be_kept_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    build_model("deepseek_v3", tmp_path)
    spoil_weights(tmp_path)

    def refused(**options: object) -> str:
        with pytest.raises(ModelError) as refusal:
            load_model(ExecutorConfig(model=str(tmp_path), device="cpu", **options))  # type: ignore[arg-type]
        return str(refusal.value)

    assert "whose latents are kept in the type of the model only" in refused(kv_dtype="fp8")
    settings = json.loads((tmp_path / "config.json").read_text())
    sparse = settings | {"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(sparse))
    assert "layers of a kind that keeps no paged KV: indexed_attention" in refused()
