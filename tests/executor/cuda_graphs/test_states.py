"""Models with recurrent layers by CUDA graphs: replays of recorded captures give the tokens of transformers."""

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from pagewise_executor.collectives import ALONE
from pagewise_executor.cuda_graphs.graphed_steps import capture_graphs
from pagewise_executor.grouped_batch import GroupedBatch
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.models.recurrent import RecurrentContext
from pagewise_executor.recurrent_plans import RecurrentPlans
from pagewise_executor.state_tables import Piece
from pagewise_executor.step_work import Draft

from tests.executor.cuda_graphs.fake_captures import FakeCuda
from tests.executor.cuda_graphs.recorded import TOKENS, build
from tests.executor.driver import request, run_requests
from tests.executor.references import reference
from tests.model_builders import VOCAB_SIZE, build_model

pytestmark = pytest.mark.interpreted


def poison(runner: ModelRunner) -> None:
    """Overwrite the results of a replay, and map blocks without pages to a page of NaN."""
    graphs, batch, plans = runner._graphs, runner._batch, runner._forward_pass.plans
    assert graphs is not None
    assert plans is not None
    assert isinstance(batch, GroupedBatch)
    assert batch.states is not None
    for steps in graphs:
        for written in (steps._ids, steps._positions, steps._slots):
            written.fill_(2**40)
    for written in (graphs.mixed._hidden, graphs.decodes._logits):
        assert written is not None
        written.fill_(torch.nan)
    bad = runner.info.num_pages
    assert bad in batch._on_device._free[: batch._on_device.num_free], "the last page is never used"
    runner._pool.regions[0][0, bad].view(torch.float32).fill_(torch.nan)
    tables = runner._forward_pass.recurrent_context.tables
    blocks = np.arange(batch._on_device.num_blocks(batch.states.number))
    tables[torch.from_numpy(blocks[batch.states.pages_of(blocks)[:, 0] == 0])] = bad


@pytest.mark.timeout(500)
@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("nemotron_h", marks=pytest.mark.long)])
def test_replays_give_the_tokens_of_transformers(family: str, tmp_path: Path, recorded: FakeCuda) -> None:
    """Requests come and go, with prefix hits and chunks."""
    build_model(family, tmp_path, seed=7)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    rng = random.Random(5)
    base = [rng.randrange(3, VOCAB_SIZE) for _ in range(41)]
    prompts, lengths = [base[:33], base[:9], base, [*base[:20], 5, 6]], [5, 7, 4, 6]
    expected = reference(model, prompts, lengths, "cpu")
    runner = build(tmp_path, num_blocks=120)
    graphs = runner._graphs
    assert graphs is not None
    with torch.inference_mode():
        assert capture_graphs(ALONE, graphs.mixed, graphs.decodes)
    recorded.before_replay = lambda: poison(runner)
    requests = [
        request(prompt, length, f"r{number}")
        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    run_requests(runner, requests, num_blocks=100, max_num_seqs=3, max_num_batched_tokens=TOKENS, arrive_every=3)
    assert [asked.sequences[0].output_token_ids.tolist() for asked in requests] == expected
    assert recorded.replayed > 15


def test_steps_with_drafts_run_without_graphs(tmp_path: Path, recorded: FakeCuda) -> None:
    build_model("qwen3_5", tmp_path, seed=7)
    runner = build(tmp_path, num_blocks=40)
    graphs = runner._graphs
    assert graphs is not None
    graphs.mixed.runs = True
    graphs.mixed._plans._states = SimpleNamespace(sequences=[])  # type: ignore[assignment, union-attr]
    assert graphs.mixed.takes(SimpleNamespace(num_tokens=5, drafts=[]))  # type: ignore[arg-type]
    assert not graphs.mixed.takes(SimpleNamespace(num_tokens=5, drafts=[Draft(0, 3, np.zeros(1, np.int32))]))  # type: ignore[arg-type]


def test_a_step_with_many_switches_does_not_fit() -> None:
    pieces = [(1, Piece(at, 2, 2)) for at in range(1, 21)]
    plans = RecurrentPlans(RecurrentContext(), 100, 4, 32, torch.device("cpu"))
    plans._states = SimpleNamespace(sequences=[[(1, Piece(0, 1, 1))], pieces])  # type: ignore[assignment]
    assert not plans.fits(32)
    pieces.pop()
    assert plans.fits(32)
