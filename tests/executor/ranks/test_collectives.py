"""What ranks compute together, by processes that gloo joins."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.executor.ranks.groups import group_of
from tests.executor.runners import outputs
from tests.model_builders import build_model

SUM_IN_ORDER = """
import sys, torch
from pathlib import Path
from pagewise_executor.collectives import Ranks

ranks = Ranks.join(int(sys.argv[1]), 3, Path(sys.argv[2]), cuda=False)
part = torch.full((64, 32), (1e8, -1e8, 1.0)[ranks.rank])  # added in another order this is 0
assert ranks.reduce_in_order(part).eq(1.0).all()
ranks.leave()
"""


def test_sums_are_added_in_the_order_of_ranks_wherever_an_element_lies(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-W", "ignore", "-c", SUM_IN_ORDER, str(rank), str(tmp_path)])
        for rank in range(3)
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0, 0]


@pytest.mark.interpreted
@pytest.mark.long
@pytest.mark.timeout(500)
def test_deterministic_results_of_four_ranks_are_the_same_bits_whatever_else_runs(tmp_path: Path) -> None:
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
