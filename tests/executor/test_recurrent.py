"""Models with recurrent layers, whose states are kept in pages: the tokens of transformers, whatever the steps."""

from pathlib import Path

import pytest
from pagewise_executor.adapters.layers import AdapterContext, adapt_linears, shapes_of

from tests.executor.played_states import Family, PlayedStates, check_drafts
from tests.model_builders import RECURRENT, build_model


@pytest.fixture(scope="module", params=RECURRENT)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    path = tmp_path_factory.mktemp(request.param)
    build_model(request.param, path, seed=7)
    return Family(path)


def test_chunks_of_all_sizes_among_decodes(family: Family) -> None:
    played = PlayedStates(family.path)
    lengths, sizes = (1, 2, 19, 40, 33), ([1], [1], [1, 2, 3], [7, 13], [5, 1, 11])
    prompts = [family.prompt(length) for length in lengths]
    rows = []
    for number, (prompt, some) in enumerate(zip(prompts, sizes, strict=True)):
        rows.append(played.join(number, prompt))
        played.prefill(number, some)
    for _ in range(6):
        played.step()
    for row in rows:
        assert row.sampled == family.generated(row.tokens, len(row.sampled))
    assert len(rows[0].sampled) > 20
    played.runner.close()


def test_several_chunks_in_a_step(family: Family) -> None:
    """Chunks of equal size are one batch, both first chunks of prompts and later ones."""
    played = PlayedStates(family.path)
    rows = [played.join(number, family.prompt(length)) for number, length in enumerate((14, 14, 21, 3))]
    played.step({0: 7, 1: 7, 2: 7})
    played.step({0: 7, 2: 7, 3: 1})
    played.step({1: 7, 2: 7, 3: 2})
    for _ in range(5):
        played.step()
    for row in rows:
        assert row.sampled == family.generated(row.tokens, len(row.sampled))
    played.runner.close()


def test_rows_go_on_from_snapshots(family: Family) -> None:
    """Within a chunk, at its ends, between blocks and in a block; several rows go on from one snapshot at once."""
    played = PlayedStates(family.path)
    base = played.join(0, family.prompt(45))
    for at in (8, 11, 16):
        played.switch(0, at)
    played.step({0: 21})
    for at in (21, 24, 40):
        played.switch(0, at)
    played.step({0: 24})
    played.step()
    played.switch(0, base.num_computed)
    played.step()
    for at in sorted(base.snapshots):
        text = (base.tokens + base.sampled)[:at]
        for row, more in enumerate((1, 2, 5), 1):
            played.join(row, text + family.prompt(more), shared=base, at=at)
        played.step({row: len(held.tokens) - at for row, held in played.rows.items() if row})
        played.step()
        for row in [row for row in played.rows if row]:
            fork = played.leave(row)
            assert fork.sampled == family.generated(fork.tokens, len(fork.sampled)), at
    assert base.sampled == family.generated(base.tokens, len(base.sampled))
    played.runner.close()


def test_states_behind_drafts(family: Family) -> None:
    drafts = [(0, 3), (1, 4), (3, 3), (0, 1), (2, 5), (5, 5), (0, 2)]
    check_drafts(family, PlayedStates(family.path), drafts, [16, 24, 32])


def test_adapters_leave_recurrent_modules_alone(tmp_path: Path) -> None:
    model = build_model("lfm2", tmp_path)
    found = shapes_of(adapt_linears(model, AdapterContext(), ["model.layers.0.conv", "model.layers.2.conv"]))
    assert "model.layers.0.feed_forward.w1" in found
    assert not [name for name in found if ".conv." in name]
