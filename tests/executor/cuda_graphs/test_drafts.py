"""Draft models behind steps by CUDA graphs: they draft the same behind replays of recorded captures."""

import json
from pathlib import Path

import pytest
import torch
from pagewise_executor.collectives import ALONE
from pagewise_executor.cuda_graphs.graphed_steps import capture_graphs

from tests.draft_models import build_head, build_mtp
from tests.drafting import draft_always
from tests.executor.cuda_graphs.fake_captures import FakeCuda
from tests.executor.cuda_graphs.recorded import TOKENS, build
from tests.executor.driver import outputs_of, request, run_requests
from tests.model_builders import build_model

pytestmark = pytest.mark.interpreted


@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_drafts_behind_replays_are_those_behind_other_steps(
    method: str, tmp_path: Path, recorded: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_always(monkeypatch)
    wanted: dict[str, object] = {"method": method, "num_speculative_tokens": 2}
    if method == "mtp":
        build_mtp("glm4_moe", tmp_path / "model")
    else:
        build_model("llama", tmp_path / "model", seed=5)
        build_head(tmp_path / "head")
        wanted["model"] = str(tmp_path / "head")
    runner = build(tmp_path / "model", num_blocks=100, speculative_config=json.dumps(wanted))
    graphs = runner._graphs
    assert graphs is not None
    found = []
    for captured in (False, True):
        if captured:
            with torch.inference_mode():
                assert capture_graphs(ALONE, graphs.mixed, graphs.decodes)
        asked = [request([5, 9, 3 + number, *range(20, 20 + 9 * number)], 7, f"r{number}") for number in range(3)]
        scheduler, steps = run_requests(runner, asked, max_num_seqs=3, max_num_batched_tokens=TOKENS)
        drafts = scheduler.features.drafts
        assert drafts.num_draft_tokens > 5
        found.append((outputs_of(asked), drafts.num_draft_tokens, drafts.num_accepted_tokens))
        assert bool(recorded.replayed) == captured
    assert found[0] == found[1]
    assert recorded.replayed == len(steps)
