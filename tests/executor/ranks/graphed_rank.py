"""One of two processes that compute a model together, by CUDA graphs whose captures are a fake."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from pagewise_executor.collectives import Ranks
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.runner import Runner

from tests.executor.cuda_graphs.fake_captures import FakeCuda
from tests.executor.driver import request, run_requests
from tests.executor.ranks.groups import config_of

OPTIONS = {"kernels": "triton", "max_num_seqs": 2, "max_num_batched_tokens": 16, "num_blocks": 20}


class CapturedRanks(Ranks):
    """Ranks that compute nothing together while that is captured, as on a device."""

    cuda: FakeCuda

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.cuda.capturing else super().reduce(x)

    def gather_logits(self, local: torch.Tensor, vocab_size: int) -> torch.Tensor:
        if self.cuda.capturing:
            return torch.cat([local] * self.size, dim=-1)[..., :vocab_size] if self.first else local
        return super().gather_logits(local, vocab_size)


class Served(NamedTuple):
    """``captured``: by sort of steps the number of graphs. ``replays``: sorts and sizes, in order."""

    captured: dict[str, int]
    tokens: list[list[int]]
    replays: list[tuple[str, int]]


def tokens_of(runner: Runner) -> list[list[int]]:
    """Two requests that come one after the other, and the tokens that they get."""
    asked = [request([5, 6, 7], 4, "one"), request(list(range(5, 23)), 3, "other", temperature=0.9, seed=5)]
    run_requests(runner, asked, max_num_seqs=2, max_num_batched_tokens=16, arrive_every=2)
    return [one.sequences[0].output_token_ids.tolist() for one in asked]


def serve(rank: int, folder: Path, model: Path, failing: list[int]) -> list[Served]:
    """Capture and serve once for each entry of ``failing``: the number of the capture that fails on rank 1, or 0."""
    torch.set_num_threads(1)
    cuda = FakeCuda()
    ranks = CapturedRanks.join(rank, 2, folder, cuda=False)
    assert isinstance(ranks, CapturedRanks)
    ranks.cuda = cuda
    runner = ModelRunner(config_of(model, 1, **OPTIONS), ranks=ranks)
    assert runner._graphs is not None
    replays: list[tuple[str, int]] = []
    for steps in runner._graphs:
        cuda.let_replay(steps, replays)
    run = runner._graphs.decodes.run

    def run_copied(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """On a device, sampled tokens are copied to the host before the next step overwrites them."""
        logits, tokens = run(*inputs)
        return logits, tokens.clone()

    runner._graphs.decodes.run = run_copied  # type: ignore[method-assign]
    found = []
    for number in failing:
        cuda.captures.clear()
        cuda.fails_at = number if rank == 1 else 0
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
            cuda.put_in_place(patch)
            runner._graphs.capture(ranks)
        captured = {steps.name: len(steps.graphs) for steps in runner._graphs}
        found.append(Served(captured, tokens_of(runner), replays.copy()))
        for steps in runner._graphs:
            steps.drop()
        replays.clear()
    runner.close()
    return found
