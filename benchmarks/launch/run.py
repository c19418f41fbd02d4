"""The work of the host for a step with the Triton kernels: launches, and microseconds, without a GPU.

    python -m benchmarks.launch.run [--json FILE]
    python -m benchmarks.launch.run --layers 2 --rounds 3 --cases "64 decodes"

A model runner computes steps of a Llama on a fake of CUDA's driver, which records launches and computes nothing (see
``fake_driver``). Linear layers, which a library of the device would compute, only make their results. Each step is
measured with Triton's own launches and with the handles of compiled kernels, in turns; every number is the median of
CPU time of one thread. **Nothing of this is the time of a device.** PyTorch's own operations (embeddings, the last
norm, rotations' angles, additions) are in the time of a step, and computed by the CPU here. Each step is also measured
as with a CUDA graph, whose replay does nothing here: the remainder is the host's work around it, but for the copies to
the device, which are counted.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before anything imports Triton

import numpy as np
import torch
import triton
from pagewise_executor.kernel_checks import run as kernel_checks
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.models.packed_linear import PackedLinear
from pagewise_executor.uploads import Array, Uploads
from pagewise_kernels.handles import Handles
from pagewise_kernels.launch import num_unfrozen_launches, use_handles, watch_launches
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import NewSequence, StepPlan, Welcome, pack_int32s
from pagewise_shared.sampling import SamplingParams

from benchmarks.launch.fake_driver import FakeDriver, fake_driver, missing
from benchmarks.record import record_file, write_record

CASES = {
    "1 decode": (1, 0),
    "64 decodes": (64, 0),
    "256 decodes": (256, 0),
    "64 decodes, chunk of 64": (64, 64),
    "chunk of 512": (0, 512),
}
"""Decodes of a step, and the tokens of its prefill chunk."""
_CONTEXT = 33
_BLOCK_SIZE = 16


def build_model(path: Path, layers: int) -> None:
    """Write a Llama with few weights, but heads of 64."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(path)


def build_runner(path: Path) -> ModelRunner:
    """Return a runner for the steps of ``CASES``, whose kernels are not checked: on the fake they compute nothing."""
    kernel_checks.check_kernels = lambda *_: None
    return ModelRunner(
        ExecutorConfig(
            model=str(path),
            device="cpu",
            dtype="bfloat16",
            kernels="triton",
            num_blocks=1600,
            max_num_seqs=257,
            max_num_batched_tokens=1024,
            block_size=_BLOCK_SIZE,
            profile=False,
            threads=1,
        )
    )


class Steps:
    """Runs steps of one case, one after the other."""

    def __init__(self, runner: ModelRunner, decodes: int, chunk: int) -> None:
        self._runner, self._chunk, self._step, self._row = runner, chunk, 1, decodes
        runner.reset(Welcome(0, 257, 1024))
        joined = tuple(
            self._sequence(row, _CONTEXT, np.arange(4 * row, 4 * row + 4, dtype=np.int32)) for row in range(decodes)
        )
        self._room = np.arange(4 * decodes, 4 * decodes + 64, dtype=np.int32)
        if joined:
            self._execute(joined=joined, chunks=tuple((row, 1) for row in range(decodes)))

    def _sequence(
        self, row: int, tokens: int, blocks: "np.ndarray[Any, Any]", computed: int | None = None
    ) -> NewSequence:
        prompt = pack_int32s([3 + (row + i) % 400 for i in range(tokens)])
        before = tokens - 1 if computed is None else computed
        return NewSequence(row, prompt, tokens, before, blocks.tobytes(), SamplingParams(temperature=0.0))

    def run(self) -> float:
        """Run the next step; return its microseconds of CPU time."""
        if not self._chunk:
            return self._execute()
        # A chunk of a prompt of which nothing is sampled; the sequence leaves with the next step.
        left = () if self._step <= 2 - (self._row == 0) else (self._row,)
        new = self._sequence(self._row, self._chunk + 1, self._room, 0)
        return self._execute(left=left, joined=(new,), chunks=((self._row, self._chunk),))

    def _execute(self, **plan: Any) -> float:
        self._runner._last_tokens.zero_()  # kernels compute nothing: sampled tokens are arbitrary
        began = time.process_time()
        issued = self._runner.execute(StepPlan(0, self._step, **plan))
        seconds = time.process_time() - began
        issued.result()
        self._step += 1
        return 1e6 * seconds


def measure(driver: FakeDriver, runner: ModelRunner, case: str, rounds: int) -> dict[str, Any]:
    """Measure one case."""
    steps = Steps(runner, *CASES[case])
    found: dict[bool, list[float]] = {False: [], True: []}
    launched: dict[bool, list[str]] = {}
    for _ in range(rounds):
        for handles, times in found.items():
            use_handles(handles)
            steps.run()  # makes the handles
            with driver.recorded() as launches:
                steps.run()
            launched[handles] = [launch.kernel for launch in launches]
            times += [steps.run() for _ in range(2 if CASES[case][1] else 3)]
            if steps._step > 12:  # before the contexts outgrow their blocks
                steps = Steps(runner, *CASES[case])
    assert launched[False] == launched[True], "both ways launch the same"
    triton_us, handles_us = statistics.median(found[False]), statistics.median(found[True])
    with replayed(runner, *CASES[case]):
        steps = Steps(runner, *CASES[case])
        steps.run()
        with driver.recorded() as around, counted_uploads() as uploads:
            steps.run()
        graph_us = []
        for _ in range(rounds):
            steps = Steps(runner, *CASES[case])
            steps.run()
            graph_us += [steps.run() for _ in range(5)]
    return {
        "case": case,
        "launches": len(launched[True]),
        "launches_around_graph": len(around),
        "step_us_around_graph": round(statistics.median(graph_us)),
        "uploads": uploads[0],
        "kernels": {name: launched[True].count(name) for name in dict.fromkeys(launched[True])},
        "step_us_triton": round(triton_us),
        "step_us_handles": round(handles_us),
        **_per_launch(steps, rounds),
        "unfrozen": num_unfrozen_launches(),
    }


class _NoGraph:
    """Replays nothing."""

    def replay(self) -> None: ...


@contextmanager
def replayed(runner: ModelRunner, decodes: int, chunk: int) -> Iterator[None]:
    """Steps of this many decodes and tokens of a chunk run by graphs that do nothing."""
    assert runner._graphs is not None
    graphs, mixed = runner._graphs
    try:
        with torch.inference_mode():
            for steps in (graphs, mixed):
                for size in steps.sizes:
                    if size >= max(1, decodes + chunk):
                        break
                steps.clear(size)
                steps.use_adapters(size, uses=False)
                if steps is graphs:
                    graphs._logits = torch.empty_like(graphs.compute(size)[0])
                else:
                    mixed.allocate()
                    mixed.record(size, uses=False)
                steps.graphs[size, False] = _NoGraph()  # type: ignore[assignment]
        mixed.runs = True
        yield
    finally:
        graphs.drop()
        mixed.drop()


@contextmanager
def counted_uploads() -> Iterator[list[int]]:
    """Count the copies to the device."""
    together, count = Uploads.together, [0]

    def counted(self: Uploads, *arrays: Array) -> tuple[torch.Tensor, ...]:
        count[0] += any(array.size for array in arrays)
        return together(self, *arrays)

    Uploads.together = counted  # type: ignore[method-assign]
    try:
        yield count
    finally:
        Uploads.together = together  # type: ignore[method-assign]


def _per_launch(steps: Steps, rounds: int) -> dict[str, float]:
    """Return the microseconds of a launch alone, both ways: the mean of all launches of a step."""
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    watch_launches(lambda kernel, arguments, options: calls.append((kernel, arguments, options)))
    try:
        steps.run()
    finally:
        watch_launches(None)
    handles, grid = Handles(), (1, 1, 1)

    def by_triton() -> None:
        for kernel, arguments, options in calls:
            kernel[grid](*arguments, **options)

    def by_handles() -> None:
        for kernel, arguments, options in calls:
            handles.launch(kernel, grid, arguments, options)

    times: dict[Callable[[], None], list[float]] = {by_triton: [], by_handles: []}
    for _ in range(5 * rounds):
        for way, measured in times.items():
            way()
            began = time.process_time()
            way()
            way()
            measured.append(1e6 * (time.process_time() - began) / 2 / len(calls))
    assert not handles.num_unfrozen
    found = {way: statistics.median(measured) for way, measured in times.items()}
    return {
        "launch_us_triton": round(found[by_triton], 2),
        "launch_us_handles": round(found[by_handles], 2),
        "ratio": round(found[by_triton] / found[by_handles], 2),
    }


def _make_empty(linear: PackedLinear | torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], linear.weight.shape[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    if reason := missing():
        raise SystemExit(reason)
    torch.set_num_threads(1)
    PackedLinear.forward = torch.nn.Linear.forward = _make_empty  # type: ignore[method-assign, assignment]
    with tempfile.TemporaryDirectory() as folder, fake_driver(Path(folder)) as driver:
        build_model(Path(folder) / "model", args.layers)
        runner = build_runner(Path(folder) / "model")
        rows = [measure(driver, runner, case, args.rounds) for case in args.cases]
    for row in rows:
        print(json.dumps(row), flush=True)
    if args.json:
        write_record(args.json, {"layers": args.layers, "triton": triton.__version__, "rows": rows}, device="none")


if __name__ == "__main__":
    main()
