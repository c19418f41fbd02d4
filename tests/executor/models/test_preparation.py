"""Fusing, packing and quantising while a model is loaded: memory and log lines."""

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pagewise_executor.models import loader, preparation
from pagewise_executor.models.loader import LoadedModel, load_model
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError

from tests.cpu_kernels import need_cpu_kernels
from tests.model_builders import FUSED, build_model

LOAD = """
import json, os, sys

def resident(key):
    return int(open("/proc/self/status").read().split(key + ":")[1].split()[0]) * 1024

import torch
from pagewise_executor.models import loader
from pagewise_kernels.cpu.library import load_library
from pagewise_shared.config import ExecutorConfig

load_library()
every, own, small = json.loads(sys.argv[1])
if not own:
    import transformers
    transformers.LlamaForCausalLM
    loader.llama_checkpoint = lambda *_: None
for options in every:
    if not (child := os.fork()):
        # Pages of libraries that loading needs are not counted: how many come with one is the page cache's matter.
        loader.load_model(ExecutorConfig(device="cpu", **options | {"model": small}))
        open("/proc/self/clear_refs", "w").write("5")  # the peak is that from now on
        before = resident("VmRSS")
        loaded = loader.load_model(ExecutorConfig(device="cpu", **options))
        assert (type(loaded.model).__module__ == "pagewise_executor.models.llama") is own
        print(resident("VmHWM") - before, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A model of 16 layers with 13 MB each, and the bytes of its weights; in ``small``, one with one layer."""
    path = tmp_path_factory.mktemp("large")
    shape = {"hidden_size": 512, "intermediate_size": 1408, "num_key_value_heads": 4}
    build_model("llama", path, num_hidden_layers=16, **shape)
    build_model("llama", path / "small", num_hidden_layers=1, **shape)
    return path, (path / "model.safetensors").stat().st_size


def peaks_of_loading(*options: dict[str, object], own: bool = True) -> list[int]:
    """Bytes by which processes of their own have grown at most while they loaded a model, one for each ``options``."""
    small = str(Path(str(options[0]["model"]), "small"))
    command = [sys.executable, "-c", LOAD, json.dumps([options, own, small])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.splitlines()]


def test_loading_takes_the_memory_of_what_is_kept_and_of_one_layer(large: tuple[Path, int]) -> None:
    need_cpu_kernels()
    path, size = large
    kinds = {"quantization": "int8"}, {"quantization": "fp8"}, {"kernels": "cpu"}, {"kernels": "torch"}
    int8, fp8, cpu, plain = peaks_of_loading(*({"model": str(path), **kind} for kind in kinds))
    assert int8 < 0.75 * size, "a quarter is kept"
    assert fp8 < 0.75 * size, "and here as well"
    assert cpu < 1.5 * size
    assert plain < 1.5 * size


def test_a_model_of_transformers_is_released_layer_by_layer(large: tuple[Path, int]) -> None:
    need_cpu_kernels()
    path, size = large
    # The file counts as well, because transformers maps it.
    kinds = {"quantization": "int8"}, {"kernels": "cpu"}
    int8, cpu = peaks_of_loading(*({"model": str(path), **kind} for kind in kinds), own=False)
    assert int8 < 1.75 * size
    assert cpu < 2.5 * size


def weights_of(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    found = {}
    for name, module in loaded.model.named_modules():
        packed = getattr(module, "packed", None)
        if packed is not None:
            found[name] = packed.to_dense() if isinstance(packed, torch.Tensor) else packed.packed
    return found | dict(loaded.model.named_parameters())


@pytest.mark.parametrize(
    "options", [{"quantization": "int8"}, {"quantization": "int4"}, {"kernels": "cpu"}, {"kernels": "torch"}]
)
@pytest.mark.parametrize("family", FUSED)
def test_weights_are_the_same_whoever_reads_them(
    family: str, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_cpu_kernels()
    build_model(family, tmp_path, tie_word_embeddings=family == "qwen2")
    config = ExecutorConfig(model=str(tmp_path), device="cpu", **options)  # type: ignore[arg-type]
    own = weights_of(load_model(config))
    monkeypatch.setattr(loader, "llama_checkpoint", lambda *_: None)
    theirs = weights_of(load_model(config))
    assert own.keys() == theirs.keys()
    assert len([name for name in own if name.endswith(("qkv", "out", "gate_up", "down", "lm_head"))]) == 13
    assert all(torch.equal(own[name], theirs[name]) for name in own)


def test_the_parts_of_every_family_are_its_layers_and_what_is_beside_them(tmp_path: Path) -> None:
    for family in ("gpt2", "opt", "qwen3_moe"):
        model = build_model(family, tmp_path / family)
        parts = list(preparation.parts_of(model))
        within = [name for part in parts for name, _ in model.get_submodule(part).named_parameters(prefix=part)]
        tied = {"lm_head.weight"}
        assert sorted(set(within) - tied) == sorted({name for name, _ in model.named_parameters()} - tied)
        assert sum(bool(re.search(r"\.\d+$", part)) for part in parts) == 3


def quantised_log(path: Path, caplog: pytest.LogCaptureFixture, quantization: Any = "int8") -> logging.LogRecord:
    with caplog.at_level(logging.INFO):
        load_model(ExecutorConfig(model=str(path), device="cpu", quantization=quantization))
    (record,) = [one for one in caplog.records if "in eight bits" in one.getMessage()]
    return record


def test_the_log_says_how_much_quantisation_changes_the_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    need_cpu_kernels()
    model = build_model("llama", tmp_path).requires_grad_(False)
    squares, error, linear = 0.0, 0.0, 0
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and "embed" not in name:
            scale = weight.abs().amax(dim=1, keepdim=True) / 127
            squares += float(weight.double().square().sum())
            error += float((weight - (weight / scale).round() * scale).double().square().sum())
            linear += weight.numel()
    record = quantised_log(tmp_path, caplog)
    assert record.levelno == logging.INFO
    others = sum(weight.numel() for weight in model.parameters()) - linear
    assert f"{linear} weights" in record.getMessage()
    assert f"changes them by {100 * (error / squares) ** 0.5:.2f}%" in record.getMessage()
    assert "docs/quantization.md" in record.getMessage()
    assert f"{others} weights stay in float32: Embedding {199 * 48}" in record.getMessage()
    caplog.clear()
    four = quantised_log(tmp_path, caplog, "int4").getMessage()
    assert f"{linear - 199 * 48} weights are in four bits, {199 * 48} weights are in eight bits (13 linear" in four
    assert 4 < float(re.findall(r"changes them by (.*)%", four)[0]) < 12


def test_the_log_says_that_experts_stay_in_float32_but_with_int4(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    need_cpu_kernels()
    build_model("qwen3_moe", tmp_path, num_experts=8, moe_intermediate_size=96)
    record = quantised_log(tmp_path, caplog)
    assert record.levelno == logging.WARNING, "most of the weights stay"
    assert re.search(r"weights stay in float32: CpuExperts 0\.3M, ", record.getMessage())
    caplog.clear()
    four = quantised_log(tmp_path, caplog, "int4")
    assert four.levelno == logging.INFO
    assert "3 layers of experts by the CPU operations" in four.getMessage()
    assert "CpuExperts" not in four.getMessage()


def test_a_layer_that_cannot_be_quantised_is_named_as_the_reason(tmp_path: Path) -> None:
    need_cpu_kernels()
    build_model("llama", tmp_path, hidden_size=16, num_attention_heads=2, intermediate_size=65_537, num_hidden_layers=1)
    with pytest.raises(ModelError, match="cannot be loaded: 65537 inputs are too many"):
        load_model(ExecutorConfig(model=str(tmp_path), device="cpu", quantization="int8"))
