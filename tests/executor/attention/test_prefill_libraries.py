"""Attention of prompts by FlashAttention 3 and FlashInfer: by stand-ins here, by themselves where there is a GPU."""

import importlib.util
import logging
from pathlib import Path

import pytest
import torch
from pagewise_executor.attention import prefill_libraries
from pagewise_executor.attention.prefill_libraries import (
    LIBRARIES,
    AttentionShape,
    PrefillLibrary,
    choose_prefill_library,
    error_of,
)
from pagewise_executor.model_runner import ModelRunner
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError

from tests.executor.attention.fake_libraries import FAKES
from tests.executor.driver import request, run_requests
from tests.model_builders import build_model

BF16 = torch.bfloat16
GPU = torch.device("cuda", 0)
SHAPES = [
    AttentionShape(4, 2, 64, BF16, 0.125),
    AttentionShape(8, 1, 128, BF16, 0.1, window=7),
    AttentionShape(4, 4, 128, BF16, 0.1, softcap=5.0),
    AttentionShape(6, 2, 256, torch.float16, 0.06, window=20, softcap=30.0),
]


@pytest.fixture(params=list(LIBRARIES))
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PrefillLibrary:
    """Each of them, over its stand-in."""
    monkeypatch.setattr(prefill_libraries, "_import", FAKES.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return LIBRARIES[request.param][1](torch.device("cpu"))


@pytest.mark.interpreted
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block_size", [4, 16])
def test_libraries_are_called_as_their_sources_say(
    library: PrefillLibrary, shape: AttentionShape, block_size: int
) -> None:
    assert not library.flaw(shape.head_dim, shape.dtype)
    assert error_of(library, shape, block_size, torch.device("cpu")) < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(LIBRARIES))
@pytest.mark.parametrize("shape", SHAPES)
def test_libraries_give_pytorchs_results(name: str, shape: AttentionShape) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    module, make = LIBRARIES[name]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    if name == "fa3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention 3 is for compute capability 9.0")
    assert error_of(make(GPU), shape, 16, GPU) < 0.02


@pytest.mark.interpreted
@pytest.mark.parametrize("family", ["gemma2", pytest.param("llama", marks=pytest.mark.long)])
def test_an_executor_samples_the_same_tokens_with_a_library(
    family: str, library: PrefillLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks beside decodes, prefixes that are cached, windows and soft caps."""
    build_model(family, tmp_path, seed=7)
    monkeypatch.setattr(type(library), "flaw", lambda *_: "")  # a stand-in computes in float32, with any heads
    calls = 0

    def sampled(chosen: PrefillLibrary | None) -> list[list[int]]:
        monkeypatch.setattr(prefill_libraries, "choose_prefill_library", lambda *_: (chosen, False))
        config = ExecutorConfig(
            model=str(tmp_path), device="cpu", dtype="float32", kernels="triton", block_size=4, num_blocks=60,
            profile=False,
        )  # fmt: skip
        prompts = [[3, *range(10, 26)], [4, 5], [3, *range(10, 24), 60]]
        requests = [request(prompt, 3, f"r{i}") for i, prompt in enumerate(prompts)]
        run_requests(ModelRunner(config), requests, num_blocks=20, max_num_batched_tokens=11, arrive_every=2)
        return [asked.sequences[0].output_token_ids.tolist() for asked in requests]

    plan = library.plan

    def counted(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        return plan(*arguments)  # type: ignore[arg-type]

    library.plan = counted  # type: ignore[method-assign, assignment]
    assert sampled(library) == sampled(None)
    assert calls


def choose(head_dims: list[int], dtype: torch.dtype = BF16, **options: object) -> tuple[PrefillLibrary | None, bool]:
    config = ExecutorConfig(**options)  # type: ignore[arg-type]
    return choose_prefill_library(
        config, GPU, head_dims, dtype, torch.float8_e4m3fn if config.kv_dtype == "fp8" else dtype
    )


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Which stand-ins can be imported, by name, and the error of their results."""
    errors = {"fa3": 0.001, "flashinfer": 0.001}
    names = {module: name for name, (module, _) in LIBRARIES.items()}

    def load(module: str) -> object:
        if names[module] not in errors:
            raise ModelError(f"{module} is not installed")
        return FAKES[module]

    monkeypatch.setattr(prefill_libraries, "_import", load)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(prefill_libraries.torch, "empty", lambda *sizes, **_: torch.zeros(1, dtype=torch.uint8))
    monkeypatch.setattr(prefill_libraries.importlib.util, "find_spec", lambda module: names[module] in errors or None)
    monkeypatch.setattr(prefill_libraries, "error_of", lambda library, *_: errors[library.name])
    return errors


@pytest.mark.interpreted
def test_auto_takes_the_first_that_is_there_and_right(
    installed: dict[str, float], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    library, unfit = choose([128, 128])
    assert library is not None
    assert (library.name, unfit) == ("fa3", False)
    assert choose([128], attention="triton") == (None, False)
    assert choose([128], deterministic=True) == (None, False)
    assert choose([128], kv_dtype="fp8") == (None, False)
    installed["fa3"] = float("nan")
    library, unfit = choose([128])
    assert library is not None
    assert (library.name, unfit) == ("flashinfer", False)
    installed["fa3"] = 0.001
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    library, _ = choose([128])
    assert library is not None
    assert library.name == "flashinfer"
    installed.clear()
    caplog.clear()
    assert choose([128]) == (None, False)
    assert not caplog.messages, "nobody has asked for what is not installed"


@pytest.mark.interpreted
def test_layers_that_a_library_cannot_compute_are_left_to_triton(
    installed: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    library, unfit = choose([128, 100, 128, 100])
    assert library is not None
    assert unfit
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "heads of 100" in caplog.text
    caplog.clear()
    assert choose([128], torch.float32) == (None, True)
    assert "bfloat16 and float16" in caplog.text


@pytest.mark.interpreted
@pytest.mark.parametrize("name", list(LIBRARIES))
def test_what_is_asked_for_by_name_is_used_or_refused(installed: dict[str, float], name: str) -> None:
    library, unfit = choose([64, 128], attention=name)
    assert library is not None
    assert (library.name, unfit) == (name, False)
    with pytest.raises(ModelError, match=f"--attention {name}: .*heads of 100"):
        choose([128, 100], attention=name)
    with pytest.raises(ModelError, match=f"--attention {name}: .*float32"):
        choose([128], torch.float32, attention=name)
    installed[name] = 0.3
    with pytest.raises(ModelError, match=f"--attention {name}: .*differ from PyTorch's by 0.300"):
        choose([128], attention=name)
    del installed[name]
    with pytest.raises(ModelError, match=f"--attention {name}: .*is not installed"):
        choose([128], attention=name)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attention": "fa3"}, "--attention fa3: it needs the Triton kernels, which run on a GPU"),
        ({"attention": "triton"}, "--attention triton: it needs the Triton kernels"),
        ({"attention": "flashinfer", "kernels": "torch"}, "--attention flashinfer: it needs the Triton kernels"),
        ({"attention": "fa3", "kernels": "triton"}, "--attention fa3: it runs on a GPU, not on cpu"),
    ],
)
def test_the_cpu_has_none_of_them(options: dict[str, str], said: str, tmp_path: Path) -> None:
    build_model("llama", tmp_path, seed=7)
    with pytest.raises(ModelError, match=said):
        ModelRunner(ExecutorConfig(model=str(tmp_path), device="cpu", num_blocks=20, **options))  # type: ignore[arg-type]


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("options", "said"),
    [({"deterministic": True}, "not with --deterministic"), ({"kv_dtype": "fp8"}, "does not read float8 KV")],
)
def test_options_that_a_library_does_not_support_are_refused(options: dict[str, object], said: str) -> None:
    config = ExecutorConfig(attention="fa3", **options)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=said):
        prefill_libraries.refuse_attention(config, GPU)
