"""Executors of several ranks for tests: with threads for ranks, or with the processes that serve."""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from pagewise_executor import model_runner
from pagewise_executor.collectives import Ranks
from pagewise_executor.issued_step import IssuedStep
from pagewise_executor.leading_runner import LeadingRunner
from pagewise_executor.main import lead
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.models.loader import LoadedModel, load_model
from pagewise_executor.ranks.agreement import Agreement
from pagewise_executor.runner import Report, Runner
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import LoadAdapter, StepPlan, Welcome

from tests.cpu_kernels import auto_kernels
from tests.executor.driver import request, run_requests
from tests.executor.runners import BLOCK_SIZE
from tests.model_builders import VOCAB_SIZE

LENGTHS = [(1, 20), (3, 24), (17, 20), (40, 9), (33, 1), (64, 12), (5, 24)]


class _Table:
    """A place where each thread puts an object for all others."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.held: list[torch.Tensor] = [torch.empty(0)] * size


class ThreadRanks(Ranks):
    """Ranks that are threads of one process."""

    def __init__(self, rank: int, table: _Table) -> None:
        super().__init__(rank, len(table.held))
        self._table = table

    def _all(self, own: torch.Tensor) -> list[torch.Tensor]:
        self._table.held[self.rank] = own
        self._table.barrier.wait()
        held = [each.clone() for each in self._table.held]
        self._table.barrier.wait()
        return held

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._all(x)).sum(0)

    def gather_logits(self, local: torch.Tensor, vocab_size: int) -> torch.Tensor:
        parts = self._all(local)
        return torch.cat(parts, dim=-1)[..., :vocab_size] if self.first else local

    def share_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._all(tokens)[0]

    def least(self, count: int) -> int:
        return int(torch.stack(self._all(torch.tensor(count))).min())

    def of_first(self, number: int) -> int:
        return int(self._all(torch.tensor(number))[0])

    def leave(self) -> None:
        pass


class ThreadGroup:
    """A runner of ranks that are threads: all of them get every call, and rank 0 answers."""

    def __init__(self, path: Path, size: int, **options: object) -> None:
        table = _Table(size)
        self._threads = ThreadPoolExecutor(size)
        config = config_of(path, 1, **options)
        one_by_one = threading.Lock()

        def load(config: ExecutorConfig, ranks: Ranks) -> LoadedModel:
            with one_by_one:  # transformers changes settings of the process while it loads
                return load_model(config, ranks)

        with patch.object(model_runner, "load_model", load):
            made = [self._threads.submit(ModelRunner, config, ranks=ThreadRanks(rank, table)) for rank in range(size)]
            self.runners = [each.result() for each in made]
        self.info = self.runners[0].info

    def _on_all(self, call: Callable[[ModelRunner], object]) -> list[object]:
        return [each.result() for each in [self._threads.submit(call, runner) for runner in self.runners]]

    def reset(self, welcome: Welcome) -> None:
        self._on_all(lambda runner: runner.reset(welcome))

    def report_to(self, report: Report) -> None:
        agreement = Agreement(len(self.runners), report)
        for rank, runner in enumerate(self.runners):
            runner.report_to(partial(agreement.add, rank))  # type: ignore[arg-type] # grammars are not reported

    def handle(self, message: LoadAdapter) -> None:
        for runner in self.runners:
            runner.handle(message)

    def execute(self, plan: StepPlan) -> IssuedStep:
        first, *others = self._on_all(lambda runner: runner.execute(plan))
        for other in others:
            assert isinstance(other, IssuedStep)
            other.result()
        assert isinstance(first, IssuedStep)
        return first

    def close(self) -> None:
        self._on_all(lambda runner: runner.close())
        self._threads.shutdown()


def config_of(path: Path, size: int, **options: object) -> ExecutorConfig:
    """The settings of ``build_runner``, without its host tier."""
    settings = {
        "dtype": "float32",
        "device": "cpu",
        "kernels": auto_kernels(),
        "block_size": BLOCK_SIZE,
        "num_blocks": 400,
        "profile": False,
        "threads": 1,
        "log_level": "warning",
        "host_memory_dir": "none",
    }
    return ExecutorConfig(model=str(path), tensor_parallel=size, **(settings | options))  # type: ignore[arg-type]


@contextmanager
def group_of(path: Path, size: int, **options: object) -> Iterator[LeadingRunner]:
    """Rank 0 in this process, the others in processes of their own."""
    lost: list[str] = []
    runner = lead(config_of(path, size, **options), lost=lambda reason, code: lost.append(reason))
    assert isinstance(runner, LeadingRunner)
    try:
        yield runner
    finally:
        runner.close()
    assert not lost


def prompts() -> list[list[int]]:
    """Prompts of ``LENGTHS``, which also has the numbers of tokens to generate."""
    rng = random.Random(3)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length, _ in LENGTHS]


def greedy(runner: Runner, num_blocks: int = 14) -> tuple[list[list[int]], int]:
    """Tokens of a few requests in little memory, and how often a sequence was preempted."""
    requests = [
        request(prompt, most, name=f"r{number}")
        for number, (prompt, (_, most)) in enumerate(zip(prompts(), LENGTHS, strict=True))
    ]
    scheduler, _ = run_requests(
        runner, requests, num_blocks=num_blocks, max_num_seqs=6, max_num_batched_tokens=19, arrive_every=2
    )
    return [one.sequences[0].output_token_ids.tolist() for one in requests], scheduler.num_preemptions
