"""Steps of decodes and prefill chunks from the static buffers that CUDA graphs read: tokens equal the tokens of eager
steps.

There is no CUDA device here, so the operations of graphs run directly, in Triton's interpreter.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pagewise_executor.cuda_graphs.mixed_graphs import MixedGraphs
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.uploads import Array, Uploads
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import NewSequence, StepPlan, StepResult, Welcome, pack_int32s
from pagewise_shared.sampling import SamplingParams

from tests.executor.driver import request, run_requests
from tests.model_builders import VOCAB_SIZE, build_model

pytestmark = pytest.mark.interpreted

BLOCK = 4
ROWS = 5


class Mixed(NamedTuple):
    """A step: contexts of its decodes, whose tokens before the last are in the pool, and start and size of its chunks;
    ``drafted``: tokens that may follow the first decode."""

    decodes: list[int]
    chunks: list[tuple[int, int]]
    drafted: int = 0


@st.composite
def mixtures(draw: st.DrawFn) -> Mixed:
    decodes = draw(st.lists(st.integers(2, 40), max_size=3))
    chunks = draw(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=ROWS - len(decodes)))
    return Mixed(decodes, chunks, draw(st.integers(0, 2)) if decodes else 0)


def build(family: str, path: Path, **options: object) -> ModelRunner:
    build_model(family, path, seed=7, **({"n_layer": 2} if family == "gpt2" else {"num_hidden_layers": 2}))
    settings = {"block_size": BLOCK, "num_blocks": 80, "profile": False, "max_num_seqs": ROWS} | options
    return ModelRunner(ExecutorConfig(model=str(path), device="cpu", kernels="triton", **settings))  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=["gemma2", pytest.param("llama", marks=pytest.mark.long)])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """Every other layer of Gemma 2 has a sliding window, so there are two groups of layers; its head has a softcap.
    Layers of Llama are fused."""
    return build(request.param, tmp_path_factory.mktemp("model"))


@contextmanager
def from_static_buffers(runner: ModelRunner) -> Iterator[MixedGraphs]:
    """Steps with chunks run as graphs would."""
    assert runner._graphs is not None
    mixed = runner._graphs.mixed
    mixed.runs = True
    try:
        yield mixed
    finally:
        mixed.drop()


def plans(mixed: Mixed, *, windows: int = 0, reports: bool = True) -> Iterator[StepPlan]:
    """A step that computes one token of each row that decodes after it, and the tested step.

    ``windows``: the number of groups of windowed layers, in which sequences have the same blocks. ``reports``:
    log-probabilities are asked for, and some tokens are drawn at random.
    """
    numbers = np.random.default_rng(len(mixed.decodes) + sum(size for _, size in mixed.chunks))
    first = 0

    def joining(row: int, total: int, computed: int, more: int = 0, **sampling: object) -> NewSequence:
        nonlocal first
        count = -(-(total + more) // BLOCK)
        blocks = np.arange(first, first + count, dtype=np.int32)
        first += count
        tokens = numbers.integers(3, VOCAB_SIZE, total).tolist()
        params = SamplingParams(**({"temperature": 0.0} | sampling))  # type: ignore[arg-type]
        packed = blocks.tobytes()
        return NewSequence(
            row, pack_int32s(tokens), total, computed, packed, params, windows=((0, packed),) * windows
        )  # fmt: skip

    decoding = [
        joining(row, total, total - 1, 4, logprobs=2 if reports else None) for row, total in enumerate(mixed.decodes)
    ]
    rows = range(len(decoding), len(decoding) + len(mixed.chunks))
    # Every other prompt continues after its chunk, and reports log-probabilities.
    asking: list[dict[str, object]] = [{"temperature": 1.0, "seed": 5}, {"prompt_logprobs": 1}]
    joined = [
        joining(row, start + size + number % 2, start, **(asking[number % 2] if reports else {}))
        for number, (row, (start, size)) in enumerate(zip(rows, mixed.chunks, strict=True))
    ]
    sizes = [size for _, size in mixed.chunks]
    if decoding:
        yield StepPlan(epoch=0, step=1, joined=tuple(decoding), chunks=tuple((row, 1) for row in range(len(decoding))))
    drafts = ((0, pack_int32s([7] * mixed.drafted)),) if mixed.drafted else ()
    chunks = tuple(zip(rows, sizes, strict=True))
    yield StepPlan(epoch=0, step=2, joined=tuple(joined), chunks=chunks, drafts=drafts)


def results(runner: ModelRunner, mixed: Mixed) -> list[StepResult]:
    runner.reset(Welcome(0, ROWS, 64, keeps_blocks=True))
    generator = torch.Generator().manual_seed(1)
    for tensor in (*runner._pool.keys, *runner._pool.values):
        tensor.normal_(generator=generator)
    windows = len(runner.info.groups[1:])
    return [runner.execute(plan).result() for plan in plans(mixed, windows=windows)]


def logprobs(result: StepResult) -> list[float]:
    entries = [*result.logprobs, *(entry for prompt in result.prompt_logprobs for entry in prompt.entries)]
    return [entry.logprob for entry in entries]


@settings(max_examples=3, derandomize=True)
@given(mixtures())
@example(Mixed([], [(0, 9), (13, 7)]))  # exactly a size
@example(Mixed([30, 31], [(5, 2)], drafted=2))
def test_any_mixture_gives_the_results_of_eager_steps(runner: ModelRunner, mixed: Mixed) -> None:
    check_mixture(runner, mixed)


@pytest.mark.long
@pytest.mark.timeout(400)
@settings(max_examples=40)
@given(mixtures())
def test_many_mixtures_give_the_results_of_eager_steps(runner: ModelRunner, mixed: Mixed) -> None:
    check_mixture(runner, mixed)


def check_mixture(runner: ModelRunner, mixed: Mixed) -> None:
    eager = results(runner, mixed)
    with from_static_buffers(runner):
        static = results(runner, mixed)
    for one, other in zip(eager, static, strict=True):
        assert one.tokens == other.tokens
        assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-4)


@pytest.mark.parametrize("runner", ["llama", pytest.param("gemma2", marks=pytest.mark.long)], indirect=True)
def test_requests_that_come_and_go_get_the_tokens_that_they_would_get_anyhow(runner: ModelRunner) -> None:
    """Preempted and resumed, with prefix hits and two steps in flight; some steps are too large for a graph."""

    def tokens() -> list[list[int]]:
        prompts = [list(range(3, 20)), [5, 6, 7], list(range(3, 16)), [9] * 7]
        requests = [request(prompt, 5, f"r{i}", seed=i, temperature=i % 2) for i, prompt in enumerate(prompts)]
        run_requests(runner, requests, num_blocks=13, max_num_seqs=3, max_num_batched_tokens=17, arrive_every=2)
        return [asked.sequences[0].output_token_ids.tolist() for asked in requests]

    expected = tokens()
    with from_static_buffers(runner) as mixed:
        sizes, mixed.sizes = mixed.sizes, [8, 12]
        try:
            assert tokens() == expected
        finally:
            mixed.sizes = sizes


@pytest.mark.long
@pytest.mark.parametrize("family", ["gpt2", "opt", "phi3", "qwen3", "qwen3_moe", "gpt_neox"])
def test_other_families_are_cut_between_body_and_head_too(family: str, tmp_path: Path) -> None:
    check_mixture(build(family, tmp_path), Mixed([30, 9], [(5, 2), (0, 6)]))


@pytest.mark.long
def test_deterministic_steps_have_the_same_bits_from_static_buffers(tmp_path: Path) -> None:
    runner = build("llama", tmp_path, deterministic=True)
    mixed = Mixed([30, 9], [(5, 2), (0, 6)])
    eager = results(runner, mixed)
    with from_static_buffers(runner):
        static = results(runner, mixed)
    assert [logprobs(one) for one in static] == [logprobs(one) for one in eager]


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Counts copies to the device since the last call."""
    count = 0
    together = Uploads.together

    def counted(self: Uploads, *arrays: Array) -> tuple[torch.Tensor, ...]:
        nonlocal count
        count += any(array.size for array in arrays)
        return together(self, *arrays)

    def since() -> int:
        nonlocal count
        found, count = count, 0
        return found

    monkeypatch.setattr(Uploads, "together", counted)
    return since


def test_a_step_brings_its_arrays_to_the_device_in_one_copy(runner: ModelRunner, uploads: Callable[[], int]) -> None:
    """Except arrays that few steps need: parameters of sampling, log-probabilities, new shared prefixes."""
    before, step = plans(Mixed([9, 12], [(3, 7)]), windows=len(runner.info.groups[1:]), reports=False)
    later = [StepPlan(epoch=0, step=number, chunks=()) for number in (3, 4)]
    found = []
    with from_static_buffers(runner):
        runner.reset(Welcome(0, ROWS, 64, keeps_blocks=True))
        for plan in (before, step, *later):
            uploads()
            runner.execute(plan).result()
            found.append(uploads())
    assert found == [1, 1, 2, 1], "the first step that samples in a graph uploads the parameters of sampling"
