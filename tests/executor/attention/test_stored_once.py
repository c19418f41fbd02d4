"""Keys that are made of their values are stored as one vector with them, and give the same attention."""

from pathlib import Path

import pytest
import torch
import transformers
from pagewise_executor.attention.stored_once import StoredOnce
from pagewise_executor.models.loader import load_model
from pagewise_executor.sizing import sizing
from pagewise_shared.config import ExecutorConfig

from tests.cpu_kernels import need_cpu_kernels
from tests.executor.driver import request, run_requests
from tests.executor.parity import check_family, check_mixture, check_recovery
from tests.executor.ranks.groups import ThreadGroup
from tests.executor.references import reference
from tests.model_builders import build_model

WINDOWED, FULL = (4, 16), (2, 40, 32, 32)
"""Shapes of layers of the tiny Gemma 4: of 32 elements eight are rotated, so 40 are stored and not 64."""


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma4")
    build_model("gemma4_moe", path, seed=5)
    return path


def test_stored_vectors_give_the_same_scores_and_values() -> None:
    torch.manual_seed(0)
    weight, v = torch.rand(16).double() + 0.5, torch.randn(9, 2, 16).double()
    k, q = v * weight, torch.randn(5, 2, 16).double()
    rotated = [0, 1, 2, 8, 9, 10]
    k[..., rotated] = torch.randn(9, 2, 6).double()
    once = StoredOnce(weight, pairs=3)
    stored_k, stored_v = once.stored(k, v)
    torch.testing.assert_close(
        torch.einsum("qhd,khd->hqk", once.queries(q), stored_k), torch.einsum("qhd,khd->hqk", q, k)
    )
    assert torch.equal(once.values(stored_v), v)
    assert once.shared == 10
    assert stored_k[..., -10:].data_ptr() == stored_v.data_ptr()
    assert stored_k.stride() == stored_v.stride() == (44, 22, 1)


def test_layers_of_full_attention_keep_one_vector(gemma4: Path) -> None:
    loaded = load_model(ExecutorConfig(model=str(gemma4), device="cpu", kernels="torch"))
    assert loaded.shapes == [*[WINDOWED] * 5, FULL]
    found = sizing(ExecutorConfig(model=str(gemma4), dtype="bfloat16"), gemma4, 24 * 2**30)
    assert found.kv_per_token == 2 * (5 * 2 * 4 * 16 + 2 * 40)
    both = sizing(ExecutorConfig(model=str(gemma4), dtype="bfloat16", kv_dtype="fp8"), gemma4, 24 * 2**30)
    assert both.groups[0].kv_per_token == 2 * 2 * (32 + 4), "K, V and their scales"


@pytest.mark.parametrize(("changes", "why"), [
    ({"num_kv_shared_layers": 2, "num_hidden_layers": 12}, "other layers read these K and V"),
    ({"rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }}, "whole keys are rotated"),
])  # fmt: skip
def test_other_layers_keep_both(changes: dict[str, object], why: str, tmp_path: Path) -> None:
    build_model("gemma4_moe", tmp_path, **changes)
    loaded = load_model(ExecutorConfig(model=str(tmp_path), device="cpu", kernels="torch"))
    assert {len(shape) for shape in loaded.shapes} == {2}, why


@pytest.mark.parametrize(("kernels", "block_size"), [("cpu", 16), ("torch", 5)])
def test_greedy_tokens_equal_generate(kernels: str, block_size: int, tmp_path: Path) -> None:
    """With prefixes that are shared, preemption, and prompts in chunks; the weights of key norms are unequal."""
    if kernels == "cpu":
        need_cpu_kernels()
    check_family("gemma4_moe", tmp_path, "cpu", block_size, kernels=kernels)


def test_greedy_tokens_equal_generate_with_all_layers_in_one_group(tmp_path: Path) -> None:
    check_family("gemma4_moe", tmp_path, "cpu", 3, layer_groups=False)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_blocks_come_back(mode: str, gemma4: Path) -> None:
    _, loaded = check_recovery(gemma4, mode, 17, n=2)  # type: ignore[arg-type]
    assert (loaded > 0) == (mode == "swap")


@pytest.mark.parametrize("kernels", ["cpu", pytest.param("torch", marks=pytest.mark.long)])
def test_everything_mixed_at_random(kernels: str, gemma4: Path) -> None:
    if kernels == "cpu":
        need_cpu_kernels()
    check_mixture(gemma4, 1, kernels=kernels, block_size=3)


def test_segments_of_a_model_with_one_group_find_the_rotation(gemma4: Path) -> None:
    loaded = load_model(ExecutorConfig(model=str(gemma4), device="cpu", kernels="torch"))
    assert [len(one.frequencies) for one in loaded.rotations] == [*[8] * 5, 4]


def test_ranks_keep_their_heads(gemma4: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(gemma4, dtype=torch.float32)
    prompts = [[3, *range(10, 26)], [4, *range(40, 45)], [3, *range(10, 18)]]
    expected = reference(model, prompts, [9] * 3, "cpu")
    group = ThreadGroup(gemma4, 2)
    requests = [request(prompt, 9, f"r{number}") for number, prompt in enumerate(prompts)]
    run_requests(group, requests, num_blocks=30, max_num_batched_tokens=11)  # type: ignore[arg-type]
    group.close()
    assert [one.sequences[0].output_token_ids.tolist() for one in requests] == expected
