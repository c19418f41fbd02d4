"""An executor of several ranks whose layers form several groups."""

from pathlib import Path

import pytest
from pagewise_shared.protocol import DEVICE

from tests.executor.inventories import PROMPTS
from tests.executor.played_groups import Played
from tests.executor.ranks.groups import group_of
from tests.model_builders import build_model


def test_all_ranks_keep_the_blocks_of_an_inventory(tmp_path: Path) -> None:
    build_model("gemma3", tmp_path, seed=7)
    prompt = PROMPTS[3]
    with group_of(tmp_path, 2, lend_blocks=False) as runner:
        played = Played(runner)
        played.rejoin(keep=False)
        played.compute(prompt)
        names = played.hashes(prompt)
        for _ in range(2):  # one session after the other
            full, windows = (held[DEVICE] for held in played.offered())
            played.rejoin(keep=True)
            resumed = played.resume(prompt, [full[name] for name in names], (6, [windows[names[-1]]]), 40)
            assert resumed == pytest.approx(played.first, abs=1e-4)
