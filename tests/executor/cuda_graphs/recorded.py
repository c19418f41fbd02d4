"""Runners whose steps run by recorded captures, and what replays of these compute."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers
from pagewise_executor.collectives import ALONE
from pagewise_executor.cuda_graphs.graphed_steps import capture_graphs
from pagewise_executor.grouped_batch import GroupedBatch
from pagewise_executor.model_runner import ModelRunner
from pagewise_shared.config import ExecutorConfig

from tests.executor.cuda_graphs.fake_captures import FakeCuda
from tests.executor.driver import request, run_requests
from tests.executor.references import reference
from tests.model_builders import EAGER, VOCAB_SIZE, build_model

BLOCK = 4
TOKENS = 16
"""Of a step at most, so that all steps run by graphs."""


def build(path: Path, **options: object) -> ModelRunner:
    settings = {"block_size": BLOCK, "num_blocks": 60, "max_num_seqs": 3, "max_num_batched_tokens": TOKENS} | options
    return ModelRunner(
        ExecutorConfig(model=str(path), device="cpu", kernels="triton", profile=False, **settings)  # type: ignore[arg-type]
    )


def poison(runner: ModelRunner) -> tuple[int, GroupedBatch]:
    """Overwrite what a replay computes, and a page that no sequence has, with numbers that are none; return its id and
    the batch."""
    graphs, batch = runner._graphs, runner._batch
    assert graphs is not None
    assert isinstance(batch, GroupedBatch)
    for steps in graphs:
        for written in (steps._ids, steps._positions, steps._slots):
            written.fill_(2**40)
    for written in (graphs.mixed._hidden, graphs.decodes._logits):
        assert written is not None
        written.fill_(torch.nan)
    bad = runner.info.num_pages
    assert bad in batch._on_device._free[: batch._on_device.num_free], "the last page is never used"
    runner._pool.regions[0][0, bad].view(torch.float32).fill_(torch.nan)
    return bad, batch


def check_replays(
    family: str, path: Path, recorded: FakeCuda, poison: Callable[[ModelRunner], None], sizes: Sequence[int],
    lengths: list[int], *, num_blocks: int, most_blocks: int, **shape: object,
) -> ModelRunner:  # fmt: skip
    """Requests come and go, with prefix hits and chunks, and get the tokens of transformers by replays.

    ``sizes``: of two prompts, one of which begins the other. ``lengths``: of four outputs. ``poison``: runs before each
    replay. ``num_blocks``: of requests; ``most_blocks``: of the runner. ``shape``: of the model.
    """
    build_model(family, path, seed=7, **shape)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager" if family in EAGER else "sdpa"
    )
    rng = random.Random(5)
    base = [rng.randrange(3, VOCAB_SIZE) for _ in range(max(sizes))]
    prompts = [base[: min(sizes)], base[:9], base, [*base[:20], 5, 6]]
    expected = reference(model, prompts, lengths, "cpu")
    runner = build(path, num_blocks=most_blocks)
    graphs = runner._graphs
    assert graphs is not None
    with torch.inference_mode():
        assert capture_graphs(ALONE, graphs.mixed, graphs.decodes)
    recorded.before_replay = lambda: poison(runner)
    requests = [
        request(prompt, length, f"r{number}")
        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    run_requests(runner, requests, num_blocks=num_blocks, max_num_seqs=3, max_num_batched_tokens=TOKENS, arrive_every=3)
    assert [asked.sequences[0].output_token_ids.tolist() for asked in requests] == expected
    return runner
