"""Attention of prompts by FlashAttention 3 and FlashInfer: by stand-ins here, by themselves where there is a GPU."""

import importlib.util
import logging
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pagewise_executor.attention import prefill_choice, prefill_libraries, specialised_prefill
from pagewise_executor.attention.backend import AttentionShape, PagedLayer
from pagewise_executor.attention.prefill_choice import LIBRARIES, begin_choice, choose_prefill_library
from pagewise_executor.attention.prefill_libraries import PrefillLibrary, largest_difference
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.models.kernel_choice import Candidates, choose_kernels
from pagewise_executor.models.support import attention_shape
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError
from transformers import AutoConfig

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


OTHERS = ("fa3", "flashinfer")


@pytest.fixture(params=OTHERS)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PrefillLibrary:
    """Each of them, over its stand-in."""
    monkeypatch.setattr(prefill_libraries, "_import", FAKES.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return LIBRARIES[request.param][1](16, torch.device("cpu"))


@pytest.mark.interpreted
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block_size", [4, 16])
def test_libraries_are_called_as_their_sources_say(
    library: PrefillLibrary, shape: AttentionShape, block_size: int
) -> None:
    library.block_size = block_size
    assert not library.error(shape)
    assert largest_difference(library, shape) < 0.02


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
    library = make(16, GPU)
    if error := library.error(shape):
        pytest.skip(error)
    assert largest_difference(library, shape) < 0.02


@pytest.mark.interpreted
@pytest.mark.parametrize("family", ["gemma2", pytest.param("llama", marks=pytest.mark.long)])
def test_an_executor_samples_the_same_tokens_with_a_library(
    family: str, library: PrefillLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks beside decodes, prefixes that are cached, windows and soft caps."""
    build_model(family, tmp_path, seed=7)
    monkeypatch.setattr(type(library), "error", lambda *_: "")  # a stand-in computes in float32, with any heads
    calls = 0

    def sampled(chosen: PrefillLibrary | None) -> list[list[int]]:
        monkeypatch.setattr(prefill_choice, "choose_prefill_library", lambda *_: (chosen, False))
        config = ExecutorConfig(
            model=str(tmp_path), device="cpu", dtype="float32", kernels="triton", block_size=4, num_blocks=60,
            profile=False, layer_groups=False,
        )  # fmt: skip
        prompts = [[3, *range(10, 26)], [4, 5], [3, *range(10, 24), 60]]
        requests = [request(prompt, 3, f"r{i}") for i, prompt in enumerate(prompts)]
        run_requests(ModelRunner(config), requests, num_blocks=20, max_num_batched_tokens=11, arrive_every=2)
        return [asked.sequences[0].output_token_ids.tolist() for asked in requests]

    library.block_size = 4
    plan = library.plan

    def counted(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        return plan(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(library, "plan", counted)
    assert sampled(library) == sampled(None)
    assert calls


def choose(head_dims: list[int], dtype: torch.dtype = BF16, **options: object) -> tuple[PrefillLibrary | None, bool]:
    config = ExecutorConfig(**options)  # type: ignore[arg-type]
    shapes = [AttentionShape(8, 2, dim, dtype, dim**-0.5) for dim in head_dims]
    return choose_prefill_library(config, GPU, shapes, torch.float8_e4m3fn if config.kv_dtype == "fp8" else dtype)


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
    monkeypatch.setattr(prefill_choice.importlib.util, "find_spec", lambda module: names[module] in errors or None)
    monkeypatch.setattr(prefill_libraries, "largest_difference", lambda library, *_: errors[library.name])
    monkeypatch.setattr(prefill_choice, "chunk_milliseconds", lambda library, *_: TIMES[library and library.name])
    monkeypatch.setattr(specialised_prefill, "_trial_error", lambda *_: "")
    monkeypatch.setattr("pagewise_kernels.attention.specialised.capability", lambda _: 90)
    return errors


TIMES: dict[str | None, float] = {None: 9.0, "gluon": 6.0, "fa3": 5.0, "flashinfer": 7.0}
"""Milliseconds of a layer, by library; None: the Triton kernel."""


@pytest.mark.interpreted
def test_auto_takes_the_fastest_that_is_there_and_right(
    installed: dict[str, float], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)

    def chosen(dims: list[int], **options: object) -> str | None:
        library, unfit = choose(dims, **options)
        assert not unfit
        return library and library.name

    assert chosen([128, 128]) == "fa3"
    assert "all layers: triton 18.00 ms, fa3 10.00 ms, flashinfer 14.00 ms" in caplog.text
    assert chosen([128], attention="triton") is None
    assert chosen([128], deterministic=True) is None
    assert chosen([128], kv_dtype="fp8") is None
    monkeypatch.setitem(TIMES, "flashinfer", 4.0)
    assert chosen([128]) == "flashinfer"
    installed["flashinfer"] = float("nan")
    assert chosen([128]) == "fa3"
    monkeypatch.setitem(TIMES, None, 3.0)
    assert chosen([128]) is None, "Triton's is faster"
    assert chosen([128], attention="fa3") == "fa3", "it is asked for by name"
    installed.clear()
    caplog.clear()
    assert chosen([128]) is None
    assert not caplog.messages, "nobody has asked for what is not installed"


@pytest.mark.interpreted
def test_our_own_kernel_is_one_of_them(
    installed: dict[str, float], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    installed.clear()
    installed["gluon"] = 0.001
    library, unfit = choose([128, 96])
    assert library is not None
    assert (library.name, unfit) == ("gluon", False)
    assert "triton 18.00 ms, gluon 15.00 ms" in caplog.text, "Triton's computes the other layer"
    # It comes with the others, so it is no loss where it cannot compute.
    caplog.clear()
    for dims, dtype in (([96], BF16), ([128], torch.float32)):
        assert choose(dims, dtype) == (None, False)
    installed["gluon"] = 0.3
    assert choose([128]) == (None, False)
    assert {record.levelname for record in caplog.records} == {"INFO"}
    with pytest.raises(ModelError, match=r"--attention gluon: .*differ from PyTorch's by 0.300"):
        choose([128], attention="gluon")
    monkeypatch.setattr(specialised_prefill, "_trial_error", lambda *_: "it did not end within 120 s")
    with pytest.raises(ModelError, match="--attention gluon: it did not end within 120 s"):
        choose([128], attention="gluon")
    for windowed in (PLAIN, WINDOWED, CAPPED):
        error = specialised_prefill.SpecialisedPrefill(16, GPU).error(windowed)
        assert ("windows" in error) == (windowed is not PLAIN)

    def other_triton(*_: object) -> str:
        raise ImportError("cannot import name 'mbarrier'")

    monkeypatch.setattr(specialised_prefill, "_trial_error", other_triton)
    assert choose([128]) == (None, False)
    assert "not gluon: ImportError: cannot import name 'mbarrier'" in caplog.text


@pytest.mark.interpreted
def test_what_cannot_be_measured_is_not_taken(
    installed: dict[str, float], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(library: PrefillLibrary | None, *_: object) -> float:
        if library is not None and library.name == "flashinfer":
            raise RuntimeError("out of memory")
        return TIMES[library and library.name]

    monkeypatch.setattr(prefill_choice, "chunk_milliseconds", fails)
    library, _ = choose([128])
    assert library is not None
    assert library.name == "fa3"
    assert "could not be measured (out of memory)" in caplog.text


TRIAL = """
import json, sys, time
trial = json.load(sys.stdin)
{}
"""


def replace_trials(program: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Let ``program`` run instead of trials, for a second at most; return the commands of the trials, which grow."""
    (path / "trial.py").write_text(TRIAL.format(program))
    calls: list[list[str]] = []
    run = subprocess.run

    def replaced(command: list[str], **options: object) -> object:
        calls.append(command)
        return run([command[0], str(path / "trial.py")], **(options | {"timeout": 1}))  # type: ignore[call-overload]

    monkeypatch.setattr(specialised_prefill.subprocess, "run", replaced)
    monkeypatch.setattr(specialised_prefill, "_SECONDS", 1.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a device")
    monkeypatch.setattr("triton.knobs.cache.dir", str(path / "cache"))
    return calls


def test_a_trial_that_began_beside_the_reading_of_weights_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = replace_trials("time.sleep(0.3); print(0.001)", tmp_path, monkeypatch)
    monkeypatch.setattr("pagewise_kernels.attention.specialised.specialised_error", lambda *_: "")
    shapes = [AttentionShape(8, 2, 128, BF16, 0.09)] * 2
    config = ExecutorConfig(model="m", device="cuda")
    begin_choice(config, GPU, shapes)
    while not calls:
        time.sleep(0.01)
    assert specialised_prefill.SpecialisedPrefill(config.block_size, GPU).error(shapes[0]) == ""
    assert len(calls) == 1
    begin_choice(
        ExecutorConfig(model="m", device="cuda", attention="triton"), GPU, [AttentionShape(4, 2, 128, BF16, 1.0)]
    )
    begin_choice(ExecutorConfig(model="m", device="cuda", kv_dtype="fp8"), GPU, [AttentionShape(4, 2, 128, BF16, 1.0)])
    time.sleep(0.1)
    assert len(calls) == 1, "only what may be chosen is tried"


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("print(0.001)", ""),
        ("print(0.3)", "results differ from PyTorch's by 0.300"),
        ("print(float('nan'))", "results differ from PyTorch's by nan"),
        ("time.sleep(60)", "it did not end within 1 s"),
        ("import os; os.abort()", "its process ended with -6"),
        ("raise RuntimeError('illegal memory access')", "ended with 1: RuntimeError: illegal memory access"),
    ],
)
def test_our_kernel_is_tried_apart_and_the_verdict_is_kept(
    program: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a kernel blocks or ends its trial process, the executor loses only this kernel."""
    calls = replace_trials(program, tmp_path, monkeypatch)
    shape = AttentionShape(8, 2, 128, BF16, 0.09)
    for _ in range(2):
        found = specialised_prefill._trial_error(shape, 16, GPU)
        assert (error in found) if error else not found, found
    assert len(calls) == 1, "the verdict was not kept"
    assert ("is tried again" in found) == bool(error), "the log says how"
    specialised_prefill._trial_error(shape, 32, GPU)
    assert len(calls) == 2, "another kind of layer was not tried"


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
@pytest.mark.parametrize("name", OTHERS)
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
    [({"deterministic": True}, "not with --deterministic"), ({"kv_dtype": "fp8"}, "does not read KV in fewer bits")],
)
def test_options_that_a_library_does_not_support_are_refused(options: dict[str, object], said: str) -> None:
    config = ExecutorConfig(attention="fa3", **options)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=said):
        prefill_choice.refuse_attention(config, GPU)


# ---- kinds of layers ----------------------------------------------------------------------------------------


PLAIN, WINDOWED = (AttentionShape(8, 2, 128, BF16, 0.09, window) for window in (None, 4096))
CAPPED = AttentionShape(8, 2, 128, BF16, 0.09, softcap=50.0)
SMALL_HEADS = AttentionShape(8, 2, 64, BF16, 0.125)


@pytest.mark.interpreted
def test_each_kind_of_layer_is_computed_by_what_is_right_for_it(
    library: PrefillLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that has been compiled without windows, and one that is wrong for one size of heads."""
    assert all(map(library.computes, (PLAIN, WINDOWED, CAPPED, SMALL_HEADS)))
    plan = type(library).plan
    for broken, change in (
        (WINDOWED, {"window": None}),
        (CAPPED, {"softcap": None}),
        (SMALL_HEADS, {"scale": 0.5}),
    ):

        def wrong(self: object, shape: AttentionShape, tables: object, broken=broken, change=change) -> object:  # type: ignore[no-untyped-def]
            same = shape.head_dim == broken.head_dim and all(getattr(shape, name) for name in change)
            return plan(self, replace(shape, **change) if same else shape, tables)  # type: ignore[arg-type]

        monkeypatch.setattr(type(library), "plan", wrong)
        tried = type(library)(16, library.device)
        others = [shape for shape in (PLAIN, WINDOWED, CAPPED, SMALL_HEADS) if shape != broken]
        assert not tried.computes(broken)
        assert all(map(tried.computes, others))
        assert "results differ from PyTorch's by" in tried.try_out(broken)


@pytest.mark.interpreted
def test_a_library_without_windows_leaves_the_layers_that_have_one_to_triton(
    installed: dict[str, float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: object, shape: AttentionShape, *__: object) -> float:
        if shape.window is not None:
            raise RuntimeError("This flash attention build does not support local attention.")
        return 0.001

    monkeypatch.setattr(prefill_libraries, "largest_difference", fails)
    del installed["flashinfer"]
    found, unfit = choose_prefill_library(ExecutorConfig(), GPU, [PLAIN, WINDOWED, PLAIN], BF16)
    assert found is not None
    assert unfit
    assert found.computes(PLAIN)
    assert not found.computes(WINDOWED)
    assert "does not support local attention. (8 heads of 128 over 2, window 4096)" in caplog.text
    with pytest.raises(ModelError, match=r"--attention fa3: .*local attention"):
        choose_prefill_library(ExecutorConfig(attention="fa3"), GPU, [PLAIN, WINDOWED], BF16)


@pytest.mark.parametrize(
    "family", ["gemma2", "gemma3", "gemma4", "llama4", "gpt_oss", "mistral", "qwen2", "gpt2", "llama"]
)
def test_the_kinds_of_layers_are_those_that_compute(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1} if family == "qwen2" else {}
    build_model(family, tmp_path, **more)
    runner = ModelRunner(
        ExecutorConfig(model=str(tmp_path), device="cpu", kernels="torch", num_blocks=20, profile=False)
    )
    seen = []
    attend = PagedLayer.attend

    def watched(
        layer: PagedLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
        window: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        shape = q.shape[1], k.shape[1], q.shape[2], q.dtype, scale, window, softcap
        seen.append(AttentionShape(*shape, sinks is not None, layer.attention_chunk))
        return attend(layer, q, k, v, scale, window, softcap, sinks)

    monkeypatch.setattr(PagedLayer, "attend", watched)
    run_requests(runner, [request([3, 4, 5], 1, "r")], num_blocks=20)
    modules = runner._forward_pass._layers
    config = AutoConfig.from_pretrained(tmp_path)
    assert [attention_shape(module, config, torch.float32) for module in modules] == seen


def test_libraries_leave_attention_chunks_to_triton(library: PrefillLibrary, caplog: pytest.LogCaptureFixture) -> None:
    assert not library.computes(AttentionShape(4, 2, 64, BF16, 0.125, attention_chunk=32))
    assert "it has no attention chunks" in caplog.text


def test_a_library_that_is_asked_for_by_name_is_not_dropped_with_the_triton_kernels() -> None:
    config, found = ExecutorConfig(attention="fa3"), Candidates(["triton"], [])
    with pytest.raises(ModelError, match="--attention fa3: triton: heads of 640 are too"):
        choose_kernels(config, found, [AttentionShape(1, 1, 640, BF16, 0.1)])
