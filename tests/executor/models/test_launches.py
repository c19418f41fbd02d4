"""The launches of a decode step on a GPU, counted without one: Triton's kernels, and torch's between them."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.models.few_rows import Product, choose_few_rows
from pagewise_executor.models.fused import FusedDecoderLayer
from pagewise_executor.models.loader import load_model
from pagewise_executor.models.operations import TritonOperations
from pagewise_kernels import launch
from pagewise_kernels.launch import watch_launches
from pagewise_shared.config import ExecutorConfig
from torch.utils._python_dispatch import TorchDispatchMode

from tests.model_builders import FUSED, MIXTURES, build_model

pytestmark = pytest.mark.interpreted

NO_LAUNCH = {
    "view",
    "_unsafe_view",
    "new_empty",
    "slice",
    "split_with_sizes",
    "t",
    "transpose",
    "empty",
    "empty_like",
    "select",
    "alias",
    "unbind",
    "unsqueeze",
    "detach",
}
"""Operations of torch that compute nothing on the device."""
ONCE = {"plan_decode_kernel"}
"""Kernels that the first layer launches for all layers."""


class Recorder(TorchDispatchMode):
    """Lists launches."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (name := func.overloadpacket.__name__) not in NO_LAUNCH:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def record() -> Iterator[Callable[[Callable[[], object]], list[str]]]:
    """Lists the launches of a call. Triton's kernels are not run."""

    def recording(call: Callable[[], object]) -> list[str]:
        with Recorder() as recorder, torch.no_grad():
            watch_launches(lambda kernel, *_: recorder.found.append(kernel.__name__))
            call()
        return recorder.found

    yield recording
    watch_launches(None)


def fused_layers(model: torch.nn.Module) -> list[FusedDecoderLayer]:
    return [module for module in model.modules() if isinstance(module, FusedDecoderLayer)]


def operations_of(model: torch.nn.Module) -> TritonOperations:
    operations = fused_layers(model)[0].operations
    assert isinstance(operations, TritonOperations)
    return operations


def products_of(model: torch.nn.Module, *names: str) -> list[Product]:
    """The linear layers of these names, of all decoder layers."""
    found = [getattr(layer, name) for layer in fused_layers(model) for name in names]
    assert all(isinstance(product, Product) for product in found)
    return found


@pytest.mark.parametrize("family", FUSED)
def test_a_layer_of_a_decode_step_is_eight_kernels(
    family: str, tmp_path: Path, record: Callable[[Callable[[], object]], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    build_model(family, tmp_path)
    runner = ModelRunner(
        ExecutorConfig(model=str(tmp_path), device="cpu", kernels="triton", num_blocks=8, profile=False, max_num_seqs=4)
    )
    products = products_of(runner._forward_pass.model, "qkv", "out", "gate_up", "down")
    assert runner._graphs is not None
    graphs = runner._graphs.decodes
    record(lambda: graphs.compute(4))  # the first step of all makes buffers
    for few_rows in (4, 3):
        for product in products:
            product.few_rows = few_rows
        launched = record(lambda: graphs.compute(4))
        found = [name for name in launched if name not in ONCE]
        by = "skinny_linear_kernel" if few_rows == 4 else "mm"
        with_bias = "addmm" if family == "qwen2" and by == "mm" else by
        gated = [by] if few_rows == 4 else [by, "silu_mul_kernel"]
        attention = ["rms_norm_kernel", with_bias, "rope_write_kv_kernel", "decode_attention_kernel", by]
        layer = [*attention, "rms_norm_kernel", *gated, by]
        assert found == [
            *("decode_inputs_kernel", "embedding"),
            *3 * layer,
            *(
                "rms_norm_kernel",
                "mm",
                "add",
                "filter_kernel",
                "sample_kernel",
                "pick_kernel",
                "_to_copy",
                "index_copy_",
            ),
        ]
        assert len(layer) == (8 if few_rows == 4 else 9)


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_of_experts_is_five_kernels_of_a_layer(
    family: str, tmp_path: Path, record: Callable[[Callable[[], object]], list[str]]
) -> None:
    build_model(family, tmp_path, num_hidden_layers=1)
    runner = ModelRunner(
        ExecutorConfig(model=str(tmp_path), device="cpu", kernels="triton", num_blocks=8, profile=False, max_num_seqs=4)
    )
    assert runner._graphs is not None
    graphs = runner._graphs.decodes
    record(lambda: graphs.compute(4))
    launched = record(lambda: graphs.compute(4))
    begin = launched.index("rms_norm_kernel", 1 + launched.index("rms_norm_kernel"))
    found = launched[begin + 1 : launched.index("rms_norm_kernel", begin + 1)]
    mixture = [
        "skinny_linear_kernel",
        *("choose_experts_kernel", "sort_by_expert_kernel", "expert_gate_up_kernel", "expert_down_kernel"),
    ]
    if family != "qwen2_moe":
        assert found == mixture
    else:  # whose shared expert is PyTorch's, before and behind
        at = found.index("skinny_linear_kernel")
        assert found[at : at + 5] == mixture
        assert len(found) == 14


@pytest.mark.parametrize("family", [*MIXTURES, "gpt_oss", "deepseek_v3", "glm4_moe_lite"])
def test_the_host_never_waits_for_what_a_mixture_computes(
    family: str, tmp_path: Path, record: Callable[[Callable[[], object]], list[str]]
) -> None:
    """Tensors on the meta device have no values, so whatever asks for one of them raises: item, tolist, nonzero."""
    source: Any = build_model(family, tmp_path)
    options = ExecutorConfig(model=str(tmp_path), device="cpu", kernels="triton", dtype="bfloat16")
    model = load_model(options).model.to("meta")
    blocks = [module for name, module in model.named_modules() if name.endswith("mlp") and hasattr(module, "experts")]
    x = torch.empty(1, 4, 48, dtype=torch.bfloat16, device="meta")
    for block in blocks:
        assert ("expert_down_kernel" in record(functools.partial(block, x))) == (family in MIXTURES)
    assert len(blocks) > 1
    source.set_experts_implementation("eager")
    loop = next(module for module in source.to("meta").modules() if hasattr(module, "experts"))
    with pytest.raises(NotImplementedError, match="nonzero"):
        loop(x.float())


def test_kernels_begin_early_unless_the_option_says_otherwise(tmp_path: Path) -> None:
    build_model("llama", tmp_path)
    for early in (False, True):
        load_model(ExecutorConfig(model=str(tmp_path), device="cpu", kernels="triton", dependent_launch=early))
        assert launch._depends == early


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_the_kernel_for_few_rows_computes_products_as_far_as_it_is_not_slower(
    quantization: str, tmp_path: Path
) -> None:
    build_model("llama", tmp_path)
    options: dict[str, Any] = {"dtype": "bfloat16", "quantization": quantization}
    model = load_model(ExecutorConfig(model=str(tmp_path), device="cpu", kernels="triton", **options)).model
    # The kernel's times for 1, 16, 32, 64, 128 and 256 rows, relative to the library's.
    kernel = {"qkv": [0.9, 1.0, 0.8, 1.0, 1.0, 0.5], "out": [0.9, 1.1], "gate_up": [2.0], "down": [0.9, 0.9, 0.9, 1.1]}
    times = [time for of_product in kernel.values() for one in of_product for time in (1.0, one)]
    given = iter(times)

    def time(call: Callable[[], None]) -> float:
        if (found := next(given)) == 0.9:
            call()
        return found

    choose_few_rows(model, operations_of(model), time)
    assert next(given, None) is None
    for name, most in (("qkv", 256), ("out", 1), ("gate_up", 0), ("down", 32)):
        assert {product.few_rows for product in products_of(model, name)} == {most}


def test_what_cannot_be_measured_is_computed_by_the_library(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_model("llama", tmp_path)
    model = load_model(ExecutorConfig(model=str(tmp_path), device="cpu", kernels="triton")).model
    choose_few_rows(model, operations_of(model))  # there is no CUDA here to measure it
    assert {product.few_rows for product in products_of(model, "qkv", "out", "gate_up", "down")} == {0}
    assert "could not be measured" in caplog.text
