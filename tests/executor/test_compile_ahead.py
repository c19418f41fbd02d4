"""Kernels are compiled in a process of their own while weights are read, so that the start finds them in the cache."""

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from pagewise_executor.collectives import ALONE, Ranks
from pagewise_executor.models import compilation
from pagewise_executor.models.compilation import Ahead, Compilation, begin_compilation, link_shipped
from pagewise_shared.config import ExecutorConfig

from benchmarks.processes import alive
from tests.model_builders import build_model

CUDA = torch.device("cuda", 0)


def started(family: str, folder: Path, options: dict[str, Any], *, ahead: bool = True, **shape: int) -> dict[str, Any]:
    """The kernels that a start found in the cache, and the kernels that it had to compile."""
    build_model(family, folder, **shape)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.executor.rehearsed_start", str(folder), json.dumps(options)]
    command += [] if ahead else ["--not-ahead"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.stdout.startswith("skipped") or "no C compiler" in done.stderr:
        pytest.skip(done.stdout + done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.long
@pytest.mark.interpreted  # where there is a GPU, its driver is loaded
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"quantization": "fp8", "kv_dtype": "fp8"}),
        ("llama", {"deterministic": True}),
        ("qwen3", {"enable_lora": True}),
        ("mistral", {}),
    ],
)
def test_a_start_compiles_nothing_that_was_compiled_ahead(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    found = started(family, tmp_path, options)
    assert (found["compiled"], found["launchers"]) == ([], 0)
    kernels = Counter(found["found"])
    assert {"decode_attention_kernel", "attention_kernel", "rope_write_kv_kernel", "sample_kernel"} <= kernels.keys()
    assert kernels["plan_decode_kernel"] >= 5, "one for each power of two of the batch"


@pytest.mark.long
@pytest.mark.interpreted
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_all_kernels_of_groups_of_layers_compile_for_a_gpu(family: str, tmp_path: Path) -> None:
    """Tables of windows are rings here."""
    found = started(family, tmp_path, {}, ahead=False, max_position_embeddings=8192)
    kernels = Counter(found["compiled"])
    assert kernels["decode_attention_kernel"] >= 2, "with and without rings"
    assert {"attention_kernel", "decode_inputs_kernel", "write_kv_kernel", "sample_kernel"} <= kernels.keys()
    assert not found["unfrozen"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A GPU as far as it is asked for its properties; returns Triton's cache."""
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132, total_memory=141 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(cache := tmp_path / "cache"))
    cache.mkdir()
    return cache


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Ahead, Path]]:
    """The compilations that would have been begun."""
    found: list[tuple[Ahead, Path]] = []
    monkeypatch.setattr(compilation, "Compilation", lambda *arguments: found.append(arguments))
    return found


def test_kernels_are_compiled_again_when_what_they_depend_on_changes(
    tmp_path: Path, gpu: Path, begun: list[tuple[Ahead, Path]]
) -> None:
    build_model("llama", path := tmp_path / "model")
    config = ExecutorConfig(model=str(path), max_model_len=64)
    begin_compilation(config, path, CUDA, ALONE)
    ahead, done = begun[0]
    assert (ahead.capability, ahead.config.max_model_len, done.parent) == (90, 64, gpu)
    done.touch()
    other_port = ExecutorConfig(model=str(path), max_model_len=64, scheduler="tcp://127.0.0.1:1")
    assert begin_compilation(other_port, path, CUDA, ALONE) is None
    assert len(begun) == 1
    begin_compilation(ExecutorConfig(model=str(path), max_model_len=32), path, CUDA, ALONE)
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | {"intermediate_size": 96}))
    begin_compilation(config, path, CUDA, ALONE)
    assert len({done for _, done in begun}) == len(begun) == 3


def test_nothing_is_compiled_ahead_on_the_cpu_by_other_ranks_or_for_other_families(
    tmp_path: Path, gpu: Path, begun: list[tuple[Ahead, Path]], caplog: pytest.LogCaptureFixture
) -> None:
    build_model("llama", llama := tmp_path / "llama")
    build_model("gpt2", gpt2 := tmp_path / "gpt2")
    caplog.set_level(logging.INFO)
    assert begin_compilation(ExecutorConfig(model=str(llama)), llama, torch.device("cpu"), ALONE) is None
    assert begin_compilation(ExecutorConfig(model=str(llama)), llama, CUDA, Ranks(1, 2)) is None
    assert not caplog.records
    assert begin_compilation(ExecutorConfig(model=str(gpt2)), gpt2, CUDA, ALONE) is None
    assert "are compiled when they are launched: its architecture is ['GPT2LMHeadModel']" in caplog.text
    assert not begun


def test_a_compilation_that_fails_is_reported_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    done = tmp_path / "done"
    Compilation(Ahead(config=ExecutorConfig(model=str(tmp_path / "none")), capability=90), done).wait()
    assert not done.exists()
    assert "kernels are compiled when they are launched: " in caplog.text
    assert "NotReadableError: config.json cannot be read" in caplog.text


STARTS_ONE = """
import os
from pathlib import Path
from pagewise_executor.models.compilation import Ahead, Compilation
from pagewise_shared.config import ExecutorConfig
compilation = Compilation(Ahead(config=ExecutorConfig(model="none"), capability=90), Path("none"))
print(compilation._process.pid, flush=True)
os._exit(0)
"""


def test_a_compilation_ends_with_the_executor() -> None:
    done = subprocess.run([sys.executable, "-c", STARTS_ONE], stdout=subprocess.PIPE, text=True, check=True)
    deadline = time.monotonic() + 1.0  # in which it would not have imported torch
    while alive(int(done.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_kernels_that_came_with_the_installation_are_in_the_cache(
    tmp_path: Path, gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "SHIPPED", shipped := tmp_path / "shipped")
    link_shipped()
    (shipped / "KEY").mkdir(parents=True)
    (shipped / "KEY" / "kernel.json").write_text("{}")
    (shipped / "OWN").mkdir()
    (gpu / "OWN").mkdir()
    for _ in range(2):
        link_shipped()
        assert (gpu / "KEY" / "kernel.json").read_text() == "{}"
        assert not (gpu / "OWN").is_symlink()
    shutil.rmtree(shipped)
    link_shipped()
    assert [entry.name for entry in gpu.iterdir()] == ["OWN"]
