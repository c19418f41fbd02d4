"""Models with recurrent layers by the Triton kernels: the tokens of transformers, whatever the steps."""

from pathlib import Path

import pytest
import torch

from tests.executor.played_states import Family, PlayedStates, check_drafts
from tests.model_builders import build_model

FAMILIES = ["qwen3_next", "nemotron_h", "lfm2", pytest.param("kimi_linear", marks=pytest.mark.long)]
OTHERS = ["qwen3_5", "granitemoehybrid", "bamba", "olmo_hybrid", "falcon_h1"]


def built(name: str, path: Path, device: torch.device) -> tuple[Family, PlayedStates]:
    build_model(name, path, seed=7)
    return Family(path), PlayedStates(path, kernels="triton", device=device.type, dtype="float32")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(one, marks=pytest.mark.long) for one in OTHERS)])
def test_chunks_among_decodes_and_snapshots(name: str, tmp_path: Path, device: torch.device) -> None:
    """Chunks of all sizes; switches within chunks, and of a row that decodes; rows that go on from a snapshot."""
    family, played = built(name, tmp_path, device)
    first = played.join(0, family.prompt(1))
    played.step({0: 1})
    base = played.join(1, family.prompt(72))
    for at in (1, 2, 19):
        played.switch(1, at)
    played.step({1: 70})
    other = played.join(2, family.prompt(14))
    played.step({1: 2, 2: 9})
    played.step({2: 5})
    played.switch(1, base.num_computed)
    played.step()
    rows = [first, base, other]
    for number, at in enumerate((2, 73), 3):
        text = (base.tokens + base.sampled)[:at]
        rows.append(played.join(number, text + family.prompt(3), shared=base, at=at))
    played.step({3: 3, 4: 3})
    played.step()
    for row in rows:
        assert row.sampled == family.generated(row.tokens, len(row.sampled))
    played.runner.close()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", FAMILIES)
def test_states_behind_drafts(name: str, tmp_path: Path, device: torch.device) -> None:
    check_drafts(*built(name, tmp_path, device), [(0, 3), (1, 4), (3, 3), (0, 1)], [16, 24])
