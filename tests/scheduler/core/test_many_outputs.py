"""Requests of many outputs: all are counted as waiting, but each is created only when the one before it starts."""

import pytest

from tests.scheduler.core.builders import create_request, create_scheduler
from tests.scheduler.core.driving import assert_all_free, executor_for, expected_tokens, run


def test_outputs_are_created_as_rows_become_free() -> None:
    scheduler = create_scheduler(max_num_seqs=4)
    requests = [create_request(prompt=6, max_tokens=5, n=50) for _ in range(3)]
    for request in requests:
        scheduler.add(request)
    account = scheduler.waiting.account("")
    assert scheduler.num_waiting == account.num_waiting == 150
    executor = executor_for(scheduler)
    while (plan := scheduler.schedule(now=0.0)) is not None:
        left = sum(not sequence.finished for request in requests for sequence in request.sequences)
        assert left <= 4 + len(requests), "those that run, and the next one of each request"
        pending = sum(request.num_pending for request in requests)
        assert scheduler.num_running + scheduler.num_waiting == left + pending
        assert account.num_waiting == scheduler.num_waiting
        scheduler.update(executor.execute(plan))
    for request in requests:
        assert [one.index for one in request.sequences] == list(range(50))
        assert all(one.output_token_ids.tolist() == expected_tokens(request) for one in request.sequences)
    assert_all_free(scheduler)


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_an_abort_takes_the_pending_ones_with_it(steps: int) -> None:
    scheduler = create_scheduler(max_num_seqs=4)
    request, other = create_request(n=50), create_request(n=3)
    scheduler.add(request)
    scheduler.add(other)
    executor = executor_for(scheduler)
    for _ in range(steps):
        plan = scheduler.schedule(now=0.0)
        assert plan is not None
        scheduler.update(executor.execute(plan))
    scheduler.abort(request.request_id)
    assert request.finished
    run(scheduler, executor)
    assert len(other.sequences) == 3
    assert scheduler.num_waiting == scheduler.waiting.account("").num_waiting == 0
    assert_all_free(scheduler)


def test_one_that_ends_while_it_waits_is_followed_by_the_next() -> None:
    scheduler = create_scheduler()
    request = create_request(n=3)
    scheduler.add(request)
    scheduler.finish(request.sequences[0], "stop")
    assert not request.finished
    run(scheduler, executor_for(scheduler))
    assert [len(one.output_token_ids) for one in request.sequences] == [0, 4, 4]


@pytest.mark.parametrize("steps", range(8))
def test_a_request_that_moves_goes_on_with_those_it_has(steps: int) -> None:
    request = create_request(prompt=6, max_tokens=5, n=20)
    for number in range(3):
        scheduler = create_scheduler(max_num_seqs=4)
        scheduler.add(request)
        assert scheduler.num_waiting == sum(not one.finished for one in request.sequences) + request.num_pending
        executor = executor_for(scheduler)
        for _ in range(steps if number < 2 else 1000):
            if (plan := scheduler.schedule(now=0.0)) is not None:
                scheduler.update(executor.execute(plan))
        scheduler.release_all()
        assert scheduler.num_waiting == scheduler.waiting.account("").num_waiting == 0
    assert [one.output_token_ids.tolist() for one in request.sequences] == [expected_tokens(request)] * 20
