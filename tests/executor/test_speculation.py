"""Drafts that a real model verifies: the tokens are the same without drafts, with any requests beside them."""

from math import ceil
from pathlib import Path
from typing import Any

import pytest
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.plan_checks import InvalidPlanError
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.grouped import GroupedKVCacheManager
from pagewise_shared.config import SpeculativeConfig
from pagewise_shared.protocol import NewSequence, StepPlan, Welcome, pack_int32s, unpack_int32s
from pagewise_shared.sampling import SamplingParams

from tests.cpu_kernels import need_cpu_kernels
from tests.executor.drafted_requests import requests
from tests.executor.driver import arena_of, request, run_requests
from tests.executor.runners import build_runner
from tests.model_builders import RECURRENT, build_model

NGRAM = SpeculativeConfig(num_speculative_tokens=5, prompt_lookup_max=3, prompt_lookup_min=1, disable_by_batch_size=4)


def need(kernels: str) -> None:
    if kernels == "cpu":
        need_cpu_kernels()


def outputs(runner: ModelRunner, asked: list[Request], **options: Any) -> tuple[Scheduler, list[list[int]]]:
    scheduler, _ = run_requests(runner, asked, **options)
    return scheduler, [sequence.output_token_ids.tolist() for one in asked for sequence in one.sequences]


def check(
    path: Path, kernels: str, family: str = "llama", accepted: int = 10, max_tokens: int = 45, **options: Any
) -> None:
    build_model(family, path, seed=5)
    runner = build_runner(path, kernels=kernels, **options)
    # Chunks of other prompts in steps with drafts; few blocks, so that sequences lose theirs and come back.
    # With groups of layers, blocks behind windows are free for others.
    num_blocks = (110 if runner.info.groups else 160) // runner.info.block_size
    if any(group.state for group in runner.info.groups):
        shape = arena_of(runner.info, 24)
        assert shape is not None
        longest = GroupedKVCacheManager(shape, runner.info.block_size).room_for(30 + max_tokens)
        num_blocks = ceil(1.4 * longest / sum(group.pages_per_block for group in runner.info.groups))
    for more in (
        {},
        {"num_blocks": num_blocks, "recovery": "swap"},
        {"num_blocks": num_blocks, "recovery": "recompute"},
    ):
        settings = {"arrive_every": 3, "max_num_batched_tokens": 24, "max_num_seqs": 4} | more
        _, expected = outputs(runner, requests(max_tokens), **settings)
        scheduler, found = outputs(runner, requests(max_tokens), **settings, speculative=NGRAM)
        assert found == expected
        # 20 to 38. With "swap" that depends on when blocks come back from the host: until then there are no drafts.
        assert scheduler.features.drafts.num_accepted_tokens > accepted
        assert (scheduler.num_preemptions > 0) == bool(more)


@pytest.mark.parametrize("kernels", ["cpu", "torch"])
def test_tokens_are_those_without_drafts(tmp_path: Path, kernels: str) -> None:
    need(kernels)
    check(tmp_path, kernels)


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("mistral", "cpu"),
        ("mistral", "torch"),
        pytest.param("gemma3", "torch", marks=pytest.mark.long),
        *(
            pytest.param(family, "cpu", marks=pytest.mark.long)
            for family in (
                *("gemma3", "gemma4", "gemma4_moe", "gpt_oss", "llama4", "olmo3", "ministral"),
                *("deepseek_v3", "glm4_moe_lite", "mistral4", "glm4_moe", "minimax_m2", "qwen3_moe"),
            )
        ),
    ],
)
def test_windows_end_where_they_do_without_drafts(tmp_path: Path, family: str, kernels: str) -> None:
    """Windows and chunks of all layers, of some (which are groups of their own), latents, and mixtures without."""
    need(kernels)
    # Outputs of this tiny Ministral seldom repeat what was before.
    check(tmp_path, kernels, family=family, accepted=3 if family == "ministral" else 10)


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        ("lfm2", "torch"),
        *(pytest.param(family, "torch", marks=pytest.mark.long) for family in RECURRENT if family != "lfm2"),
        *(pytest.param(family, "cpu", marks=pytest.mark.long) for family in ("qwen3_next", "nemotron_h")),
    ],
)
def test_states_are_those_behind_the_tokens_that_are_kept(tmp_path: Path, family: str, kernels: str) -> None:
    need(kernels)
    # Outputs grow by more than the states that sequences need only when they begin.
    check(tmp_path, kernels, family=family, accepted=3, max_tokens=45 if family == "lfm2" else 100)


@pytest.mark.long
def test_the_triton_kernels_verify_drafts(tmp_path: Path) -> None:
    build_model("llama", tmp_path, seed=5)
    runner = build_runner(tmp_path, kernels="triton")
    assert runner._graphs is not None
    asked = [
        [request([5, 6, 7] * 3, 14, "a"), request([8, *[9, 4] * 4], 12, "b", temperature=0.5, seed=3)] for _ in "ab"
    ]
    _, expected = outputs(runner, asked[0])
    runner._graphs.mixed.runs = True  # from static buffers, as CUDA graphs do
    scheduler, found = outputs(runner, asked[1], speculative=NGRAM)
    assert found == expected
    assert scheduler.features.drafts.num_drafts > 0


@pytest.mark.gpu
def test_drafts_are_verified_on_a_gpu(tmp_path: Path) -> None:
    build_model("llama", tmp_path, seed=5)
    runner = build_runner(tmp_path, device="cuda")
    _, expected = outputs(runner, requests(), arrive_every=9)
    scheduler, found = outputs(runner, requests(), arrive_every=9, speculative=NGRAM)
    assert found == expected
    assert scheduler.features.drafts.num_accepted_tokens > 20


def decoding(runner: ModelRunner, **sampling: Any) -> list[int]:
    """Let row 0 decode; returns its first two tokens."""
    runner.reset(Welcome(1, 4, 64))
    params = SamplingParams(**({"temperature": 0.0} | sampling))
    new = NewSequence(0, pack_int32s([5, 6, 7]), 3, 0, pack_int32s([0, 1]), params)
    first = runner.execute(StepPlan(1, 1, joined=(new,), chunks=((0, 3),))).result()
    return [*unpack_int32s(first.tokens), *unpack_int32s(runner.execute(StepPlan(1, 2)).result().tokens)]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    path = tmp_path_factory.mktemp("model")
    build_model("llama", path, seed=5)
    return build_runner(path)


def test_every_token_behind_a_draft_is_returned_and_the_row_goes_on_behind_what_was_right(runner: ModelRunner) -> None:
    decoding(runner)
    alone = [int(unpack_int32s(runner.execute(StepPlan(1, step)).result().tokens)[0]) for step in range(3, 9)]
    decoding(runner)
    wrong = (alone[2] + 1) % 199
    result = runner.execute(StepPlan(1, 3, drafts=((0, pack_int32s([*alone[:2], wrong, wrong])),))).result()
    drawn = unpack_int32s(result.tokens).tolist()
    assert (len(drawn), drawn[:3]) == (5, alone[:3])
    rest = [int(unpack_int32s(runner.execute(StepPlan(1, step)).result().tokens)[0]) for step in range(4, 7)]
    assert rest == alone[3:]


@pytest.mark.parametrize(
    ("row", "draft", "why"),
    [
        (1, [5], "does not decode"),
        (0, [], "no tokens"),
        (0, [199], "vocabulary"),
        (0, [-1], "vocabulary"),
        (0, [5] * 12, "no slots"),
        (0, [5] * 65, "at most 64 tokens"),
    ],
)
def test_impossible_drafts_are_refused(runner: ModelRunner, row: int, draft: list[int], why: str) -> None:
    decoding(runner)
    with pytest.raises(InvalidPlanError, match=why):
        runner.execute(StepPlan(1, 3, drafts=((row, pack_int32s(draft)),)))


def test_two_drafts_for_one_row_are_refused(runner: ModelRunner) -> None:
    decoding(runner)
    with pytest.raises(InvalidPlanError, match="two drafts"):
        runner.execute(StepPlan(1, 3, drafts=((0, pack_int32s([5])), (0, pack_int32s([6])))))


def test_a_draft_needs_the_result_of_the_step_before(runner: ModelRunner) -> None:
    decoding(runner)
    runner.execute(StepPlan(1, 3))
    with pytest.raises(InvalidPlanError, match="before its last token is known"):
        runner.execute(StepPlan(1, 4, drafts=((0, pack_int32s([5])),)))


@pytest.mark.parametrize("sampling", [{"presence_penalty": 0.5}, {"min_tokens": 9, "stop_token_ids": (1,)}])
def test_a_draft_is_refused_where_the_draw_depends_on_the_tokens_before(
    runner: ModelRunner, sampling: dict[str, Any]
) -> None:
    decoding(runner, **sampling)
    with pytest.raises(InvalidPlanError, match="depends on the tokens before"):
        runner.execute(StepPlan(1, 3, drafts=((0, pack_int32s([5])),)))
