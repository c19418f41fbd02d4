"""Reports of a request's memory: the cause of its preemption, the readers who may know it, and its end."""

import pytest
from pagewise_scheduler.core.request_report import later, request_report, seen_by
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.requests.timeline import BLOCKS_CORRUPT, LENDER_GONE
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_shared.reports import Event, RequestName, RequestReport

from tests.core_requests import change
from tests.scheduler.core.builders import create_request, create_scheduler
from tests.scheduler.core.driving import executor_for, run


def first_loss(report: RequestReport) -> Event:
    """The first event in which a sequence lost its blocks."""
    return next(one for one in report.events if one.reason is not None)


def two_that_decode() -> tuple[Scheduler, list[Request]]:
    """Requests of the keys a and b, of which only one has room to the end."""
    scheduler = create_scheduler(num_blocks=12, block_size=4)
    requests = [create_request(16, 24), create_request(16, 24)]
    for request, key in zip(requests, "ab", strict=True):
        request.ref.key = key
        change(request, key=key)
        scheduler.add(request)
    return scheduler, requests


def test_a_preemption_names_the_request_that_it_was_for() -> None:
    scheduler, (first, second) = two_that_decode()
    run(scheduler, executor_for(scheduler))
    told = first_loss(request_report(second, scheduler, 9.0, 100))
    by = RequestName(first.request_id, "a")
    assert (told.kind, told.reason, told.by) == ("preempted", "decoding sequences need blocks", by)


@pytest.mark.parametrize(("key", "by"), [("", True), ("a", True), ("b", False)])
def test_who_it_was_is_shown_to_operators_and_to_its_own_key(key: str, by: bool) -> None:
    scheduler, (first, second) = two_that_decode()
    run(scheduler, executor_for(scheduler))
    report = request_report(second, scheduler, 9.0, 100)
    name = RequestName(first.request_id, "a")
    assert first_loss(seen_by(report, key, {})).by == (name if by else None)
    assert first_loss(report).by == name, "the report itself stays"


@pytest.mark.parametrize("reason", [BLOCKS_CORRUPT, LENDER_GONE])
def test_who_starts_over_for_nobody_is_not_called_preempted(reason: str) -> None:
    scheduler = create_scheduler()
    request = create_request(prompt=8, max_tokens=4)
    scheduler.add(request)
    assert scheduler.schedule(0.0) is not None
    scheduler.preempt(request.sequences[0], reason)
    told = first_loss(request_report(request, scheduler, 9.0, 100))
    assert (told.kind, told.by) == ("started over", None)


def test_the_end_is_told_of_those_that_have_one() -> None:
    scheduler = create_scheduler()
    request = create_request()
    scheduler.add(request)
    assert request_report(request, scheduler, 9.0, 100).ended_seconds_ago is None
    ended = request_report(request, scheduler, 9.0, 100, ended=True)
    assert (ended.ended_seconds_ago, later(ended, 2.5).ended_seconds_ago) == (0.0, 2.5)
