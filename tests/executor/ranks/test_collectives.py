"""Collective operations of ranks, by processes that gloo joins."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pagewise_executor.collectives import Ranks

from tests.executor.ranks.groups import group_of
from tests.executor.runners import outputs
from tests.model_builders import build_model

SUM = """
import sys, torch
from pathlib import Path
from pagewise_executor.collectives import Ranks

ranks = Ranks.join(int(sys.argv[1]), 3, Path(sys.argv[2]), cuda=False)
ranks.reduce_in_order(torch.full((64, 32), float(sys.argv[3])))
ranks.leave()
"""


def test_sums_are_added_in_the_order_of_ranks_wherever_an_element_lies(tmp_path: Path) -> None:
    others = [
        subprocess.Popen([sys.executable, "-c", SUM, rank, str(tmp_path), part])
        for rank, part in (("1", "-1e8"), ("2", "1"))
    ]
    before = dict(os.environ)
    ranks = Ranks.join(0, 3, tmp_path, cuda=False)
    found = ranks.reduce_in_order(torch.full((64, 32), 1e8))
    ranks.leave()
    assert os.environ == before, "processes that are started later would use the interface of these ranks"
    assert found.eq(1.0).all(), "added in another order, this is 0"
    assert [other.wait(60) for other in others] == [0, 0]


@pytest.mark.interpreted
@pytest.mark.long
@pytest.mark.timeout(500)
def test_deterministic_results_of_four_ranks_are_the_same_bits_whatever_else_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The ranks in processes of their own interpret kernels too.
    path = [str(tmp_path), str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    in_order = "from tests.interpreter import sum_products_in_order as in_order\n\nin_order()\n"
    (tmp_path / "sitecustomize.py").write_text(in_order)
    build_model("llama", tmp_path, seed=7, num_hidden_layers=1)
    shared = list(range(20, 29))
    prompts = {0: [*shared, 3], 1: [*shared, 4, 5], 2: [7]}
    with group_of(tmp_path, 4, kernels="triton", deterministic=True, block_size=4, num_blocks=60) as group:
        alone = {}
        for number, prompt in prompts.items():
            alone |= outputs(group, {number: prompt}, max_num_seqs=1)
        together = outputs(group, prompts, max_num_seqs=3, max_num_batched_tokens=64)
        crowded = outputs(group, prompts, num_blocks=8, max_num_seqs=3, max_num_batched_tokens=5, arrive_every=1)
    assert alone == together == crowded
