"""Models with recurrent layers under a scheduler: prefix hits, preemption, several outputs, and recovery."""

from pathlib import Path

import pytest
from pagewise_scheduler.core.tiers.recovery_plan import RecoveryMode

from tests.executor.parity import check_family, check_recovery
from tests.model_builders import RECURRENT, build_model

FEW = ("granitemoehybrid",)


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=[] if one in FEW else pytest.mark.long) for one in RECURRENT]
)
def test_families_equal_generate(family: str, tmp_path: Path) -> None:
    check_family(family, tmp_path, "cpu", 8)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["swap", "recompute", "both"])
def test_conversations_come_back(mode: RecoveryMode, tmp_path: Path) -> None:
    build_model("granitemoehybrid", tmp_path, seed=7)
    _, loaded = check_recovery(tmp_path, mode, 7, n=2, host_memory="4MiB" if mode != "recompute" else None)
    assert (loaded > 0) == (mode != "recompute")
