"""Captures of CUDA graphs with a fake of torch's functions, which warn, refuse, and fail.

The steps themselves run in Triton's interpreter. That replayed graphs compute the same is tested on a GPU.
"""

import logging
import warnings
from collections.abc import Iterator

import msgspec
import pytest
import torch
from pagewise_executor.collectives import ALONE, Ranks
from pagewise_executor.cuda_graphs.decode_graphs import DecodeGraphs
from pagewise_executor.cuda_graphs.graphed_steps import capture_graphs
from pagewise_executor.cuda_graphs.mixed_graphs import MixedGraphs
from pagewise_executor.device_defaults import with_step_limits
from pagewise_executor.graph_capture import graphs_bytes, waiting_is_an_error, why_failed
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.models.few_rows import graph_milliseconds
from pagewise_executor.profile import dummy_prefill
from pagewise_executor.warm_up import warm_up
from pagewise_shared import progress
from pagewise_shared.config import ExecutorConfig

from tests.executor.cuda_graphs.fake_captures import FakeCuda
from tests.model_builders import build_model

pytestmark = pytest.mark.interpreted


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.put_in_place(monkeypatch)
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
        yield runner._graphs.decodes
    runner._graphs.decodes.drop()


@pytest.fixture
def mixed(runner: ModelRunner) -> Iterator[MixedGraphs]:
    assert runner._graphs is not None
    yield runner._graphs.mixed
    runner._graphs.mixed.drop()


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
    assert capture_graphs(ALONE, mixed, graphs)
    assert (mixed.num_graphs, graphs.num_graphs) == (1, 3)
    assert len(cuda.captures) == 1 + 3
    assert (graphs_bytes(graphs, 32), graphs_bytes(None, 32)) == (3 * 32 * 640 * 1024, 0)
    assert {each["capture_error_mode"] for each in cuda.captures} == {"thread_local"}
    assert [each["pool"] for each in cuda.captures] == [None, "pool", "pool", "pool"], "they share their memory"
    assert (cuda.mode, cuda.stream) == ("default", "main")


def test_the_log_says_how_many_are_captured_and_compiled(
    cuda: FakeCuda,
    runner: ModelRunner,
    graphs: DecodeGraphs,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    caplog.set_level(logging.INFO)
    assert capture_graphs(ALONE, graphs)
    told = [line.partition(" CUDA graphs")[0] for line in caplog.messages if "capturing" in line]
    assert told == [f"{graphs.name}: capturing: {number} of 3" for number in (1, 2, 3)]
    warm_up(runner, runner._pool, torch.float32, 16)
    sizes = [line.partition(" sizes")[0] for line in caplog.messages if line.startswith("compiling kernels")]
    assert sizes == [f"compiling kernels: {number} of 9" for number in range(1, 10)]
    graphs.warm_up()
    assert "compiling the kernels of decodes: 3 of 3 sizes (100%)" in caplog.messages


def test_a_model_that_waits_for_the_device_goes_on_without_graphs(
    cuda: FakeCuda, graphs: DecodeGraphs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward = graphs._forward

    def waiting(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if cuda.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return forward(ids, positions)

    monkeypatch.setattr(graphs, "_forward", waiting)
    assert not capture_graphs(ALONE, graphs)
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
    assert runner._graphs is not None
    config = with_step_limits(ExecutorConfig(max_num_seqs=3, max_num_batched_tokens=1), None)
    with caplog.at_level(logging.WARNING):
        runner._capture(runner._graphs, config)
    (line,) = [record.message for record in caplog.records if "CUDA graphs" in record.message]
    assert "capturing them failed (CUDA error: operation failed" in line
    assert "more lines" not in line
    assert cuda.stream == "main"
    assert sizes[-4:-1] == [1, 2, 3], "every kernel that steps without graphs need is compiled"
    assert runner.info.fallback, "a metric of the scheduler says that this executor is slower"
    assert mixed.runs, "the other graphs stay"
    graphs.run(*[torch.zeros(1, dtype=torch.int64).numpy()] * 2, torch.full((1,), -1).numpy())
    assert cuda.replayed == 0


def test_a_measurement_that_cannot_be_captured_leaves_the_stream_as_it_was(cuda: FakeCuda) -> None:
    cuda.fails_at = 1
    with pytest.raises(RuntimeError, match="operation failed"):
        graph_milliseconds(lambda: None)
    assert cuda.stream == "main"


def test_graphs_without_room_name_the_option_that_gives_them_some() -> None:
    for error in (torch.OutOfMemoryError("no room\nmore lines"), RuntimeError("CUDA error: out of memory")):
        assert why_failed(error).endswith("); --gpu-memory-utilization or --kv-memory may leave them more memory")
    assert why_failed(RuntimeError("CUDA error: operation failed")) == (
        "capturing them failed (CUDA error: operation failed)"
    )


class OtherRanks(Ranks):
    """Ranks of which another one cannot do something, once it is asked for the time ``fails_at``."""

    def __init__(self, fails_at: int) -> None:
        super().__init__(0, 2)
        self.asked, self.fails_at = 0, fails_at

    def least(self, count: int) -> int:
        self.asked += 1
        return min(count, int(self.asked != self.fails_at))


@pytest.mark.parametrize(("fails_at", "asked"), [(2, 1 + 1 + 1 + 3), (4, 4), (6, 6)])
def test_no_rank_has_graphs_if_one_has_none(
    fails_at: int,
    asked: int,
    cuda: FakeCuda,
    graphs: DecodeGraphs,
    mixed: MixedGraphs,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = OtherRanks(fails_at)
    assert not capture_graphs(ranks, mixed, graphs)
    assert ranks.asked == asked, "before the first capture of a sort, and after each; nothing follows one that fails"
    assert len(cuda.captures) == asked - 2
    assert "without CUDA graphs, slower: another rank has none" in caplog.text
    assert (len(mixed.graphs), len(graphs.graphs)) == ((0, 3) if fails_at == 2 else (1, 0))
    assert mixed.runs == (fails_at != 2)


def test_a_rank_that_fails_alone_tells_the_others(cuda: FakeCuda, graphs: DecodeGraphs, mixed: MixedGraphs) -> None:
    ranks = OtherRanks(0)
    cuda.fails_at = 3
    assert not capture_graphs(ranks, mixed, graphs)
    assert ranks.asked == 5
    assert (cuda.stream, len(cuda.captures)) == ("main", 3)


@pytest.mark.parametrize("fails_at", [1, 3])
def test_ranks_that_are_not_in_step_do_not_go_on(
    fails_at: int, cuda: FakeCuda, graphs: DecodeGraphs, mixed: MixedGraphs
) -> None:
    """One has stopped in the middle of a step, before collectives that this one has computed."""
    with pytest.raises(RuntimeError, match="waits for the device on another rank"):
        capture_graphs(OtherRanks(fails_at), mixed, graphs)


def test_a_step_that_fails_between_captures_ends_a_rank_that_is_not_alone(
    cuda: FakeCuda, graphs: DecodeGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = graphs.compute

    def failing(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        if cuda.captures:
            raise RuntimeError("out of memory")
        return compute(size)

    monkeypatch.setattr(graphs, "compute", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        capture_graphs(OtherRanks(0), graphs)


def test_an_executor_with_graphs_is_as_fast_as_it_can_be(
    cuda: FakeCuda, graphs: DecodeGraphs, mixed: MixedGraphs, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "info", msgspec.structs.replace(runner.info, fallback=False))
    assert runner._graphs is not None
    config = with_step_limits(ExecutorConfig(max_num_seqs=3, max_num_batched_tokens=1), None)
    runner._capture(runner._graphs, config)
    assert not runner.info.fallback
    graphs.run(*[torch.zeros(1, dtype=torch.int64).numpy()] * 2, torch.full((1,), -1).numpy())
    assert cuda.replayed == 1
    dummy_prefill(runner, 0, 5)
    assert cuda.replayed == 2


def test_chunks_run_without_graphs_if_theirs_cannot_be_captured(
    cuda: FakeCuda,
    graphs: DecodeGraphs,
    mixed: MixedGraphs,
    runner: ModelRunner,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cuda.fails_at = 1
    assert not capture_graphs(ALONE, mixed, graphs)
    assert "steps with prefill chunks run without CUDA graphs, slower: capturing them failed" in caplog.text
    assert cuda.stream == "main"
    assert len(graphs.graphs) == 3
    assert not mixed.runs
    dummy_prefill(runner, 0, 5)
    assert cuda.replayed == 0


@pytest.mark.parametrize("uses", [True, False])
def test_what_waits_in_large_steps_or_with_adapters_only_is_found_before_captures(
    uses: bool,
    cuda: FakeCuda,
    graphs: DecodeGraphs,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    forward, with_adapters = graphs._forward, [False]

    def waiting(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if cuda.mode == "error" and len(ids) == graphs.sizes[-1] and with_adapters[0] == uses:
            raise RuntimeError("called a synchronizing CUDA operation")
        return forward(ids, positions)

    monkeypatch.setattr(graphs, "_forward", waiting)
    monkeypatch.setattr(graphs, "variants", lambda: (True, False))
    monkeypatch.setattr(graphs, "use_adapters", lambda size, uses: with_adapters.__setitem__(0, uses))
    assert not capture_graphs(ALONE, graphs)
    assert not cuda.captures
    assert "a step waits for the device (called a synchronizing" in caplog.text


def test_all_sizes_write_their_hidden_states_to_the_same_place(
    cuda: FakeCuda, mixed: MixedGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed, "sizes", [8, 16])
    with torch.inference_mode():
        assert capture_graphs(ALONE, mixed)
    hidden = [output.last_hidden_state for output in mixed._outputs.values()]
    assert {tuple(each.shape[:2]) for each in hidden} == {(1, 8), (1, 16)}
    assert len({each.data_ptr() for each in hidden}) == 1


def test_a_layer_of_a_kind_that_was_not_there_before_cannot_be_captured(
    cuda: FakeCuda, mixed: MixedGraphs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its chunks would attend to the blocks in the padding's block table."""
    with torch.inference_mode():
        mixed.allocate()
        monkeypatch.setattr(mixed, "_kinds", [])
        monkeypatch.setattr(mixed, "_by_size", {})
        assert not capture_graphs(ALONE, mixed)
    assert "there was no layer like this when static plans were made: LayerKind(" in caplog.text
    assert not mixed.runs


def test_warming_up_tries_short_chunks_in_steps_that_are_too_large_for_graphs(
    runner: ModelRunner, mixed: MixedGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mixed.least_without == 1
    monkeypatch.setattr(mixed, "sizes", [4])
    monkeypatch.setattr(mixed, "runs", True)
    prepare, sizes = mixed._backend.prepare, []
    monkeypatch.setattr(
        mixed._backend, "prepare", lambda work: (sizes.append([chunk.size for chunk in work.chunks]), prepare(work))[1]
    )
    warm_up(runner, runner._pool, torch.float32, 16, mixed.least_without)
    assert sizes == [[2, 2, 2], [4, 4], [8], [16]], "a chunk of one token would need more rows than there are"
