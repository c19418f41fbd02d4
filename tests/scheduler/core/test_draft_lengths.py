"""The lengths of drafts of a draft model: they follow the measured acceptance and the measured times of steps."""

import random
from itertools import pairwise

import msgspec
import pytest
from pagewise_scheduler.core.drafting.draft_lengths import Acceptance, DraftLengths
from pagewise_scheduler.core.drafting.draft_trials import DraftTrials
from pagewise_scheduler.core.drafting.step_times import ChunkSize, StepSize, StepTimes
from pagewise_scheduler.core.requests.request import RequestSequence
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.cost_model import Costs
from pagewise_shared.protocol import StepResult, pack_int32s

from tests.core_requests import change
from tests.scheduler.core.builders import create_request, create_scheduler
from tests.scheduler.core.driving import assert_all_free

SLOW_STEPS = Costs(step=10e-3, token=0.1e-3)
"""A step reads weights, and its tokens are nearly free."""
SLOW_TOKENS = Costs(step=0.1e-3, token=1e-3)
"""A step takes as long as its tokens."""


def sequences(count: int) -> list[RequestSequence]:
    made = [create_request() for _ in range(count)]
    for request in made:
        request.create_sequences()
    return [request.sequences[0] for request in made]


def chosen(costs: Costs, shares: list[list[float]], most: int = 64, limit: int = 4) -> list[int]:
    """The lengths for sequences with these shares of right tokens."""
    lengths, running = DraftLengths(4, costs), sequences(len(shares))
    candidates = {one: (Acceptance(own), limit) for one, own in zip(running, shares, strict=True)}
    found = lengths.choose(candidates, len(running), most)
    return [found.get(one, 0) for one in running]


def test_drafts_are_as_long_as_the_expected_tokens_per_second_grow() -> None:
    assert chosen(SLOW_STEPS, [[0.95] * 4]) == [4]
    assert chosen(SLOW_STEPS, [[0.9, 0.9, 0.01, 0.9]]) == [2]
    assert chosen(SLOW_STEPS, [[0.02] * 4]) == [0]
    assert chosen(SLOW_STEPS, [[0.9] * 4], limit=1) == [1]


def test_each_sequence_has_its_own_length() -> None:
    assert chosen(SLOW_STEPS, [[0.97] * 4, [0.0] * 4, [0.97, 0.97, 0.0, 0.0]]) == [4, 0, 2]


def test_drafts_become_shorter_where_steps_take_as_long_as_their_tokens() -> None:
    assert chosen(SLOW_TOKENS, [[0.7] * 4] * 8) == [0] * 8
    few, many = (sum(chosen(Costs(step=10e-3, token=1e-3), [[0.8] * 4] * count)) / count for count in (1, 48))
    assert few >= 2
    assert many == 0


def test_no_step_verifies_more_tokens_than_it_may() -> None:
    assert sum(chosen(SLOW_STEPS, [[0.9] * 4] * 5, most=7)) == 7


def test_the_share_of_right_tokens_is_measured_at_each_place() -> None:
    lengths, rng = DraftLengths(3, SLOW_STEPS), random.Random(0)
    acceptance = lengths.new()
    for _ in range(400):
        accepted = 0
        while accepted < 3 and rng.random() < (0.9, 0.5, 0.1)[accepted]:
            accepted += 1
        lengths.measure(acceptance, 3, accepted)
    assert acceptance.shares[0] > acceptance.shares[1] > acceptance.shares[2]
    assert lengths.new().shares == pytest.approx([0.9, 0.5, 0.1], abs=0.15)


def test_a_sequence_whose_drafts_were_wrong_is_tried_again_ever_later() -> None:
    acceptance, pauses, step = DraftLengths(2, SLOW_STEPS).new(), list[int](), 0
    for _ in range(4):
        acceptance.measure(2, 0)
        while acceptance.paused_until is None:
            step += 1
            acceptance.passed_over(step)
        pauses.append(acceptance.paused_until - step)
        assert not acceptance.is_due(acceptance.paused_until - 1)
        step = acceptance.paused_until
        assert acceptance.is_due(step)
        assert acceptance.shares[0] >= 0.5
        acceptance.chosen()
    assert pauses[0] * 8 == pauses[3]


def test_times_are_those_of_the_step_between_two_plans() -> None:
    times, now = StepTimes(Costs(step=1e-3, token=1e-5)), 0.0
    for number in range(400):
        drafted = number % 4 if number % 80 < 40 else 0
        size = StepSize(1, drafted, drafted, drafted)
        in_flight = int(size.is_plain)
        times.planned(now, in_flight)
        times.returned(size)
        # Without drafts, the executor does not wait for plans.
        now += 2e-3 + 1e-4 * size.verified + 5e-4 * size.passes + 4e-4 * (not in_flight)
        measured = times.planned(now, in_flight)
        assert measured is not None
        assert measured.size == size
        if number % 7 == 0:  # a request comes later on
            times.planned(now, 0)
            now += 3.0
    step, token, each_pass, each_drafted = times.drafting_costs(1)
    assert step + 2 * (token + each_pass + each_drafted) == pytest.approx(3.6e-3, rel=0.1)
    assert times.plain_seconds(1) == pytest.approx(2.0e-3, rel=0.1)


def test_prompts_cost_the_draft_model_time_although_it_takes_all_of_them() -> None:
    times, now, rng = StepTimes(Costs(step=2e-3, token=1e-4)), 0.0, random.Random(2)
    for _ in range(60):
        times.planned(now, 0)
        tokens = rng.randrange(200, 2000)
        times.returned(ChunkSize(tokens, tokens))
        now += 8e-3 + (33e-6 + 16e-6) * tokens * rng.uniform(0.8, 1.2)
    times.planned(now, 0)
    assert 8e-6 < times.prompt_token < 24e-6


def test_drafts_that_cost_time_are_tried_ever_more_rarely() -> None:
    trials, lost, steps, ends = DraftTrials(), 0.0, 0, list[int]()
    while steps < 100_000:
        steps += 1
        if trials.resting:
            trials.rested()
            continue
        lost += 0.8
        trials.saved(-0.8)
        if trials.resting:
            ends.append(steps)
    assert lost < 0.006 * steps
    gaps = [later - before for before, later in pairwise(ends)]
    assert gaps == sorted(gaps)
    assert gaps[0] < 2000 < gaps[-1] < 20_000


def test_drafts_pay_back_the_prompts_that_the_draft_model_takes() -> None:
    for gain, pays in ((0.5, True), (0.2, False)):
        trials = DraftTrials()
        for _ in range(20):
            if not trials.resting:
                trials.took_prompt(30)
                for _ in range(100):
                    trials.saved(gain)
                trials.ended(1)
        assert trials.resting != pays


def play(scheduler: Scheduler, right: float, count: int, token_seconds: float = 1e-4) -> list[int]:
    """Let an executor answer ``count`` steps, planned as far ahead as they may be, whose drafts are right as often as
    that; returns how many steps were in flight each time. All tokens are 5, and wrong drafts 6."""
    rng, now, depths = random.Random(1), 0.0, list[int]()
    for _ in range(count):
        while scheduler.num_in_flight < 2 and scheduler.schedule(now) is not None:
            pass
        depths.append(scheduler.num_in_flight)
        step = scheduler.steps_in_flight[0]
        proposed = [5 if rng.random() < right else 6 for _, asked in step.proposals for _ in range(asked)]
        now += 10e-3 + token_seconds * step.num_tokens + 1e-3 * bool(step.proposals)
        tokens = pack_int32s([5] * len(step.sampled))
        scheduler.update(StepResult(scheduler.epoch, step.step, tokens, proposed=pack_int32s(proposed)))
    return depths


def test_right_drafts_go_on_and_wrong_ones_end_soon() -> None:
    found = {}
    for right in (0.0, 0.8, 1.0):
        scheduler = create_scheduler(num_blocks=400, max_proposed=3)
        scheduler.add(request := create_request(prompt=9, max_tokens=400))
        depths = play(scheduler, right, 110)
        found[right] = len(request.sequences[0].output_token_ids), sum(depth == 2 for depth in depths)
        scheduler.abort(request.request_id)
        play(scheduler, right, scheduler.num_in_flight)
        assert_all_free(scheduler)
    tokens, overlapping = zip(*found.values(), strict=True)
    assert tokens[0] < 125
    assert tokens[1] > 200
    assert tokens[2] > 330
    # Without drafts two steps are in flight.
    assert overlapping[0] > 80
    assert overlapping[2] < 40  # their time is measured


def test_a_busy_executor_drafts_nothing_and_drafts_again_when_it_is_less_busy() -> None:
    scheduler = create_scheduler(num_blocks=4000, max_num_seqs=16, max_num_batched_tokens=200, max_proposed=3)
    few, *many = (create_request(prompt=5, max_tokens=length) for length in (900, *[60] * 15))
    scheduler.add(few)
    play(scheduler, 0.7, 20, token_seconds=5e-3)
    for request in many:
        scheduler.add(request)
    play(scheduler, 0.7, 60, token_seconds=5e-3)
    busy = scheduler.features.drafts.num_drafts
    play(scheduler, 0.7, 20, token_seconds=5e-3)
    assert all(request.finished for request in many)
    before = len(few.sequences[0].output_token_ids)
    play(scheduler, 0.7, 60, token_seconds=5e-3)
    assert len(few.sequences[0].output_token_ids) - before > 80
    assert busy < 200  # of 960 in which there could have been some


def test_prompts_are_taken_only_if_drafts_may_pay() -> None:
    lengths = DraftLengths(3, SLOW_TOKENS)
    assert [lengths.pays(count, 9, 500) for count in (1, 30)] == [False, False]
    lengths = DraftLengths(3, Costs(step=10e-3, token=1e-3))
    assert [lengths.pays(count, 9, 500) for count in (1, 30)] == [True, False]
    assert not lengths.pays(1, prompt=5000, output=10)
    scheduler = create_scheduler(num_blocks=400, max_proposed=3, costs=SLOW_TOKENS)
    scheduler.add(create_request(prompt=90, max_tokens=30))
    assert not any(proposals_of(scheduler))


def proposals_of(scheduler: Scheduler) -> list[bytes]:
    """Run requests to their end; return what each plan proposes."""
    found = []
    while (plan := scheduler.schedule(0.0)) is not None:
        found.append(plan.proposals)
        step = scheduler.steps_in_flight[0]
        tokens, proposed = [5] * len(step.sampled), [6] * sum(count for _, count in step.proposals)
        scheduler.update(StepResult(plan.epoch, plan.step, pack_int32s(tokens), proposed=pack_int32s(proposed)))
    return found


def test_the_draft_model_takes_nothing_of_sequences_that_cannot_be_drafted_for() -> None:
    scheduler = create_scheduler(num_blocks=400, max_proposed=3)
    for logprobs in (0, None):
        request = create_request(prompt=30, max_tokens=100)
        change(request, sampling=msgspec.structs.replace(request.params.sampling, logprobs=logprobs))
        scheduler.add(request)
        assert any(proposals_of(scheduler)) == (logprobs is None)


@pytest.mark.parametrize("prompt", [3, 90])
def test_a_request_does_not_fail_with_the_draft_model(prompt: int) -> None:
    scheduler = create_scheduler(num_blocks=400, max_proposed=3)
    scheduler.add(request := create_request(prompt=prompt, max_tokens=30))
    assert scheduler.schedule(0.0) is not None
    assert scheduler.steps_in_flight[0].proposals
    assert not scheduler.fail(epoch=2)
    assert not any(proposals_of(scheduler))
    assert len(request.sequences[0].output_token_ids) == 30


def test_with_more_sequences_than_allowed_the_draft_model_is_not_used() -> None:
    scheduler = create_scheduler(num_blocks=400, max_proposed=3, max_proposing=2)
    for _ in range(3):
        scheduler.add(create_request(prompt=5, max_tokens=60))
    assert play(scheduler, 1.0, 40)[10:] == [2] * 30
    assert scheduler.features.drafts.num_drafts == 0
