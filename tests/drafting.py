"""Drafts of draft models that do not depend on the times of steps, which other work on the machine changes."""

from collections.abc import Mapping

import pytest
from pagewise_scheduler.core.drafting.draft_lengths import Acceptance, DraftLengths
from pagewise_scheduler.core.drafting.draft_trials import DraftTrials
from pagewise_scheduler.core.drafting.step_times import StepTimes
from pagewise_scheduler.core.requests.request import RequestSequence


def _longest(
    self: DraftLengths, candidates: Mapping[RequestSequence, tuple[Acceptance, int]], num_running: int, most: int
) -> dict[RequestSequence, int]:
    lengths = {sequence: limit for sequence, (_, limit) in candidates.items()}
    return lengths if sum(lengths.values()) <= most else {}


def draft_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let schedulers ask for drafts that are as long as they can be, whether or not they pay."""
    monkeypatch.setattr(DraftLengths, "choose", _longest)
    monkeypatch.setattr(DraftLengths, "pays", lambda *_: True)
    monkeypatch.setattr(DraftTrials, "saved", lambda *_: None)
    monkeypatch.setattr(DraftTrials, "took_prompt", lambda *_: None)
    monkeypatch.setattr(StepTimes, "wants_plain", lambda *_: False)
