"""Ranks replay the same graphs in the same order, collectives inside, or none of them does.

Two processes with gloo; the interpreter computes captured operations. NCCL in a graph runs on GPUs only.
"""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from pagewise_executor.model_runner import ModelRunner

from tests.executor.ranks.graphed_rank import OPTIONS, serve, tokens_of
from tests.executor.ranks.groups import config_of
from tests.model_builders import build_model

pytestmark = pytest.mark.interpreted

MIXED, DECODES = "steps with prefill chunks", "decode steps"


@pytest.mark.long
@pytest.mark.timeout(400)
def test_ranks_replay_the_same_graphs_or_none(tmp_path: Path) -> None:
    model = tmp_path / "model"
    build_model("llama", model, seed=7, num_hidden_layers=1)
    failing = [0, 1, 2]
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        ranks = [processes.submit(serve, rank, tmp_path, model, failing) for rank in range(2)]
        expected = tokens_of(ModelRunner(config_of(model, 1, **OPTIONS)))
        first, second = [rank.result() for rank in ranks]
    assert first == second
    assert [served.tokens for served in first] == [expected] * 3
    all_of_them, only_decodes, only_mixed = first
    assert all_of_them.captured == {MIXED: 1, DECODES: 2}
    assert only_decodes.captured == {MIXED: 0, DECODES: 2}
    assert only_mixed.captured == {MIXED: 1, DECODES: 0}
    assert {name for name, _ in all_of_them.replays} == {MIXED, DECODES}
    assert {name for name, _ in only_decodes.replays} == {DECODES}
    assert {name for name, _ in only_mixed.replays} == {MIXED}
