"""Drafts by models that come with the served model: the tokens are the same without drafts, whatever is accepted."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.plan_checks import InvalidPlanError
from pagewise_scheduler.core.drafting.draft_lengths import Acceptance, DraftLengths
from pagewise_scheduler.core.requests.request import RequestSequence
from pagewise_shared.errors import ModelError
from pagewise_shared.protocol import NewSequence, ProposingStepPlan, StepPlan, Welcome, pack_int32s, unpack_int32s
from pagewise_shared.sampling import SamplingParams
from safetensors.torch import load_file

from tests.cpu_kernels import need_cpu_kernels
from tests.draft_models import build_cycling, build_head, build_mtp
from tests.executor.driver import outputs_of, run_requests
from tests.executor.runners import build_runner
from tests.executor.test_speculation import requests
from tests.model_builders import build_model

MTP = json.dumps({"method": "mtp", "num_speculative_tokens": 3})


def eagle3(head: Path, most: int = 3) -> str:
    return json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": most})


def longest(
    self: DraftLengths, candidates: Mapping[RequestSequence, tuple[Acceptance, int]], num_running: int, most: int
) -> dict[RequestSequence, int]:
    """Drafts that are as long as they can be, whether or not they pay."""
    return {sequence: limit for sequence, (_, limit) in candidates.items()} if most >= 3 * len(candidates) else {}


@pytest.fixture
def drafts_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftLengths, "choose", longest)


def check(runner: ModelRunner, accepted: int, max_tokens: int = 40, **more: Any) -> None:
    """Outputs are those without drafts, in chunks of other prompts, and when sequences lose their blocks."""
    num_blocks = (110 if runner.info.groups else 160) // runner.info.block_size
    for memory in ({}, {"num_blocks": num_blocks, "recovery": "swap"}, {"num_blocks": num_blocks}):
        settings = {"arrive_every": 3, "max_num_batched_tokens": 24, "max_num_seqs": 4} | memory | more
        run_requests(runner, asked := requests(max_tokens), **settings, proposes=False)
        scheduler, _ = run_requests(runner, found := requests(max_tokens), **settings)
        assert outputs_of(found) == outputs_of(asked)
        assert scheduler.features.drafts.num_drafts > 10
        assert scheduler.features.drafts.num_accepted_tokens >= accepted
        assert (scheduler.num_preemptions > 0) == bool(memory)
