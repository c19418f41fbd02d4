"""What a decode step launches on a GPU, counted without one: Triton's kernels, and what torch computes between them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.models.fused import FusedDecoderLayer
from pagewise_executor.models.gated_rows import choose_gated_rows
from pagewise_executor.models.loader import load_model
from pagewise_executor.models.operations import TritonOperations
from pagewise_kernels import launch
from pagewise_kernels.launch import watch_launches
from pagewise_shared.config import ExecutorConfig
from torch.utils._python_dispatch import TorchDispatchMode

from tests.model_builders import FUSED, build_model

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
    "unsqueeze",
    "detach",
}
"""Operations of torch that compute nothing on the device."""
ONCE = {"plan_decode_kernel"}
"""What the first layer launches for all of them."""


class Recorder(TorchDispatchMode):
    """Lists what is launched."""

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
    """Lists what a call launches. Triton's kernels are not run."""

    def recording(call: Callable[[], object]) -> list[str]:
        with Recorder() as recorder, torch.no_grad():
            watch_launches(lambda kernel, *_: recorder.found.append(kernel.__name__))
            call()
        return recorder.found

    yield recording
    watch_launches(None)


def operations_of(model: torch.nn.Module) -> TritonOperations:
    layer = next(module for module in model.modules() if isinstance(module, FusedDecoderLayer))
    assert isinstance(layer.operations, TritonOperations)
    return layer.operations


@pytest.mark.parametrize("family", FUSED)
def test_a_layer_of_a_decode_step_is_eight_kernels(
    family: str, tmp_path: Path, record: Callable[[Callable[[], object]], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    build_model(family, tmp_path)
    runner = ModelRunner(
        ExecutorConfig(model=str(tmp_path), device="cpu", kernels="triton", num_blocks=8, profile=False, max_num_seqs=4)
    )
    operations = operations_of(runner._engine.model)  # type: ignore[attr-defined]
    assert runner._graphs is not None
    graphs = runner._graphs.decodes
    attention = ["rms_norm_kernel", "mm", "rope_write_kv_kernel", "attention_kernel", "mm"]
    if family == "qwen2":  # which has a bias there
        attention[1] = "addmm"
    one, two = ["gated_linear_kernel"], ["mm", "silu_mul_kernel"]
    record(lambda: graphs.compute(4))  # the first step of all makes buffers
    for rows, gated in ((4, one), (3, two)):
        operations.gated_rows = rows
        launched = record(lambda: graphs.compute(4))
        found = [name for name in launched if name not in ONCE]
        layer = [*attention, "rms_norm_kernel", *gated, "mm"]
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
        assert len(layer) == (8 if gated is one else 9)


def test_kernels_begin_early_unless_the_option_says_otherwise(tmp_path: Path) -> None:
    build_model("llama", tmp_path)
    for early in (False, True):
        load_model(ExecutorConfig(model=str(tmp_path), device="cpu", kernels="triton", dependent_launch=early))
        assert launch._depends == early


def test_gate_and_up_are_one_kernel_as_far_as_it_is_not_slower(tmp_path: Path) -> None:
    build_model("llama", tmp_path)
    model = load_model(ExecutorConfig(model=str(tmp_path), device="cpu", kernels="triton")).model
    operations = operations_of(model)
    computed: list[int] = []

    def times(one: list[float]) -> Callable[[Callable[[], None]], float]:
        """Two kernels take 1, one takes what is listed for each size."""

        def time(call: Callable[[], None]) -> float:
            call()
            computed.append(operations.gated_rows)
            return one[len(computed) // 2 - 1] if operations.gated_rows else 1.0

        computed.clear()
        return time

    for one, most in (([0.9, 1.0, 0.8], 64), ([0.9, 1.1, 0.8], 16), ([2.0], 0)):
        choose_gated_rows(model, operations, times(one))
        assert operations.gated_rows == most
    assert computed == [0, 16]


def test_what_cannot_be_measured_stays_two_kernels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_model("llama", tmp_path)
    model = load_model(ExecutorConfig(model=str(tmp_path), device="cpu", kernels="triton")).model
    choose_gated_rows(model, operations_of(model))  # there is no CUDA here to measure it
    assert operations_of(model).gated_rows == 0
    assert "could not be measured" in caplog.text
