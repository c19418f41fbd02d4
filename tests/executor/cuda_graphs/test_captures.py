"""What captures CUDA graphs, against a fake of torch's functions: what they warn of, refuse, and break.

The steps themselves run in Triton's interpreter. That replayed graphs compute the same is tested on a GPU.
"""

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pagewise_executor import model_runner
from pagewise_executor.cuda_graphs.decode_graphs import DecodeGraphs
from pagewise_executor.cuda_graphs.graphed_steps import capture_graphs
from pagewise_executor.cuda_graphs.mixed_graphs import MixedGraphs
from pagewise_executor.device_defaults import with_step_limits
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.profile import dummy_prefill
from pagewise_executor.sync_debug import waiting_is_an_error
from pagewise_shared.config import ExecutorConfig

from tests.model_builders import build_model

pytestmark = pytest.mark.interpreted


class FakeCuda:
    """``torch.cuda`` as far as captures go. ``fails_at``: the number of the capture that breaks, from 1 on."""

    def __init__(self) -> None:
        self.mode = "default"
        self.stream = "main"
        self.fails_at = 0
        self.warned = False
        self.captures: list[dict[str, Any]] = []
        self.replayed = 0

    def set_sync_debug_mode(self, mode: str) -> None:
        self.mode = mode
        if not self.warned:  # as torch does: after the mode has changed
            self.warned = True
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)

    def graph(self, graph: "FakeGraph", **options: Any) -> "FakeCapture":
        self.captures.append(options)
        return FakeCapture(self, len(self.captures) == self.fails_at)


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def pool(self) -> str:
        return "pool"

    def replay(self) -> None:
        self._cuda.replayed += 1


class FakeCapture:
    """A capture that fails does so at its end, and leaves its stream behind, as torch's does."""

    def __init__(self, cuda: FakeCuda, fails: bool) -> None:
        self._cuda, self._fails = cuda, fails

    def __enter__(self) -> None:
        self._cuda.stream = "capture"

    def __exit__(self, *exception: object) -> None:
        if self._fails:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture\nmore lines")
        self._cuda.stream = "main"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: fake.mode)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", fake.set_sync_debug_mode)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: fake.stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(fake, "stream", stream))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(fake))
    monkeypatch.setattr(torch.cuda, "graph", fake.graph)
    return fake


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    path = tmp_path_factory.mktemp("model")
    build_model("llama", path, num_hidden_layers=1)
    return ModelRunner(
        ExecutorConfig(
            model=str(path), device="cpu", kernels="triton", num_blocks=8, profile=False, max_num_seqs=3,
            max_num_batched_tokens=16,
        )
    )  # fmt: skip


@pytest.fixture
def graphs(runner: ModelRunner) -> Iterator[DecodeGraphs]:
    assert runner._graphs is not None
    with torch.inference_mode():
        yield runner._graphs
    runner._graphs.drop()


@pytest.fixture
def mixed(runner: ModelRunner) -> Iterator[MixedGraphs]:
    assert runner._mixed is not None
    yield runner._mixed
    runner._mixed.drop()


def test_the_mode_is_changed_back_though_torch_warns_that_it_is_a_prototype(cuda: FakeCuda) -> None:
    modes: list[str] = []

    def wait() -> None:
        with waiting_is_an_error():
            modes.append(cuda.mode)
            raise RuntimeError("called a synchronizing CUDA operation")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="synchronizing"):
            wait()
    assert cuda.warned
    assert modes == ["error"]
    assert cuda.mode == "default"


def test_graphs_are_captured_while_other_threads_use_the_device(
    cuda: FakeCuda, graphs: DecodeGraphs, mixed: MixedGraphs
) -> None:
    assert capture_graphs(mixed, graphs)
    assert len(cuda.captures) == 1 + 3
    assert {each["capture_error_mode"] for each in cuda.captures} == {"thread_local"}
    assert [each["pool"] for each in cuda.captures] == [None, "pool", "pool", "pool"], "they share their memory"
    assert (cuda.mode, cuda.stream) == ("default", "main")


def test_a_model_that_waits_for_the_device_goes_on_without_graphs(
    cuda: FakeCuda, graphs: DecodeGraphs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward = graphs._forward

    def waiting(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if cuda.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return forward(ids, positions)

    monkeypatch.setattr(graphs, "_forward", waiting)
    assert not capture_graphs(graphs)
    assert cuda.mode == "default"
    assert not cuda.captures
    assert "a step waits for the device (called a synchronizing" in caplog.text


@pytest.mark.parametrize("fails_at", [2, 4])
def test_a_capture_that_fails_leaves_an_executor_that_serves_without_graphs(
    fails_at: int,
    cuda: FakeCuda,
    graphs: DecodeGraphs,
    mixed: MixedGraphs,
    runner: ModelRunner,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cuda.fails_at = fails_at
    sizes: list[int] = []
    compute = graphs.compute
    monkeypatch.setattr(graphs, "compute", lambda size: (sizes.append(size), compute(size))[1])
    config = with_step_limits(ExecutorConfig(max_num_seqs=3, max_num_batched_tokens=1), None)
    with caplog.at_level(logging.WARNING):
        runner._warm_up(graphs, config, torch.float32)
    (line,) = [record.message for record in caplog.records if "CUDA graphs" in record.message]
    assert "capturing them failed (CUDA error: operation failed" in line
    assert "more lines" not in line
    assert cuda.stream == "main"
    assert sizes[-4:-1] == [1, 2, 3], "every kernel that steps without graphs need is compiled"
    assert runner.info.fallback, "a metric of the scheduler says that this executor is slower"
    before = cuda.replayed  # by warming up with chunks
    assert mixed.runs, "the other graphs stay"
    graphs.run(*[torch.zeros(1, dtype=torch.int64).numpy()] * 2, torch.full((1,), -1).numpy())
    assert cuda.replayed == before


def test_an_executor_with_graphs_is_as_fast_as_it_can_be(
    cuda: FakeCuda, graphs: DecodeGraphs, mixed: MixedGraphs, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "info", model_runner.dataclasses.replace(runner.info, fallback=False))
    config = with_step_limits(ExecutorConfig(max_num_seqs=3, max_num_batched_tokens=1), None)
    runner._warm_up(graphs, config, torch.float32)
    assert not runner.info.fallback
    before = cuda.replayed  # by warming up with chunks
    assert before
    graphs.run(*[torch.zeros(1, dtype=torch.int64).numpy()] * 2, torch.full((1,), -1).numpy())
    assert cuda.replayed == before + 1
    dummy_prefill(runner, 0, 5)
    assert cuda.replayed == before + 2


def test_chunks_run_without_graphs_if_theirs_cannot_be_captured(
    cuda: FakeCuda,
    graphs: DecodeGraphs,
    mixed: MixedGraphs,
    runner: ModelRunner,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cuda.fails_at = 1
    assert not capture_graphs(mixed, graphs)
    assert "steps with prefill chunks run without CUDA graphs, slower: capturing them failed" in caplog.text
    assert cuda.stream == "main"
    assert len(graphs.graphs) == 3
    assert not mixed.runs
    dummy_prefill(runner, 0, 5)
    assert cuda.replayed == 0
