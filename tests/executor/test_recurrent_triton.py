"""Models with recurrent layers by the Triton kernels: the tokens of transformers, whatever the steps."""

from pathlib import Path

import pytest
import torch

from tests.executor.played_states import Family, PlayedStates
from tests.executor.runners import BLOCK_SIZE
from tests.model_builders import build_model

FAMILIES = ["qwen3_next", "nemotron_h", "lfm2", "kimi_linear"]
OTHERS = ["qwen3_5", "granitemoehybrid", "bamba", "olmo_hybrid", "falcon_h1"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(one, marks=pytest.mark.long) for one in OTHERS)])
def test_chunks_among_decodes_and_snapshots(name: str, tmp_path: Path, device: torch.device) -> None:
    """Chunks of all sizes; switches within chunks, and of a row that decodes; rows that go on from a snapshot."""
    build_model(name, tmp_path, seed=7)
    family, played = Family(tmp_path), PlayedStates(tmp_path, kernels="triton", device=device.type, dtype="float32")
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
    """Drafts that are right in part, across the ends of blocks, among decodes: states follow from the kept tokens."""
    build_model(name, tmp_path, seed=7)
    family, played = Family(tmp_path), PlayedStates(tmp_path, kernels="triton", device=device.type, dtype="float32")
    row, other = (played.join(number, family.prompt(length)) for number, length in enumerate((14, 6)))
    played.step({0: 14, 1: 6})
    expected = family.generated(row.tokens, 16)
    for right, size in ((0, 3), (1, 4), (3, 3), (0, 1)):
        start, known = row.num_computed, len(row.sampled)
        draft = [(token + (number >= right)) % 199 for number, token in enumerate(expected[known : known + size])]
        for end in range(start, start + 1 + size):
            if end % BLOCK_SIZE == 0 and end not in row.snapshots:
                played.switch(0, end)
        played.step(drafts={0: draft})
        assert row.num_computed == start + 1 + right
        played.step()
    assert row.sampled == expected[: len(row.sampled)]
    assert other.sampled == family.generated(other.tokens, len(other.sampled))
    assert sorted(row.snapshots) == [16, 24]
    text = row.tokens + row.sampled
    for number, at in enumerate(sorted(row.snapshots), 2):
        played.join(number, text[:at] + family.prompt(3), shared=row, at=at)
        played.step({number: 3})
        fork = played.leave(number)
        assert fork.sampled == family.generated(fork.tokens, 1), at
    played.runner.close()
