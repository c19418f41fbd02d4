"""Steps of small random models on the CPU, by contenders that share a process and take turns."""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import transformers
from pagewise_executor.attention.registry import Kernels
from pagewise_executor.model_runner import ModelRunner
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import NewSequence, StepPlan, Welcome, pack_int32s
from pagewise_shared.sampling import SamplingParams

from benchmarks.record import record_file

CONTEXT, STEPS, BLOCK_SIZE = 64, 16, 16
BLOCKS = -(-(CONTEXT + STEPS + 2) // BLOCK_SIZE)
"""Of a sequence."""
Family = tuple[str, dict[str, Any]]
"""The class of its configuration, and the settings."""


def build(path: Path, family: Family) -> int:
    """Write a model with random weights; return how many it has."""
    torch.manual_seed(0)
    name, settings = family
    config = getattr(transformers, name)(**settings)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(path)
    return int(model.num_parameters())


def prompts_of(batch: int) -> list[list[int]]:
    """Return prompts of as many sequences."""
    return [[(7 * i + row) % 500 for i in range(CONTEXT)] for row in range(batch)]


class Clock:
    """Measures CPU seconds of the process between ``start`` and ``stop``; ``within``: the share of some functions."""

    def __init__(self) -> None:
        self.seconds, self.within = 0.0, 0.0
        self._began: float | None = None

    def start(self) -> None:
        """Measure from now on."""
        self._began = time.process_time()

    def stop(self) -> None:
        """End the measurement."""
        assert self._began is not None
        self.seconds, self._began = self.seconds + time.process_time() - self._began, None

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, whose seconds are added to ``within``."""

        def call(*args: Any, **named: Any) -> Any:
            began = time.process_time()
            result = function(*args, **named)
            if self._began is not None:
                self.within += time.process_time() - began
            return result

        return call


class Run(NamedTuple):
    """Times of a contender: of the prompts of all sequences up to their first tokens, and of ``STEPS`` later steps."""

    prompts: Clock
    decode: Clock


class Contender(NamedTuple):
    """``compute``: lets a number of sequences begin and decode. ``parts``: the functions whose share is of interest,
    each an object and the name of its attribute."""

    compute: Callable[[int, Run], None]
    parts: Sequence[tuple[Any, str]]

    def seconds(self, batch: int) -> tuple[float, float]:
        """Return the CPU seconds of the prompts and of a decode step."""
        run = Run(Clock(), Clock())
        self.compute(batch, run)
        return run.prompts.seconds, run.decode.seconds / STEPS

    def share(self, batch: int) -> float:
        """Return the share of the parts in the CPU time of decode steps."""
        run = Run(Clock(), Clock())
        with ExitStack() as stack:
            for owner, name in self.parts:
                stack.enter_context(mock.patch.object(owner, name, run.decode.timed(getattr(owner, name))))
            self.compute(batch, run)
        return run.decode.within / run.decode.seconds


Switches = Callable[[int, int], bytes]
"""From a number of sequences and of computed tokens to the ``states`` of a plan."""


def pagewise(
    settings: ExecutorConfig, most: int, parts: Sequence[tuple[Any, str]], plan: type[StepPlan] = StepPlan,
    *, states: Switches | None = None,
) -> Contender:  # fmt: skip
    """Return an executor for up to ``most`` sequences. ``states``: it has recurrent layers, and leaves states."""
    runner = ModelRunner(settings)

    def compute(batch: int, run: Run) -> None:
        runner.reset(Welcome(0, most, most * CONTEXT))
        windows = [((0, pack_int32s([row])),) if states is not None else () for row in range(batch)]
        joined = tuple(
            NewSequence(
                row, pack_int32s(prompt), CONTEXT, 0, pack_int32s(range(row * BLOCKS, (row + 1) * BLOCKS)),
                SamplingParams(temperature=0.0), windows=windows[row],
            )
            for row, prompt in enumerate(prompts_of(batch))
        )  # fmt: skip
        numbers = count(1)

        def step(tokens: int, **more: Any) -> None:
            if states is not None and (switches := states(batch, tokens)):
                more["states"] = switches
            runner.execute(plan(0, next(numbers), **more)).result()

        run.prompts.start()
        step(0, joined=joined, chunks=tuple((row, CONTEXT) for row in range(batch)))
        run.prompts.stop()
        step(CONTEXT)
        run.decode.start()
        for i in range(STEPS):
            step(CONTEXT + 1 + i)
        run.decode.stop()

    return Contender(compute, parts)


def executor_settings(path: Path, kernels: Kernels, most: int, num_blocks: int) -> ExecutorConfig:
    """Return the options of an executor in float32, with as many threads as PyTorch has here."""
    return ExecutorConfig(
        model=str(path), device="cpu", dtype="float32", kernels=kernels, num_blocks=num_blocks, block_size=BLOCK_SIZE,
        max_num_seqs=most, profile=False, threads=torch.get_num_threads(),
    )  # fmt: skip


def take_turns(
    contenders: Mapping[str, Contender], rounds: int, batches: Iterable[int]
) -> dict[tuple[int, str], list[tuple[float, float]]]:
    """Return the CPU seconds of prompts and of a decode step in each round, by batch and contender."""
    seconds: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for turn in range(rounds + 1):
        for batch in batches:
            for name, contender in contenders.items():
                took = contender.seconds(batch)
                if turn:  # the first one warms up
                    seconds[batch, name].append(took)
    return seconds


def parser_of(doc: str, families: Mapping[str, Family], most: int) -> argparse.ArgumentParser:
    """Return a parser of the common options: ``families`` and numbers of sequences, up to ``most``."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--families", nargs="+", default=list(families), choices=families)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16], choices=range(1, most + 1))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    return parser


def ratio(others: Sequence[float], own: Sequence[float]) -> float:
    """Return the median of the ratios of rounds."""
    return round(statistics.median(one / two for one, two in zip(others, own, strict=True)), 3)
