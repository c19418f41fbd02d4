"""Plans are bounded in bytes: shared parts of sequences travel once, and no legal plan exceeds a frame."""

from array import array

import msgspec
import pytest
from pagewise_scheduler.core.scheduling import prefill_set
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_shared.protocol import StepPlan, StepResult, encode, pack_int32s
from pagewise_shared.protocol.limits import (
    MAX_CONSTRAINTS_BYTES,
    MAX_FRAME_FROM_SCHEDULER,
    MAX_JOINED_BYTES,
    MAX_SEQUENCE_BYTES,
    SEQUENCE_OVERHEAD_BYTES,
    greatest_plan,
    longest_sequence,
)
from pagewise_shared.sampling import (
    MAX_ALLOWED_BYTES,
    MAX_BAD_SEQUENCES,
    MAX_BAD_TOKENS,
    MAX_GRAMMAR_BYTES,
    MAX_LOGIT_BIASES,
    MAX_STOP_IDS,
    BeamParams,
    SamplingParams,
    TokenConstraints,
    token_constraints,
)

from tests.core_requests import change, make_request
from tests.scheduler.core.builders import create_request, create_scheduler
from tests.scheduler.core.driving import executor_for, expected_beams, expected_tokens, run

GREATEST = TokenConstraints(
    allowed=b"\xff" * MAX_ALLOWED_BYTES,
    biased=pack_int32s(range(MAX_LOGIT_BIASES)),
    biases=bytes(4 * MAX_LOGIT_BIASES),
    bad_words=(pack_int32s([2**31 - 1] * (MAX_BAD_TOKENS // MAX_BAD_SEQUENCES)),) * MAX_BAD_SEQUENCES,
)


def answer(plan: StepPlan, scheduler: Scheduler) -> StepResult:
    return StepResult(plan.epoch, plan.step, pack_int32s([5] * len(scheduler.steps_in_flight[-1].sampled)))


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(0.0)
    assert plan is not None
    scheduler.update(answer(plan, scheduler))
    return plan


def test_what_the_sequences_of_a_request_share_is_in_a_plan_once() -> None:
    scheduler = create_scheduler(num_blocks=400, max_num_seqs=64, max_num_batched_tokens=512)
    shared = token_constraints(range(10_000), {5: 1.0}, [[1, 2]])
    other = token_constraints([7])
    # As a gateway submits them: the prompts of one body have the same parameters.
    for constraints, count in ((shared, 20), (other, 1), (None, 1)):
        sampling = SamplingParams(temperature=0, constraints=constraints)
        for number in range(count):
            name = f"{count}-{number}" if constraints else "plain"
            scheduler.add(make_request(name, array("i", [number, count, 4]), 4, sampling, n=2))
    joined = 0
    while joined < 44:
        plan = step(scheduler)
        joined += len(plan.joined)
        assert all(new.sampling.constraints is None for new in plan.joined)
        named = [plan.constraints[new.constraints] if new.constraints >= 0 else None for new in plan.joined]
        assert set(named) - {None} == set(plan.constraints)
        assert len(set(plan.constraints)) == len(plan.constraints)
        assert len(encode(plan)) < 150 * (len(plan.joined) + 1) + 1300 * len(plan.constraints)


def test_sequences_join_over_several_plans_if_they_are_too_large_for_one() -> None:
    length, n = 1 << 18, 40  # a MiB of tokens each
    scheduler = Scheduler(
        num_blocks=length // 16 + 1000, block_size=16, max_num_seqs=n, max_num_batched_tokens=length + n
    )
    scheduler.add(make_request("r", array("i", range(length)), 8, SamplingParams(), n=n))
    joined, plans = 0, 0
    while joined < n:
        plan = step(scheduler)
        joined += len(plan.joined)
        plans += 1
        assert plan.joined, "at least one always starts"
        assert len(encode(plan)) < MAX_JOINED_BYTES + 2 * 4 * length
    assert plans == 1 + 3  # the first alone: the others wait for its prompt


@pytest.mark.parametrize("most", [1, 2 * SEQUENCE_OVERHEAD_BYTES])
def test_whatever_fits_into_a_plan_the_tokens_are_the_same(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(prefill_set, "MAX_JOINED_BYTES", most)
    scheduler = create_scheduler(num_blocks=24, block_size=4, max_num_seqs=8)
    executor = executor_for(scheduler)
    requests = [create_request(prompt=6 + 5 * number, max_tokens=20, n=1 + number % 3) for number in range(6)]
    beam = create_request(prompt=9, max_tokens=6)
    change(beam, beam=BeamParams(width=4), n=2)
    for request in (*requests, beam):
        scheduler.add(request)
    run(scheduler, executor)
    for request in requests:
        for sequence in request.sequences:
            assert sequence.output_token_ids.tolist() == expected_tokens(request)
    assert [sequence.output_token_ids.tolist() for sequence in beam.sequences] == expected_beams(beam)
    assert scheduler.num_preemptions > 0
    assert scheduler.kv.num_available == 24


def test_what_leaves_before_anybody_was_told_leaves_room_in_the_plan() -> None:
    scheduler = create_scheduler()
    scheduler.add(request := create_request(prompt=5))
    change(request, sampling=msgspec.structs.replace(request.params.sampling, grammar="é" * 1000))
    plan = scheduler.plan
    scheduler.prefilling.chunks(32, 0, scheduler.steps_in_flight, 0.0)
    assert plan.joined_bytes > 2000, "a grammar of 1,000 characters takes up to 4 bytes for each"
    scheduler.abort(request.request_id)
    assert plan.joined_bytes == 0


def test_no_legal_plan_exceeds_a_frame() -> None:
    assert greatest_plan() < MAX_FRAME_FROM_SCHEDULER
    assert GREATEST.error(8 * MAX_ALLOWED_BYTES) == "a constraint on a token outside the vocabulary of 16777216"
    assert GREATEST.error(0) is None
    assert len(msgspec.msgpack.encode(GREATEST)) <= GREATEST.num_bytes + 32 <= MAX_CONSTRAINTS_BYTES + 32
    for block_size in (1, 3, 16, 2**16):
        length = longest_sequence(block_size)
        assert 4 * length + 4 * (length // block_size) <= MAX_SEQUENCE_BYTES


@pytest.mark.parametrize("block_size", [64, 1024])
def test_the_greatest_sequence_fits_into_a_frame_beside_others(block_size: int) -> None:
    """It joins, behind others that fill the plan, with all its blocks: its prompt is cached but for the last token."""
    length = longest_sequence(block_size)
    sampling = SamplingParams(
        **dict.fromkeys(("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"), 0.1),
        seed=2**64 - 1,
        top_k=2**31 - 1,
        stop_token_ids=(2**31 - 1,) * MAX_STOP_IDS,
        constraints=GREATEST,
        grammar="g" * MAX_GRAMMAR_BYTES,
    )
    scheduler = Scheduler(
        num_blocks=length // block_size + 1000, block_size=block_size, max_num_seqs=8, max_num_batched_tokens=length
    )
    assert scheduler.max_model_len == length
    assert not scheduler.fits(length, 1)
    tokens = array("i", [2**31 - 1]) * length
    scheduler.add(make_request("first", tokens[:-1], 1, sampling))
    step(scheduler)
    assert scheduler.num_running == 0
    scheduler.add(make_request("second", tokens[:-1], 1, sampling))
    plan = step(scheduler)
    (new,) = plan.joined
    assert len(new.blocks) > 4 * (length // block_size - 2)
    assert len(new.tokens) + len(new.blocks) <= MAX_SEQUENCE_BYTES
    alone = len(encode(plan))
    assert alone <= MAX_SEQUENCE_BYTES + MAX_CONSTRAINTS_BYTES + MAX_GRAMMAR_BYTES + SEQUENCE_OVERHEAD_BYTES + 64
    assert alone + MAX_JOINED_BYTES < MAX_FRAME_FROM_SCHEDULER
