"""Layers of unequal heads, and layers that read K and V of earlier ones, as the pool and the sizes count them."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from pagewise_executor.kv.kv_pool import bytes_per_block
from pagewise_executor.models.loader import load_model
from pagewise_executor.models.support import check_supported
from pagewise_executor.sizing import sizing
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError

from tests.executor.parity import check_family, check_recovery
from tests.executor.runners import build_runner
from tests.model_builders import model_fixture

STORED = [(2, 16), (2, 32), (2, 16), (2, 16), (2, 32)]
"""KV heads, and their size, of five layers of the tiny Gemma 4. The other three read K and V of layers 3 and 4."""

gemma4 = model_fixture("gemma4", seed=5)

llama4 = model_fixture("llama4", seed=5)


def test_layers_that_share_k_and_v_have_no_place_in_the_pool(gemma4: Path) -> None:
    loaded = load_model(ExecutorConfig(model=str(gemma4), device="cpu", kernels="torch"))
    assert loaded.sources == [0, 1, 2, 3, 4, 3, 3, 4]
    assert loaded.shapes == STORED
    assert len(loaded.rotations) == len(STORED)
    runner = build_runner(gemma4, kernels="torch", block_size=8, num_blocks=400)
    memory = 400 * 8 * 4 * 2 * sum(heads * dim for heads, dim in STORED)
    assert runner.info.num_pages * runner.info.page_bytes == memory, "of blocks of all layers"
    layers = [module.paged_layer for module in runner._forward_pass._layers]
    assert [layer.number for layer in layers] == loaded.sources
    assert [layer.writes_kv for layer in layers] == [True] * 5 + [False] * 3
    assert layers[6].keys.data_ptr() == layers[3].keys.data_ptr()
    assert layers[7].keys.data_ptr() == layers[4].keys.data_ptr()


def test_the_size_of_a_model_counts_the_layers_of_the_pool(gemma4: Path) -> None:
    found = sizing(ExecutorConfig(model=str(gemma4), dtype="bfloat16"), gemma4, 24 * 2**30)
    assert found.kv_per_token == bytes_per_block(STORED, 1, torch.bfloat16)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("family", ["gemma4", "llama4"])
def test_blocks_of_such_models_come_back(family: str, mode: str, request: pytest.FixtureRequest) -> None:
    check_recovery(request.getfixturevalue(family), mode, 17)  # type: ignore[arg-type]


def test_gemma_3n_equals_generate(tmp_path: Path) -> None:
    check_family("gemma3n", tmp_path, "cpu", 16)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (transformers.Llama4TextConfig(attention_chunk_size=None), "no attention_chunk_size"),
        (transformers.Gemma4TextConfig(use_bidirectional_attention="all"), "attends to later tokens"),
    ],
)
def test_settings_that_would_give_other_tokens_are_refused(config: object, why: str) -> None:
    with pytest.raises(ModelError, match=f"^m .*{why}"):
        check_supported("m", config, config)


def test_attention_chunks_that_tiles_do_not_fit_are_refused_by_name(llama4: Path, tmp_path: Path) -> None:
    settings = json.loads((llama4 / "config.json").read_text())
    for file in llama4.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(settings | {"attention_chunk_size": 24}))
    with pytest.raises(ModelError, match=r"--kernels triton: attention chunks of 24 tokens are no multiple of 16"):
        load_model(ExecutorConfig(model=str(tmp_path), device="cpu", kernels="triton"))
