"""The scheduler against an executor that checks every read and write of KV memory."""

import msgspec
import pytest
from pagewise_scheduler.core.requests.request import SequenceStatus
from pagewise_scheduler.core.scheduling.step import StepMismatchError
from pagewise_shared.protocol import StepPlan, StepResult, encode
from pagewise_shared.sampling import BeamParams

from tests.core_requests import change
from tests.scheduler.core.builders import create_request, create_scheduler
from tests.scheduler.core.driving import assert_all_free, executor_for, expected_beams, expected_tokens, run


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_one_request_runs_to_its_length(depth: int) -> None:
    scheduler = create_scheduler()
    request = create_request(prompt=9, max_tokens=11)
    scheduler.add(request)
    run(scheduler, executor_for(scheduler), depth=depth)
    assert request.sequences[0].output_token_ids.tolist() == expected_tokens(request)
    assert request.sequences[0].finish_reason == "length"
    assert_all_free(scheduler)


def test_a_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
    scheduler = create_scheduler(max_num_batched_tokens=8)
    executor = executor_for(scheduler)
    short, long = create_request(prompt=3, max_tokens=30), create_request(prompt=50, max_tokens=3)
    scheduler.add(short)
    scheduler.update(executor.execute(scheduler.schedule(0.0)))  # type: ignore[arg-type]
    scheduler.add(long)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert [size for _, size in plan.chunks] == [7], "one token of the budget belongs to the decode"
    scheduler.update(executor.execute(plan))
    run(scheduler, executor)
    assert short.sequences[0].output_token_ids.tolist() == expected_tokens(short)
    assert long.sequences[0].output_token_ids.tolist() == expected_tokens(long)


def test_a_step_of_pure_decodes_carries_nothing_but_its_number() -> None:
    scheduler = create_scheduler(block_size=16)
    executor = executor_for(scheduler)
    for _ in range(8):
        scheduler.add(create_request(prompt=3, max_tokens=50))
    for _ in range(2):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        scheduler.update(executor.execute(plan))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert len(encode(plan)) <= 22  # tag, epoch, step, and a byte for each list that is empty
    assert plan == StepPlan(epoch=1, step=3)


def test_blocks_are_taken_when_needed_and_never_before() -> None:
    scheduler = create_scheduler(block_size=4)
    executor = executor_for(scheduler)
    request = create_request(prompt=4, max_tokens=9)
    scheduler.add(request)
    used = []
    while (plan := scheduler.schedule(0.0)) is not None:
        used.append(scheduler.kv.pool.num_in_use)
        scheduler.update(executor.execute(plan))
    assert used == [1, 2, 2, 2, 2, 3, 3, 3, 3]


def test_preemption_recomputes_and_changes_no_token() -> None:
    scheduler = create_scheduler(num_blocks=12, block_size=2, max_num_seqs=6)
    requests = [create_request(prompt=4, max_tokens=18) for _ in range(6)]
    for request in requests:
        scheduler.add(request)
    run(scheduler, executor_for(scheduler))
    assert scheduler.num_preemptions > 3
    assert [r.sequences[0].output_token_ids.tolist() for r in requests] == [expected_tokens(r) for r in requests]
    assert_all_free(scheduler)


def test_a_block_freed_under_a_step_in_flight_waits_for_its_return() -> None:
    scheduler = create_scheduler(num_blocks=4, block_size=4)
    executor = executor_for(scheduler)
    request = create_request(prompt=13, max_tokens=2)
    scheduler.add(request)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    scheduler.abort(request.request_id)
    assert scheduler.kv.num_available == 0
    assert scheduler.kv.num_retiring == 4
    scheduler.add(create_request(prompt=5, max_tokens=1))
    assert scheduler.schedule(0.0) is None
    scheduler.update(executor.execute(plan))
    assert scheduler.kv.num_available == 4
    run(scheduler, executor)


def test_stop_tokens_end_a_sequence_but_not_before_min_tokens() -> None:
    probe = create_request(prompt=[1, 2, 3], max_tokens=10)
    stop = expected_tokens(probe)[3]
    for min_tokens, length in ((0, 4), (3, 4), (4, 10)):
        scheduler = create_scheduler()
        request = create_request([1, 2, 3], max_tokens=10, stop_token_ids=(stop,), min_tokens=min_tokens)
        scheduler.add(request)
        run(scheduler, executor_for(scheduler))
        assert len(request.sequences[0].output_token_ids) == length
    assert_all_free(scheduler)


def test_a_better_priority_goes_before_a_long_prefill_that_runs() -> None:
    scheduler = create_scheduler(num_blocks=400, max_num_batched_tokens=8)
    executor = executor_for(scheduler)
    scheduler.add(create_request(prompt=list(range(1000)), max_tokens=2, priority=5))
    for _ in range(3):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        scheduler.update(executor.execute(plan))
    urgent = create_request(prompt=[1, 2, 3], max_tokens=2)
    scheduler.add(urgent)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    scheduler.update(executor.execute(plan))
    assert len(urgent.sequences[0].output_token_ids) == 1
    assert sorted(size for _, size in plan.chunks) == [3, 5]


def test_priority_then_arrival_decide_who_runs_first() -> None:
    scheduler = create_scheduler(max_num_seqs=1)
    late_urgent = create_request(priority=-1, arrival_time=9.0)
    early = create_request(priority=0, arrival_time=1.0)
    middle = create_request(priority=0, arrival_time=2.0)
    for request in (middle, late_urgent, early):
        scheduler.add(request)
    order = []
    executor = executor_for(scheduler)
    while (plan := scheduler.schedule(0.0)) is not None:
        order += [new.tokens for new in plan.joined]
        scheduler.update(executor.execute(plan))
    assert order == [r.prompt_token_ids.tobytes() for r in (late_urgent, early, middle)]


def test_the_first_output_stays_the_first_when_it_loses_its_blocks_in_mid_prompt() -> None:
    """Log-probabilities of the prompt come with it, and are reported before any token of the request."""
    scheduler = create_scheduler(max_num_batched_tokens=8, max_num_seqs=4)
    executor = executor_for(scheduler)
    request = create_request(prompt=20, max_tokens=4, n=3)
    change(request, sampling=msgspec.structs.replace(request.params.sampling, prompt_logprobs=0))
    scheduler.add(request)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    scheduler.update(executor.execute(plan))
    first, *others = request.sequences
    scheduler.preempt(first, "the test says so")
    assert scheduler.waiting.peek() is first
    while not first.prefilled:
        plan = scheduler.schedule(0.0)
        assert plan is not None
        assert not any(other.row >= 0 for other in others)
        scheduler.update(executor.execute(plan))
    run(scheduler, executor)
    assert all(sequence.finished for sequence in request.sequences)


def test_requests_that_arrive_at_once_keep_their_order_and_their_outputs_together() -> None:
    scheduler = create_scheduler(max_num_seqs=1)
    requests = [create_request(prompt=4, n=2, arrival_time=0.0) for _ in range(2)]
    for request in requests:
        scheduler.add(request)
    head = scheduler.waiting.peek()
    assert head is requests[0].sequences[0]
    scheduler.waiting.take(head, SequenceStatus.PREFILL)
    scheduler.waiting.push(head)
    assert len(requests[0].sequences) == 2
    assert list(scheduler.waiting) == [sequence for request in requests for sequence in request.sequences]


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    scheduler = create_scheduler(num_blocks=4, block_size=4)
    assert scheduler.fits(10, 7)
    assert not scheduler.fits(10, 8)
    with pytest.raises(ValueError, match="16 tokens of the pool"):
        scheduler.add(create_request(prompt=10, max_tokens=8))
    scheduler.add(create_request(prompt=10, max_tokens=7))
    run(scheduler, executor_for(scheduler))


def test_max_tokens_zero_computes_the_prompt_and_samples_nothing() -> None:
    scheduler = create_scheduler()
    request = create_request(prompt=40, max_tokens=0)
    scheduler.add(request)
    run(scheduler, executor_for(scheduler))
    assert request.sequences[0].output_token_ids.tolist() == []
    assert request.sequences[0].finish_reason == "length"
    assert_all_free(scheduler)


def test_results_out_of_step_are_refused_and_change_nothing() -> None:
    scheduler = create_scheduler()
    executor = executor_for(scheduler)
    request = create_request()
    scheduler.add(request)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    good = executor.execute(plan)
    for bad in (
        StepResult(epoch=1, step=2, tokens=good.tokens),
        StepResult(epoch=1, step=1, tokens=b""),
    ):
        with pytest.raises(StepMismatchError):
            scheduler.update(bad)
    scheduler.update(good)
    run(scheduler, executor)
    assert request.sequences[0].output_token_ids.tolist() == expected_tokens(request)


def test_after_a_failed_step_everything_is_recomputed_in_smaller_steps() -> None:
    scheduler = create_scheduler(num_blocks=64, max_num_batched_tokens=64)
    executor = executor_for(scheduler)
    requests = [create_request(prompt=10, max_tokens=6) for _ in range(4)]
    for request in requests:
        scheduler.add(request)
    first = scheduler.schedule(0.0)
    assert first is not None
    scheduler.update(executor.execute(first))
    scheduler.schedule(0.0)
    executor.reset()
    assert scheduler.fail(epoch=2) == []
    assert scheduler.limits.max_num_seqs == 2
    run(scheduler, executor)
    assert [r.sequences[0].output_token_ids.tolist() for r in requests] == [expected_tokens(r) for r in requests]
    assert_all_free(scheduler)


def test_a_request_that_fails_even_alone_fails_alone() -> None:
    scheduler = create_scheduler()
    executor = executor_for(scheduler)
    good = [create_request(prompt=6, max_tokens=5) for _ in range(3)]
    bad = create_request(prompt=[13, 13, 13], max_tokens=5)
    for request in (*good, bad):
        scheduler.add(request)
    epoch, failed = 1, []
    for _ in range(1000):
        plan = scheduler.schedule(0.0)
        if plan is None:
            break
        if any(new.tokens == bad.prompt_token_ids.tobytes() for new in plan.joined):
            epoch += 1
            failed += scheduler.fail(epoch)
            executor.reset()
        else:
            scheduler.update(executor.execute(plan))
    assert failed == [bad]
    assert [r.sequences[0].output_token_ids.tolist() for r in good] == [expected_tokens(r) for r in good]
    assert_all_free(scheduler)


def test_requests_go_on_elsewhere_from_their_tokens() -> None:
    first, second = create_scheduler(), create_scheduler(block_size=8)
    executor = executor_for(first)
    requests = [create_request(prompt=6, max_tokens=12) for _ in range(3)]
    for request in requests:
        first.add(request)
    for _ in range(4):
        plan = first.schedule(0.0)
        assert plan is not None
        first.update(executor.execute(plan))
    first.schedule(0.0)  # a step in flight is lost with its executor
    for request in first.release_all():
        second.add(request)
    assert_all_free(first)
    run(second, executor_for(second))
    assert [r.sequences[0].output_token_ids.tolist() for r in requests] == [expected_tokens(r) for r in requests]


def test_beams_keep_to_the_limits_that_failed_steps_have_left() -> None:
    scheduler = create_scheduler(max_num_seqs=8)
    executor = executor_for(scheduler)
    request = create_request(prompt=6, max_tokens=6, n=2)
    change(request, beam=BeamParams(4))
    scheduler.add(request)
    sizes: list[int] = []
    while True:
        plan = scheduler.schedule(0.0)
        if plan is None:
            break
        sizes.append(len(plan.chunks))
        if len(sizes) == 2:
            assert scheduler.fail(epoch=2) == []
            executor.reset()
        else:
            scheduler.update(executor.execute(plan))
    assert sizes[1] == 4
    assert max(sizes[2:18]) <= 2, "it takes 16 good steps to widen them again"
    assert [sequence.output_token_ids.tolist() for sequence in request.sequences] == expected_beams(request)
    assert_all_free(scheduler)
