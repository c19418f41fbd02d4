"""Thinking budgets: the end of thinking is sampled in its place, whatever happens to a sequence."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.plan_checks import InvalidPlanError
from pagewise_scheduler.core.requests.request import Request
from pagewise_shared.config import SpeculativeConfig
from pagewise_shared.protocol import NewSequence, StepPlan, Welcome, pack_int32s, unpack_int32s
from pagewise_shared.sampling import SamplingParams
from pagewise_shared.thinking import ThinkingBudget

from tests.executor.driver import request, run_moved, run_requests
from tests.executor.runners import build_runner
from tests.model_builders import VOCAB_SIZE, build_model

END, OPEN = 5, 6
PHRASE = (7, 8, END, 9)
FEW = (10, 11, 12)
NGRAM = SpeculativeConfig(num_speculative_tokens=5, prompt_lookup_max=3, prompt_lookup_min=1, disable_by_batch_size=8)


def budget(num_tokens: int, forced: tuple[int, ...] = (END,), opens_within: int = 0) -> ThinkingBudget:
    return ThinkingBudget(num_tokens, END, forced, (OPEN,), opens_within)


KINDS: list[dict[str, Any]] = [
    {"allowed": FEW, "thinking": budget(0)},
    {"allowed": FEW, "thinking": budget(13, PHRASE), "temperature": 1.0, "seed": 3, "n": 2},
    {"allowed": (*FEW, END), "thinking": budget(9, PHRASE), "temperature": 1.0, "seed": 4, "n": 2},
    {"allowed": (*FEW, OPEN), "thinking": budget(4, opens_within=100), "temperature": 1.0, "seed": 5},
    {"allowed": FEW, "thinking": budget(3, opens_within=4)},
    {"bad_words": ((END,),), "logit_bias": {END: -50.0}, "thinking": budget(21), "logprobs": 2},
    {"allowed": FEW, "repetition_penalty": 1.3, "thinking": budget(17)},
    {},
]


def asked(length: int = 40) -> list[Request]:
    prompts = [[20 + number, 30, 31, 32, 33, 31, 32] for number in range(len(KINDS))]
    return [request(prompt, length, f"t{at}", **KINDS[at]) for at, prompt in enumerate(prompts)]


def by_kind(requests: list[Request]) -> list[list[list[int]]]:
    return [[sequence.output_token_ids.tolist() for sequence in one.sequences] for one in requests]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_model("llama", path, seed=7)
    return path


@pytest.fixture(scope="module")
def runner(path: Path) -> ModelRunner:
    return build_runner(path)


@pytest.fixture(scope="module")
def alone(runner: ModelRunner) -> list[list[list[int]]]:
    requests = asked()
    for one in requests:
        run_requests(runner, [one])
    return by_kind(requests)


def test_thinking_ends_where_its_budget_is_used_up(alone: list[list[list[int]]]) -> None:
    closed, phrases, sometimes, reopened, unopened, forbidden, penalised, _ = alone
    assert closed[0][0] == END
    assert END not in closed[0][1:]
    for output in phrases:
        assert tuple(output[13:17]) == PHRASE
        assert set(output[:13] + output[17:]) <= set(FEW)
    assert phrases[0] != phrases[1]
    ends = [output.index(END) for output in sometimes]
    for output, end in zip(sometimes, ends, strict=True):
        assert end < 9 or (end == 11 and tuple(output[9:13]) == PHRASE)
    assert END not in unopened[0], "it never began to think"
    output = reopened[0]
    first = output.index(OPEN)
    assert output.index(END) == first + 5
    rest = output[first + 6 :]
    assert OPEN in rest
    assert all(after == END for before, after in pairwise(rest) if before == OPEN), "the budget is the whole output's"
    assert forbidden[0].index(END) == 21
    assert penalised[0].index(END) == 17


def test_budgets_hold_beside_others_under_preemption_and_moves(
    path: Path, runner: ModelRunner, alone: list[list[list[int]]]
) -> None:
    preempted = asked()
    scheduler, _ = run_requests(runner, preempted, num_blocks=16, max_num_seqs=8)
    assert scheduler.num_preemptions > 0
    assert by_kind(preempted) == alone

    moved = asked()
    run_moved([(runner, 9), (build_runner(path), 8), (runner, 3)], moved)
    assert by_kind(moved) == alone


def test_drafts_end_where_a_token_may_be_forced(runner: ModelRunner, alone: list[list[list[int]]]) -> None:
    drafted = asked()
    scheduler, _ = run_requests(runner, drafted, speculative=NGRAM, max_num_seqs=4)
    assert by_kind(drafted) == alone
    assert scheduler.features.drafts.num_accepted_tokens > 5


def test_a_draft_where_a_token_may_be_forced_is_no_plan(runner: ModelRunner) -> None:
    runner.reset(Welcome(1, 4, 64))
    new = NewSequence(0, pack_int32s([1, 2, 3]), 3, 0, pack_int32s([0]), SamplingParams(thinking=budget(3)))
    result = runner.execute(StepPlan(1, 1, joined=(new,), chunks=((0, 3),))).result()
    assert unpack_int32s(result.tokens)[0] != END
    runner.execute(StepPlan(1, 2, drafts=((0, pack_int32s([1])),))).result()
    with pytest.raises(InvalidPlanError, match="thinking budget"):
        runner.execute(StepPlan(1, 3, drafts=((0, pack_int32s([1, 1])),)))


@pytest.mark.parametrize(
    "wrong",
    [
        ThinkingBudget(1, END, (OPEN,), (OPEN,)),
        ThinkingBudget(1, VOCAB_SIZE, (VOCAB_SIZE,), (OPEN,)),
        ThinkingBudget(-1, END, (END,), (OPEN,)),
        ThinkingBudget(1, END, (END,), ()),
    ],
)
def test_impossible_budgets_are_no_plan(runner: ModelRunner, wrong: ThinkingBudget) -> None:
    runner.reset(Welcome(1, 4, 64))
    new = NewSequence(0, pack_int32s([1, 2, 3]), 3, 0, pack_int32s([0]), SamplingParams(thinking=wrong))
    with pytest.raises(InvalidPlanError, match="thinking budget"):
        runner.execute(StepPlan(1, 1, joined=(new,), chunks=((0, 3),)))


def test_steps_that_sample_in_a_graph_are_sampled_again(path: Path, device: torch.device) -> None:
    runner = build_runner(path, device=device.type, kernels="triton", max_num_seqs=4)

    def sampled(*budgets: ThinkingBudget | None) -> list[list[int]]:
        requests = [
            request([20 + number, 30, 31], 9, f"g{number}", temperature=number / 2, seed=number, thinking=one)
            for number, one in enumerate(budgets)
        ]
        run_requests(runner, requests, max_num_seqs=4)
        return [one.sequences[0].output_token_ids.tolist() for one in requests]

    free = sampled(None, None, None)
    short, phrase, other = sampled(budget(4), budget(2, PHRASE), None)
    assert short[:5] == [*free[0][:4], END]
    assert phrase[:6] == [*free[1][:2], *PHRASE]
    assert other == free[2]
