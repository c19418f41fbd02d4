"""Draft models on several ranks: rank 0 draws the drafts, and the tokens are the same without drafts."""

import json
from contextlib import closing
from pathlib import Path

import pytest
from pagewise_executor.ranks.messages import decode_to_rank
from pagewise_shared.protocol import ProposingStepPlan, encode, pack_int32s

from tests.draft_models import build_cycling, build_mtp
from tests.drafting import draft_always
from tests.executor.driver import outputs_of, request, run_requests
from tests.executor.ranks.groups import ThreadGroup, group_of


@pytest.mark.parametrize(
    ("method", "processes"),
    [
        ("eagle3", False),
        pytest.param("glm4_moe", False, marks=pytest.mark.long),
        pytest.param("deepseek_v3", False, marks=pytest.mark.long),
        pytest.param("eagle3", True, marks=pytest.mark.long),
    ],
)
def test_ranks_draft_what_rank_0_draws(
    method: str, processes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``processes``: ranks are processes, as with an MTP layer in ``test_recurrent_shards``; else threads."""
    draft_always(monkeypatch)
    wanted: dict[str, object] = {"method": "mtp", "num_speculative_tokens": 3}
    if method == "eagle3":
        build_cycling(tmp_path / "model", tmp_path / "head")
        wanted |= {"method": "eagle3", "model": str(tmp_path / "head")}
    else:
        build_mtp(method, tmp_path / "model")
    make = group_of if processes else lambda *some, **more: closing(ThreadGroup(*some, **more))
    found = []
    with make(tmp_path / "model", 2, speculative_config=json.dumps(wanted)) as group:
        for proposes in (False, True):
            asked = [
                request([3 + number, 9, 40 + number], 12, f"r{number}", temperature=temperature, seed=number)
                for number, temperature in enumerate((0.0, 0.8, 0.0))
            ]
            scheduler, _ = run_requests(group, asked, proposes=proposes)  # type: ignore[arg-type]
            found.append(outputs_of(asked))
    assert found[0] == found[1]
    drafts = scheduler.features.drafts
    assert drafts.num_draft_tokens > 10
    if method == "eagle3":  # the head is always right where the likeliest token is taken
        assert drafts.num_accepted_tokens > 12


def test_ranks_are_asked_for_drafts() -> None:
    plan = ProposingStepPlan(1, 1, proposals=pack_int32s([0, 3]))
    assert decode_to_rank.decode(encode(plan)) == plan
