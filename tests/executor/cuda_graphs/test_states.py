"""Models with recurrent layers by CUDA graphs: replays of recorded captures give the tokens of transformers."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.models.recurrent import RecurrentContext
from pagewise_executor.recurrent_plans import RecurrentPlans
from pagewise_executor.state_tables import Piece
from pagewise_executor.step_work import Draft

from tests.executor.cuda_graphs.fake_captures import FakeCuda
from tests.executor.cuda_graphs.recorded import build, check_replays, poison
from tests.model_builders import build_model

pytestmark = pytest.mark.interpreted


def poison_states(runner: ModelRunner) -> None:
    """Overwrite the results of a replay, and map blocks without pages to a page of NaN."""
    bad, batch = poison(runner)
    assert batch.states is not None
    tables = runner._forward_pass.recurrent_context.tables
    blocks = np.arange(batch._on_device.num_blocks(batch.states.number))
    tables[torch.from_numpy(blocks[batch.states.pages_of(blocks)[:, 0] == 0])] = bad


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "family", ["qwen3_5", *(pytest.param(one, marks=pytest.mark.long) for one in ("nemotron_h", "kimi_linear"))]
)
def test_replays_give_the_tokens_of_transformers(family: str, tmp_path: Path, recorded: FakeCuda) -> None:
    check_replays(
        family, tmp_path, recorded, poison_states, (33, 41), [5, 7, 4, 6], num_blocks=100, most_blocks=240
    )  # fmt: skip
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
