"""``pagewise size`` computes what the loader and the pool compute, and the document's numbers are its own."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pagewise_executor.kv.kv_pool import bytes_per_block
from pagewise_executor.models.loader import load_model
from pagewise_executor.models.packed_linear import Int8Linear
from pagewise_executor.models.quantised_linear import QuantisedLinear
from pagewise_executor.models.weight_files import checked_headers
from pagewise_executor.sizing import main, sizing
from pagewise_shared.config import DEMO_MODEL, ExecutorConfig
from pagewise_shared.errors import PagewiseError
from pagewise_shared.model_files import resolve_model

from tests.model_builders import VOCAB_SIZE, build_model, need_states

DOCUMENT = Path(__file__).parents[2] / "docs" / "sizing.md"
GIB = 2**30
SHAPES: dict[str, dict[str, Any]] = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80},
}
"""Llama 3's, with what both have in common below."""
COMMON = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}
GEMMA_3_27B: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_size": 5376,
    "intermediate_size": 21_504,
    "num_attention_heads": 32,
    "num_hidden_layers": 62,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "sliding_window": 1024,
    "vocab_size": 262_208,
    "tie_word_embeddings": True,
}
CASES = [
    ("8B", 24, 1, "none", "auto"),
    ("8B", 24, 1, "fp8", "auto"),
    ("8B", 24, 1, "fp8", "fp8"),
    ("8B", 24, 2, "none", "auto"),
    ("8B", 80, 1, "none", "auto"),
    ("8B", 80, 1, "fp8", "fp8"),
    ("70B", 24, 8, "none", "auto"),
    ("70B", 24, 4, "fp8", "auto"),
    ("70B", 24, 8, "fp8", "auto"),
    ("70B", 80, 1, "fp8", "auto"),
    ("70B", 80, 2, "none", "auto"),
    ("70B", 80, 2, "fp8", "auto"),
    ("70B", 80, 4, "none", "auto"),
    ("70B", 80, 4, "fp8", "fp8"),
]


def directory(folder: Path, shape: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(COMMON | shape))
    return folder


def row(case: tuple[str, int, int, Any, Any], folder: Path) -> str:
    """A line of the document's table."""
    name, memory, ranks, quantization, kv_dtype = case
    config = ExecutorConfig(tensor_parallel=ranks, quantization=quantization, kv_dtype=kv_dtype)
    found = sizing(config, directory(folder / name, SHAPES[name]), memory * GIB)
    before = (found.weights, found.steps, found.graphs)
    kind = {"none": "bfloat16", "fp8": "FP8"}[quantization]
    cells = [
        f"{name}, {kind}" + (", KV FP8" if kv_dtype == "fp8" else ""),
        f"{ranks} of {memory} GiB",
        *(f"{size / GIB:.1f}" for size in before),
        f"{found.pool / GIB:.1f}" if found.pool_tokens else "does not fit",
        f"{found.kv_per_token / 1024:g} KiB",
        f"{found.pool_tokens:,}" if found.pool_tokens else "",
        f"{found.pool_tokens // 4096:,}" if found.pool_tokens else "",
    ]
    return f"| {' | '.join(cells)} |"


def test_the_document_has_these_numbers(tmp_path: Path) -> None:
    rows = "\n".join(row(case, tmp_path) for case in CASES)
    assert rows in DOCUMENT.read_text(), f"the table in docs/sizing.md should be:\n{rows}"


@pytest.mark.parametrize("family", [None, "gemma2", "gpt2", "gpt_oss"])
def test_weights_and_kv_are_what_the_loader_takes(family: str | None, tmp_path: Path) -> None:
    if family is not None:
        build_model(family, tmp_path)
    name = DEMO_MODEL if family is None else str(tmp_path)
    config = ExecutorConfig(model=name, device="cpu", dtype="float32", kernels="torch")
    found = sizing(config, resolve_model(config.model), GIB * 8)
    loaded = load_model(config)
    block = bytes_per_block(loaded.shapes, config.block_size, loaded.dtype)
    assert found.kv_per_token == block // config.block_size
    headers = checked_headers(loaded.weight_files)
    shapes = [tensor.shape for header in headers.values() for tensor in header.values()]
    assert found.weights == sum(map(math.prod, shapes)) * loaded.dtype.itemsize
    assert found.max_model_len == loaded.max_model_len
    assert found.allowed == found.pool + found.weights + found.context + found.steps + found.graphs


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(("quantization", "dtype"), [("fp8", "float16"), ("int8", "float32")])
def test_quantised_weights_are_those_that_the_loader_quantises(
    quantization: Any, dtype: str, family: str, tied: bool, tmp_path: Path
) -> None:
    """Experts, embeddings, and with FP8 heads stay in the type of the model."""
    build_model(family, tmp_path, tie_word_embeddings=tied)
    config = ExecutorConfig(model=str(tmp_path), device="cpu", dtype=dtype, kernels="torch", quantization=quantization)
    model = load_model(config).model
    eight = [module for module in model.modules() if isinstance(module, Int8Linear | QuantisedLinear)]
    assert eight
    kept = sum(weight.numel() for weight in model.parameters())
    # Biases and norms of heads that are no parameters any more.
    kept += (
        sum(len(module.weight) for module in eight) - VOCAB_SIZE * (quantization == "int8") if family == "gpt2" else 0
    )
    kept += 3 * 2 * 16 if family == "qwen3_moe" else 0
    in_bytes = sum(module.weight.numel() + 4 * len(module.weight) for module in eight)
    found = sizing(config, tmp_path, GIB)
    assert found.weights == in_bytes + kept * getattr(torch, dtype).itemsize


FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def test_quantised_checkpoints_count_in_eight_bits(tmp_path: Path) -> None:
    def weights(folder: str, shape: dict[str, Any], **options: Any) -> int:
        return sizing(ExecutorConfig(**options), directory(tmp_path / folder, shape), 80 * GIB).weights

    shape = SHAPES["8B"] | {"rms_norm_eps": 1e-5, "hidden_act": "silu", "architectures": ["LlamaForCausalLM"]}
    stored, converted = weights("8B", shape | FP8), weights("plain", shape, quantization="fp8")
    assert stored == converted
    on_cpu, on_gpu = (weights("plain", shape, quantization="int4", device=device) for device in ("cpu", "auto"))
    assert on_gpu - on_cpu == 128_256 * (4096 - 4), "on GPUs the head stays in 16 bits"
    mixture = {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32}
    mixture |= {"num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768, "vocab_size": 151_936}
    assert 28 < weights("mixture", mixture | FP8) / GIB < 30, "30.5 billion, of which embeddings and head in 16 bits"
    awq = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    linears = 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    assert weights("8B", shape | awq) == converted - linears - 4 * 32 * (2 * 14336 + 3 * 4096 + 2 * 1024) + (
        linears // 2 + linears // 128 * 3
    )
    assert 15.5 < weights("mixture", mixture | awq) / GIB < 16.5


def test_quantised_checkpoints_that_the_loader_refuses_have_no_size(tmp_path: Path) -> None:
    def refused(kind: str, ranks: int) -> str:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind} | FP8))
        with pytest.raises(PagewiseError) as refusal:
            sizing(ExecutorConfig(tensor_parallel=ranks), tmp_path, 80 * GIB)
        return str(refusal.value)

    assert "quantised checkpoints are served of Llama" in refused("minicpm3", 1)
    assert "quantised checkpoints of gemma2 are not divided among ranks" in refused("gemma2", 2)


def test_ranks_share_weights_and_kv_heads(tmp_path: Path) -> None:
    path = directory(tmp_path, SHAPES["8B"])
    one, two = (sizing(ExecutorConfig(tensor_parallel=ranks), path, 24 * GIB) for ranks in (1, 2))
    assert (one.kv_per_token, two.kv_per_token) == (2 * 32 * 8 * 128 * 2, 32 * 8 * 128 * 2)
    assert two.weights == one.weights // 2
    with pytest.raises(PagewiseError, match="numbers of ranks that work: 1, 2, 4, 8"):
        sizing(ExecutorConfig(tensor_parallel=3), path, 24 * GIB)


def test_windowed_layers_keep_their_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = directory(tmp_path, GEMMA_3_27B)
    assert main([str(path), "--gpu-memory", "80GiB", "--max-num-batched-tokens", "2048", "--max-num-seqs", "256"]) == 0
    printed = capsys.readouterr().out
    assert printed in DOCUMENT.read_text(), f"docs/sizing.md should have this:\n{printed}"
    found = sizing(ExecutorConfig(), path, 80 * GIB)
    assert [(group.layers, group.window) for group in found.groups] == [(10, 0), (52, 1024)]
    assert [group.kv_per_token for group in found.groups] == [10 * 2 * 16 * 128 * 2, 52 * 2 * 16 * 128 * 2]
    assert found.kv_per_token * 131_072 / found.sequences[-1].decoding > 5.9
    assert found.full_sequences < 1
    longest = sizing(ExecutorConfig(max_model_len="auto"), path, 80 * GIB)
    assert longest.max_model_len == found.pool_tokens < 131_072
    assert longest.full_sequences == 1


def test_attention_chunks_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama4_text", "dtype": "bfloat16"}))
    main([str(tmp_path), "--gpu-memory", "80GiB"])
    assert "144KiB in 36 layers that see their chunk of 8,192 tokens\n" in capsys.readouterr().out


def test_the_command_reads_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(memory: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "pagewise.main", "size", str(tmp_path), "--gpu-memory", memory]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    directory(tmp_path, SHAPES["8B"])
    fits = run("24GiB")
    assert fits.returncode == 0
    assert "each token of KV takes 128KiB" in fits.stdout
    wrong = run("much")
    assert (wrong.returncode, "Traceback" in wrong.stderr, "is not a size" in wrong.stderr) == (1, False, True)
    assert main([str(tmp_path), "--gpu-memory", "12GiB", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["pool_tokens"] == 0


def test_kv_and_states_are_printed_where_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory(tmp_path / "8B", SHAPES["8B"])
    assert main([str(tmp_path / "8B"), "--gpu-memory", "12GiB"]) == 1
    printed = capsys.readouterr().out
    assert "nothing is left for KV: take more GPUs (--tensor-parallel), or larger ones\n" in printed
    assert "each token of KV takes 128KiB" in printed
    assert main([str(tmp_path / "8B"), "--gpu-memory", "14GiB"]) == 1
    assert "or larger ones, or --quantization fp8\n" in capsys.readouterr().out
    need_states()
    (tmp_path / "hybrid").mkdir()
    (tmp_path / "hybrid/config.json").write_text(json.dumps({"model_type": "qwen3_next", "dtype": "bfloat16"}))
    assert main([str(tmp_path / "hybrid"), "--gpu-memory", "80GiB"]) == 1
    printed = capsys.readouterr().out
    assert "each token of KV takes 24KiB in 12 layers that see all tokens" in printed
    assert "the states of 36 recurrent layers take 74.25MiB" in printed
    assert "fit" not in printed, "nothing does"
