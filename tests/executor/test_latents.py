"""Models with multi-head latent attention (MLA): their KV, its tiers, and refused options."""

import json
import random
from pathlib import Path

import pytest
import torch
import transformers
from pagewise_executor.models.loader import load_model
from pagewise_executor.sizing import sizing
from pagewise_scheduler.core.tiers.peer import PrefixDirectory
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError

from tests.executor.driver import request, run_requests
from tests.executor.parity import check_mixture, check_recovery
from tests.executor.references import reference
from tests.executor.runners import build_runner, peers_at
from tests.model_builders import VOCAB_SIZE, build_model, model_fixture, spoil_weights

model_path = model_fixture(
    "deepseek_v3", *(pytest.param(one, marks=pytest.mark.long) for one in ("mistral4", "glm4_moe_lite")), seed=5
)


def test_one_vector_is_kept_for_a_token(model_path: Path) -> None:
    runner = build_runner(model_path, block_size=8)
    assert runner.info.bytes_per_block == 3 * 8 * (24 + 8) * 4, "3 layers, a latent of 24 and a rotated part of 8"
    runner.close()


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_latents_come_back_from_the_host_and_are_computed_again(model_path: Path, mode: str) -> None:
    _, loaded = check_recovery(model_path, mode, 17, n=2)  # type: ignore[arg-type]
    assert (loaded > 0) == (mode == "swap")


def test_everything_mixed_at_random(model_path: Path) -> None:
    check_mixture(model_path, 1, block_size=3)


def test_what_another_executor_and_a_disk_hold_is_used(model_path: Path, tmp_path: Path) -> None:
    tiers = {"host_memory": "48KiB", "disk_cache": str(tmp_path)}
    holder, fetcher = (build_runner(model_path, exchange=peers_at(), **tiers) for _ in range(2))
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (100, 41, 64)]
    more = [[*prompt, 5, 6, 7] for prompt in prompts]
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    expected = reference(model, prompts + more, [8] * 6, "cpu")
    directory = PrefixDirectory()
    first = [request(prompt, 8, name=f"a{i}") for i, prompt in enumerate(prompts)]
    run_requests(holder, first, num_blocks=22, recovery="swap", directory=directory)
    again = [request(prompt, 8, name=f"b{i}") for i, prompt in enumerate(more)]
    scheduler, _ = run_requests(fetcher, again, recovery="swap", directory=directory)
    assert [one.sequences[0].output_token_ids.tolist() for one in first + again] == expected
    assert scheduler.kv.pool.counters.fetched > 0
    assert scheduler.kv.pool.counters.fetch_failed == 0
    assert list(tmp_path.rglob("*")), "the host has room for two or three blocks"
    for runner in (holder, fetcher):
        runner.close()


@pytest.mark.parametrize(("family", "interleaved"), [("deepseek_v2", True), ("minicpm3", False)])
def test_how_the_part_of_a_key_that_is_rotated_lies_is_found(family: str, interleaved: bool, tmp_path: Path) -> None:
    build_model(family, tmp_path)
    found = load_model(ExecutorConfig(model=str(tmp_path), device="cpu")).rotations
    assert [rotation.interleaved for rotation in found] == [interleaved] * 3


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

    for kv_dtype in ("fp8", "int8"):
        assert "whose latents are kept in the type of the model only" in refused(kv_dtype=kv_dtype)
    settings = json.loads((tmp_path / "config.json").read_text())
    sparse = settings | {"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(sparse))
    assert "layers of a kind that is not served: indexed_attention" in refused()
