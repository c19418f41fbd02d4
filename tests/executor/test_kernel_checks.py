"""Kernels are checked before they serve: each against PyTorch, and one that fails is named by the executor and
doctor."""

import importlib
import os
import pkgutil
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pagewise_kernels
import pytest
import torch
from pagewise_executor.device_defaults import with_step_limits
from pagewise_executor.group_choice import choose_pages
from pagewise_executor.kernel_checks import kernels, run
from pagewise_executor.kernel_checks.kernels import KERNELS, kernels_of
from pagewise_executor.kernel_checks.run import check_all, kernel_error
from pagewise_executor.kernel_checks.use import KernelUse, typical_use, use_of
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.models.loader import load_model
from pagewise_kernels.attention import decode_attention
from pagewise_kernels.kv_layer import FP8
from pagewise_kernels.launch import launch
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError
from pagewise_shared.service_process import CANNOT_START

from tests.model_builders import MIXTURES, build_model

check_kernels = run.check_kernels  # before the fixture of this folder replaces it


def modules() -> Iterator[ModuleType]:
    """The modules that launch kernels."""
    for found in pkgutil.walk_packages(pagewise_kernels.__path__, "pagewise_kernels."):
        if ".cpu" not in found.name and ".compile" not in found.name:
            module = importlib.import_module(found.name)
            if getattr(module, "launch", None) is launch:
                yield module


def test_every_kernel_is_checked_and_works(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = set[str]()

    def record(kernel: Any, *arguments: Any, **options: Any) -> None:
        launched.add(kernel.fn.__name__)
        launch(kernel, *arguments, **options)

    known = set[str]()
    for module in list(modules()):
        monkeypatch.setattr(module, "launch", record)
        known |= {name for name in vars(module) if name.endswith("_kernel")}
    assert [checked for checked in check_all(device) if checked.error] == []
    assert launched == known


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2_moe", "qwen3_moe", "gemma2", "gpt_oss", "gpt2"])
def test_an_executor_checks_what_its_model_uses(family: str, tmp_path: Path, device: torch.device) -> None:
    build_model(family, tmp_path)
    config = ExecutorConfig(model=str(tmp_path), device=device.type, dtype="float32", kernels="triton")
    loaded = load_model(config)
    use = use_of(config, loaded, loaded.dtype)  # type: ignore[arg-type]
    fused = family in ("llama", "qwen3", *MIXTURES)
    assert ("RMSNorm" in kernels_of(use), "KV write" in kernels_of(use)) == (fused, not fused)
    assert use.has_head_norm == (family in ("qwen3", "qwen3_moe"))
    assert ("mixture of experts" in kernels_of(use), "SiLU" in kernels_of(use)) == (
        family in MIXTURES,
        family in ("llama", "qwen3"),
    )
    assert len(use.attention) == (2 if family in ("gemma2", "gpt_oss") else 1), "layers with a window, and without"
    assert not use.rings
    check_kernels(config, loaded, loaded.dtype)  # type: ignore[arg-type]


def test_windows_are_read_through_the_tables_that_they_have(tmp_path: Path, device: torch.device) -> None:
    build_model("gemma2", tmp_path, max_position_embeddings=4096)
    options = {"device": device.type, "dtype": "float32", "kernels": "triton", "max_num_batched_tokens": 64}
    config = with_step_limits(ExecutorConfig(model=str(tmp_path), cuda_graphs=True, **options), None)  # type: ignore[arg-type]
    loaded = load_model(config)
    pages = choose_pages(config, loaded, loaded.dtype)
    use = use_of(config, loaded, loaded.dtype, pages)
    assert use.rings
    assert [kernel_error(name, use) for name in ("decode attention", "prefill attention")] == ["", ""]


def test_layers_in_eight_bits_are_checked_as_they_are(tmp_path: Path, device: torch.device) -> None:
    build_model("llama", tmp_path)
    config = ExecutorConfig(
        model=str(tmp_path), device=device.type, dtype="float32", kernels="triton", quantization="fp8", kv_dtype="fp8"
    )
    loaded = load_model(config)
    use = use_of(config, loaded, FP8)  # type: ignore[arg-type]
    assert use.linears
    assert "linear of few rows" not in kernels_of(use)
    layer = use.linears[0]
    assert kernel_error("quantised linear", use) == ""
    layer.scales *= 1.5
    layer.quantised.values[0] = 0  # the same weights in both ways: no difference
    assert kernel_error("quantised linear", use) == ""
    broken = replace(use, linears=(type(layer)(layer.quantised, layer.inputs, use.dtype),))
    broken.linears[0].compute = lambda x: layer.compute(x).roll(1, 1)  # type: ignore[method-assign]
    assert "differs from PyTorch's" in kernel_error("quantised linear", broken)


@pytest.fixture
def use(device: torch.device) -> KernelUse:
    return typical_use(device)


def nothing(*_: object, **__: object) -> None:
    """A launch that computes nothing: results are whatever was in memory."""


@pytest.mark.parametrize("name", list(KERNELS))
def test_a_kernel_that_computes_something_else_is_found(
    name: str, use: KernelUse, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "quantised linear":
        pytest.skip("has a test of its own")
    for module in list(modules()):
        monkeypatch.setattr(module, "launch", nothing)
    assert kernel_error(name, use)


def test_attention_that_reads_another_head_in_long_contexts_alone_is_found(
    use: KernelUse, monkeypatch: pytest.MonkeyPatch
) -> None:
    def last_row_is_wrong(*arguments: Any, **options: Any) -> torch.Tensor:
        found = decode_attention(*arguments, **options)
        found[-1] = found[-1].roll(1, 0)
        return found

    monkeypatch.setattr(kernels, "decode_attention", last_row_is_wrong)
    assert "differs from PyTorch's" in kernel_error("decode attention", use)


def test_the_executor_says_which_kernel_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Iterator[Any]:
        raise AttributeError("module 'driver' has no attribute\nand more")

    monkeypatch.setitem(KERNELS, "sampling", (lambda _: True, fail))
    build_model("llama", tmp_path)
    config = ExecutorConfig(model=str(tmp_path), device="cpu", dtype="float32", kernels="triton", profile=False)
    monkeypatch.setattr(run, "check_kernels", check_kernels)
    said = "the kernel of sampling does not work on the CPU: AttributeError: module 'driver' has no attribute. "
    with pytest.raises(ModelError, match=re.escape(said)):
        ModelRunner(config)


def test_nothing_is_checked_on_a_device_that_a_kernel_has_broken(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_is_usable", lambda _: False)
    monkeypatch.setitem(KERNELS, "decode inputs", (lambda _: True, lambda _: iter([1])))  # type: ignore[arg-type, list-item, return-value]
    (only,) = check_all(device)
    assert only.kernel == "decode inputs"
    assert only.error.startswith("TypeError")


@pytest.fixture
def breaking(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """The environment of processes of the executor that run some code first, which breaks kernels."""

    def environment(code: str) -> dict[str, str]:
        own = 'import sys\nif any("pagewise_executor" in word for word in sys.orig_argv):\n'
        (tmp_path / "sitecustomize.py").write_text(own + textwrap.indent(textwrap.dedent(code), "    "))
        paths = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
        return os.environ | {"PYTHONPATH": paths, "TRITON_INTERPRET": "1"}

    return environment


@pytest.mark.interpreted
def test_a_real_executor_ends_with_one_sentence(breaking: Callable[[str], dict[str, str]], tmp_path: Path) -> None:
    environment = breaking("import pagewise_kernels.silu_mul as broken; broken.launch = lambda *_, **__: None")
    options = ("--kernels", "triton", "--device", "cpu", "--num-blocks", "64", "--scheduler", f"ipc://{tmp_path}/none")
    command = [sys.executable, "-m", "pagewise_executor.main", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == CANNOT_START
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "cannot run: the kernel of SiLU does not work on the CPU: its result differs from PyTorch's by" in last


@pytest.mark.interpreted
def test_doctor_says_which_kernels_fail(breaking: Callable[[str], dict[str, str]]) -> None:
    environment = breaking(
        """
        import os, signal
        import pagewise_kernels.block_copy, pagewise_kernels.rms_norm, pagewise_kernels.sampling
        pagewise_kernels.block_copy.launch = lambda *_, **__: pagewise_kernels.no_such_function
        pagewise_kernels.rms_norm.launch = lambda *_, **__: None
        pagewise_kernels.sampling.launch = lambda *_, **__: os.kill(os.getpid(), signal.SIGSEGV)
        """
    )
    command = [sys.executable, "-m", "pagewise.main", "doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    problems = [line.split(maxsplit=2)[2] for line in done.stdout.splitlines() if line.startswith("PROBLEM kernels")]
    assert problems[0].startswith("0: RMSNorm: its result differs from PyTorch's by ")
    assert problems[1:] == [
        "0: block copies: AttributeError: module 'pagewise_kernels' has no attribute 'no_such_function'",
        "0: sampling: it ended the process by SIGSEGV",
    ]
    assert "0: 14 compute what PyTorch does" in done.stdout
