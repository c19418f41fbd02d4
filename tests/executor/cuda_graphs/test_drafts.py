"""Draft models behind steps by CUDA graphs: they draft the same behind replays of recorded captures."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pagewise_executor.collectives import ALONE
from pagewise_executor.cuda_graphs.graphed_steps import capture_graphs
from pagewise_executor.issued_step import IssuedStep
from pagewise_shared.protocol import StepPlan

from tests.draft_models import build_head, build_mtp
from tests.drafting import draft_always
from tests.executor.cuda_graphs.fake_captures import FakeCuda
from tests.executor.cuda_graphs.recorded import build
from tests.executor.driver import outputs_of, request, run_requests
from tests.model_builders import build_model

pytestmark = pytest.mark.interpreted

SMALL: Any = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "num_blocks": 40}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", ["eagle3", pytest.param("mtp", marks=pytest.mark.long)])
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
    runner = build(tmp_path / "model", **SMALL, speculative_config=json.dumps(wanted))
    graphs = runner._graphs
    assert graphs is not None
    plans: list[StepPlan] = []

    def execute(plan: StepPlan, issue: Callable[[StepPlan], IssuedStep] = runner.execute) -> IssuedStep:
        plans.append(plan)
        return issue(plan)

    monkeypatch.setattr(runner, "execute", execute)
    found = []
    for captured in (False, True):
        if captured:
            with torch.inference_mode():
                assert capture_graphs(ALONE, graphs.mixed)
        plans.clear()
        asked = [request([5, 9, 3 + number, *range(20, 20 + 7 * number)], 5, f"r{number}") for number in range(2)]
        run_requests(runner, asked, **SMALL)
        found.append((outputs_of(asked), [plan.drafts for plan in plans]))
        assert bool(recorded.replayed) == captured
    assert found[0] == found[1]
    assert sum(map(bool, found[0][1])) > 2, "drafts are verified"
    assert recorded.replayed >= len(plans) - 1, "and the last step may be one of decodes alone"
