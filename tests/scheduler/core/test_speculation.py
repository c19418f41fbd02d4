"""Drafts in plans: the tokens are the same without drafts, in fewer steps, and no other request is delayed."""

from array import array
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagewise_scheduler.core.drafting import prompt_lookup
from pagewise_scheduler.core.drafting.prompt_lookup import look_up
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.scheduling.plan_builder import PlanBuilder
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_shared.config import SpeculativeConfig
from pagewise_shared.protocol import StepPlan, StepResult, pack_int32s
from pagewise_shared.sampling import BeamParams, num_accepted, token_constraints
from pagewise_shared.segments import make_segments, mark_segments

from tests.core_requests import change
from tests.scheduler.core import checking_executor
from tests.scheduler.core.builders import create_request, create_scheduler
from tests.scheduler.core.checking_executor import CheckingExecutor
from tests.scheduler.core.driving import assert_all_free, executor_for, expected_tokens, run

NGRAM = SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_max=2, prompt_lookup_min=1, disable_by_batch_size=4)
WIDE = SpeculativeConfig(num_speculative_tokens=48, prompt_lookup_max=1, prompt_lookup_min=1, disable_by_batch_size=4)
REPEATING = [7, 8, 9, 7, 8, 9, 7, 8]


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking_executor, "repeats_itself", True)


def looked_up(tokens: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """The result of ``look_up``, in plain loops."""
    for size in range(longest, shortest - 1, -1):
        for place in range(len(tokens) - size - 1, -1, -1):
            if tokens[place : place + size] == tokens[len(tokens) - size :]:
                further = list(tokens)
                for index in range(count):
                    further.append(further[place + size + index])
                return further[len(tokens) :]
    return []


@given(
    # Ids whose bytes look alike at offsets inside of tokens.
    st.lists(st.sampled_from([0, 1, 256, 65536, 0x01010101, 0x00010001]), min_size=1, max_size=24),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 5),
)
def test_what_followed_the_last_tokens_is_found(tokens: list[int], shortest: int, more: int, count: int) -> None:
    found = look_up(pack_int32s(tokens), shortest, shortest + more, count)
    assert found.tolist() == looked_up(tokens, shortest, shortest + more, count)


def test_prompts_that_are_found_between_tokens_only_are_not_searched_to_their_end() -> None:
    assert look_up(pack_int32s([1, 1, 1, 5, *[256] * 20, 1, 1, 1]), 3, 3, 1).tolist() == [5]
    assert look_up(pack_int32s([1, 1, 1, 5, *[256] * 200, 1, 1, 1]), 3, 3, 1).tolist() == []


def test_a_draft_is_accepted_up_to_the_first_other_token() -> None:
    assert [num_accepted([5, 6], drawn) for drawn in ([5, 6, 7], [5, 7, 7], [6, 6, 7])] == [2, 1, 0]


def answers(scheduler: Scheduler, token_of: dict[int, int]) -> Iterator[StepPlan]:
    """Play an executor that samples by the position of a token; plans as they come, one step in flight at a time."""
    while (plan := scheduler.schedule(0.0)) is not None:
        yield plan
        step = scheduler.steps_in_flight[0]
        tokens: list[int] = []
        for sequence in dict.fromkeys(step.sampled):
            first = sequence.num_tokens
            tokens += [token_of.get(first + i, 0) for i in range(step.sampled.count(sequence))]
        scheduler.update(StepResult(plan.epoch, plan.step, pack_int32s(tokens)))


def test_one_step_keeps_what_was_drafted_and_one_token_more() -> None:
    scheduler = create_scheduler(speculative=NGRAM)
    scheduler.add(request := create_request(prompt=REPEATING, max_tokens=9))
    drawn = dict(enumerate([9, 7, 8, 9, 7, 8, 1, 2, 3], len(REPEATING)))
    drafts = [[array("i", tokens).tolist() for _, tokens in plan.drafts] for plan in answers(scheduler, drawn)]
    # The prompt; 7 8 9 7 were right and 8 came free; of the next draft 1 was not, and nothing stood behind 1 before.
    assert drafts[:3] == [[], [[7, 8, 9, 7]], [[9, 7]]]
    assert request.sequences[0].output_token_ids.tolist() == list(drawn.values())
    assert scheduler.features.drafts.num_accepted_tokens == 4
    assert_all_free(scheduler)


@pytest.mark.parametrize("length", range(1, 12))
def test_a_sequence_ends_at_its_length_inside_a_draft(length: int) -> None:
    scheduler = create_scheduler(speculative=NGRAM)
    scheduler.add(request := create_request(prompt=REPEATING, max_tokens=length))
    drawn = dict(enumerate([9, 7, 8] * 9, len(REPEATING)))
    plans = list(answers(scheduler, drawn))
    (output,) = request.sequences
    assert (output.finish_reason, output.output_token_ids.tolist()) == ("length", list(drawn.values())[:length])
    assert len(plans) <= 2 + length // 4
    assert_all_free(scheduler)


@pytest.mark.parametrize("min_tokens", [0, 3, 9])
def test_a_token_that_ends_a_sequence_is_never_followed_by_others(min_tokens: int) -> None:
    scheduler = create_scheduler(speculative=NGRAM)
    request = create_request(prompt=[9, 1, *REPEATING], max_tokens=30, stop_token_ids=(1, 2), min_tokens=min_tokens)
    scheduler.add(request)
    drawn = dict(enumerate([9, 7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8, 9, 1, *[9, 7, 8] * 3], 10))
    for plan in answers(scheduler, drawn):
        for _, tokens in plan.drafts:
            assert not {1, 2} & set(array("i", tokens))
            assert len(request.sequences[0].output_token_ids) >= min_tokens
    (output,) = request.sequences
    assert (output.finish_reason, output.stop_reason) == ("stop", 1)
    assert output.output_token_ids.tolist() == [9, 7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8, 9, 1]
    assert scheduler.features.drafts.num_accepted_tokens > 0


@pytest.mark.usefixtures("repeats")
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_tokens_are_those_without_drafts_in_fewer_steps(depth: int, block_size: int) -> None:
    steps = {}
    for speculative in (None, NGRAM):
        scheduler = create_scheduler(num_blocks=320 // block_size, block_size=block_size, speculative=speculative)
        executor = executor_for(scheduler)
        requests = [create_request([1, 2, number], 40, n=2, stop_token_ids=(0,) * number) for number in (0, 1)]
        change(requests[1], sampling=msgspec.structs.replace(requests[1].params.sampling, min_tokens=15))
        for request in requests:
            scheduler.add(request)
        steps[speculative] = run(scheduler, executor, depth=depth)
        for request in requests:
            for sequence in request.sequences:
                assert sequence.output_token_ids.tolist() == expected_tokens(request)
        assert_all_free(scheduler)
    assert (executor.num_drafted, executor.num_accepted) == (
        scheduler.features.drafts.num_draft_tokens,
        scheduler.features.drafts.num_accepted_tokens,
    )
    assert executor.num_accepted > 0
    assert steps[NGRAM] < steps[None]


@pytest.mark.usefixtures("repeats")
def test_the_end_of_a_small_pool_is_not_given_to_drafts() -> None:
    # Two sequences that grow to the last block: drafts get the held blocks, and no sequence is preempted for them.
    scheduler = create_scheduler(num_blocks=16, block_size=4, speculative=NGRAM)
    requests = [create_request([1, 2, number], 29) for number in range(2)]
    for request in requests:
        scheduler.add(request)
    run(scheduler, executor := executor_for(scheduler))
    assert executor.num_accepted > 0
    assert scheduler.num_preemptions == 0
    assert [one.sequences[0].output_token_ids.tolist() for one in requests] == [*map(expected_tokens, requests)]


@pytest.mark.parametrize("speculative", [None, WIDE])
def test_blocks_that_a_prefill_has_yet_to_take_are_not_given_to_drafts(speculative: SpeculativeConfig | None) -> None:
    scheduler = create_scheduler(
        num_blocks=20, block_size=16, max_num_batched_tokens=48, max_num_seqs=2, speculative=speculative
    )
    # Of each draft one token is right: 100 + i is followed by 200 + i, but then by 101 + i.
    prompt = [token for i in range(16) for token in (100 + i, 200 + i, 300 + i)]
    drawn = {48: 1, 49: 2} | {50 + 2 * i + j: 100 * (1 + j) + i for i in range(16) for j in range(2)}
    scheduler.add(create_request(prompt=prompt, max_tokens=60))
    plans = answers(scheduler, drawn)
    next(plans)
    scheduler.add(create_request(prompt=[*range(1000, 1240)], max_tokens=2))
    list(plans)
    assert scheduler.num_preemptions == 0
    assert (scheduler.features.counts().get("spec_decode_num_accepted_tokens", 0) > 4) == (speculative is not None)


def test_blocks_that_drafts_have_filled_are_shared_soon() -> None:
    scheduler = create_scheduler(num_blocks=64, block_size=4, speculative=NGRAM)
    scheduler.add(request := create_request(prompt=REPEATING, max_tokens=60))
    (sequence,) = request.sequences
    for _ in answers(scheduler, dict(enumerate([9, 7, 8] * 40, len(REPEATING)))):
        # The blocks of the step in flight, and one more, may be unknown to others yet.
        assert len(sequence.table.blocks) - (sequence.table.last_node.depth if sequence.table.last_node else 0) <= 4


@pytest.mark.parametrize(("max_num_seqs", "most"), [(4, 64), (80, 80)])
def test_a_step_draws_no_more_tokens_than_there_is_memory_for(max_num_seqs: int, most: int) -> None:
    many = msgspec.structs.replace(WIDE, disable_by_batch_size=32, prompt_lookup_max=2)
    scheduler = create_scheduler(
        num_blocks=400, max_num_seqs=max_num_seqs, max_num_batched_tokens=1000, speculative=many
    )
    for number in range(4):
        scheduler.add(create_request(prompt=[number, *REPEATING], max_tokens=100))
    drawn = dict(enumerate([9, 7, 8] * 40, 9))
    assert max(len(scheduler.steps_in_flight[0].sampled) for _ in answers(scheduler, drawn)) == most


def test_what_was_not_found_is_not_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def counted(tokens: bytes, *rest: int) -> "array[int]":
        looked.append(len(tokens) // 4)
        return look_up(tokens, *rest)

    monkeypatch.setattr(prompt_lookup, "look_up", counted)
    scheduler = create_scheduler(speculative=NGRAM, max_num_seqs=1)
    scheduler.add(create_request(prompt=9, max_tokens=20))
    executor = executor_for(scheduler)
    results = [executor.execute(plan) for _ in range(2) if (plan := scheduler.schedule(0.0)) is not None]
    for result in results:
        scheduler.update(result)
        scheduler.schedule(0.0)
        scheduler.schedule(0.0)
    assert looked == sorted(set(looked))


def test_accepted_tokens_of_an_aborted_request_are_neither_counted_nor_charged() -> None:
    scheduler = create_scheduler(speculative=NGRAM)
    scheduler.add(request := create_request(prompt=REPEATING, max_tokens=20))
    plans = answers(scheduler, dict(enumerate([9, 7, 8] * 9, len(REPEATING))))
    while not next(plans).drafts:
        pass
    served = request.account.served
    scheduler.abort(request.request_id)
    list(plans)
    assert (scheduler.features.drafts.num_accepted_tokens, request.account.served) == (0, served)
    assert_all_free(scheduler)


def test_a_row_that_leaves_takes_its_draft_along() -> None:
    plan = PlanBuilder()
    for row in (0, 1):
        request = create_request()
        request.create_sequences()
        request.sequences[0].row = row
        plan.drafts[request.sequences[0]] = array("i", [5 + row])
    plan.leave(0)
    assert [row for row, _ in plan.build(1, 1, []).drafts] == [1]


def drafted(request: Request, max_proposed: int = 0) -> int:
    """How many tokens are drafted for a request that runs alone, by a draft model if there are any proposed."""
    scheduler = create_scheduler(num_blocks=200, speculative=NGRAM, max_proposed=max_proposed)
    scheduler.add(request)
    run(scheduler, executor_for(scheduler))
    assert_all_free(scheduler)
    return scheduler.features.drafts.num_draft_tokens


@pytest.mark.usefixtures("repeats")
@pytest.mark.parametrize("max_proposed", [0, 3])
@pytest.mark.parametrize(
    "sampling",
    [
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"logprobs": 0},
        {"grammar": "start: /.*/"},
        {"constraints": token_constraints(bad_words=[[1, 2]])},
        {"min_tokens": 40},
    ],
)
def test_nothing_is_drafted_where_the_draw_depends_on_more_than_the_model(
    sampling: dict[str, object], max_proposed: int
) -> None:
    request = create_request(prompt=6, max_tokens=40)
    change(request, sampling=msgspec.structs.replace(request.params.sampling, **sampling))
    assert drafted(request, max_proposed) == 0
    assert request.sequences[0].output_token_ids.tolist() == expected_tokens(request)


@pytest.mark.usefixtures("repeats")
@pytest.mark.parametrize("max_proposed", [0, 3])
def test_nothing_is_drafted_for_beam_searches(max_proposed: int) -> None:
    beams, plain = (create_request(prompt=6, max_tokens=40) for _ in range(2))
    change(beams, beam=BeamParams(2))
    assert drafted(beams, max_proposed) == 0
    assert drafted(plain, max_proposed) > 0


def test_what_segments_hold_is_found_too() -> None:
    request = create_request(prompt=[3, *REPEATING[:6], 5, 7, 8], max_tokens=12)
    request.segments = make_segments(len(request.prompt_token_ids), [(1, 7)])
    mark_segments(request.prompt_token_ids, request.segments)
    scheduler = create_scheduler(speculative=NGRAM)
    scheduler.add(request)
    drawn = dict(enumerate([9, 7, 8] * 9, 10))
    found = [array("i", tokens).tolist() for plan in answers(scheduler, drawn) for _, tokens in plan.drafts]
    assert found[0] == [5, 7, 8, 9]


def play(scheduler: Scheduler, executor: CheckingExecutor, count: int) -> list[int]:
    """Plan ahead as an engine does, and let ``count`` results come back; how many steps were in flight each time."""
    results: list[StepResult] = []
    depths = []
    for _ in range(count):
        while scheduler.num_in_flight < 2 and (plan := scheduler.schedule(0.0)) is not None:
            results.append(executor.execute(plan))
        depths.append(scheduler.num_in_flight)
        scheduler.update(results.pop(0))
    return depths


def test_steps_overlap_where_nothing_repeats() -> None:
    scheduler = create_scheduler(speculative=msgspec.structs.replace(NGRAM, prompt_lookup_min=2))
    scheduler.add(create_request(prompt=[*range(9)], max_tokens=40))
    assert play(scheduler, executor_for(scheduler), 20) == [2] * 20


def test_waiting_for_drafts_that_do_not_come_is_given_up() -> None:
    scheduler = create_scheduler(num_blocks=200, speculative=NGRAM)
    scheduler.add(request := create_request(prompt=REPEATING, max_tokens=200))
    depths: list[int] = []
    plans: list[StepPlan] = []
    while not request.finished:
        while scheduler.num_in_flight < 2 and (plan := scheduler.schedule(0.0)) is not None:
            plans.append(plan)
        depths.append(scheduler.num_in_flight)
        # Every other token is one of the prompt, but none comes after it that came before.
        token = 7 if request.sequences[0].num_tokens % 2 else 1000 + len(depths)
        step = scheduler.steps_in_flight[0]
        scheduler.update(StepResult(plans[0].epoch, plans.pop(0).step, pack_int32s([token] * len(step.sampled))))
    assert depths[-40:].count(1) <= 3


@pytest.mark.usefixtures("repeats")
def test_with_many_sequences_nothing_is_drafted_and_steps_overlap() -> None:
    scheduler = create_scheduler(num_blocks=200, speculative=NGRAM)
    for number in range(NGRAM.disable_by_batch_size + 1):
        scheduler.add(create_request([number, 1, 2], max_tokens=40))
    assert play(scheduler, executor_for(scheduler), 20) == [2] * 20
    assert scheduler.features.drafts.num_drafts == 0


def test_after_drafts_that_were_wrong_a_sequence_pauses() -> None:
    scheduler = create_scheduler(num_blocks=200, speculative=NGRAM)
    scheduler.add(create_request(prompt=REPEATING, max_tokens=100))
    # 7 is followed by another token each time.
    drawn = {position: 7 if position % 2 else 1000 + position for position in range(8, 120)}
    with_drafts = [plan.step for plan in answers(scheduler, drawn) if plan.drafts]
    gaps = [after - before for before, after in pairwise(with_drafts)]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 16


@pytest.mark.parametrize("block_size", [4, 16])
def test_a_step_that_fails_takes_its_drafts_along(block_size: int) -> None:
    # Without the draft that step has one token: it is no larger than others of the same sequence.
    scheduler = create_scheduler(block_size=block_size, speculative=NGRAM)
    scheduler.add(request := create_request(prompt=REPEATING, max_tokens=20))
    drawn = dict(enumerate([9, 7, 8] * 9, len(REPEATING)))
    plans = answers(scheduler, drawn)
    while not next(plans).drafts:
        pass
    assert not scheduler.fail(epoch=2)
    assert not any(plan.drafts for plan in answers(scheduler, drawn))
    assert request.sequences[0].output_token_ids.tolist() == list(drawn.values())[:20]
    assert_all_free(scheduler)
