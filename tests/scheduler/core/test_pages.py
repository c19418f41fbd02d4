"""Where memory is counted, it is counted in pages if the layers have several groups."""

import pytest
from pagewise_scheduler.core.memory_report import executor_report
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.routing.executor_view import ExecutorView
from pagewise_scheduler.core.routing.prompts import PrefixQuery
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers import windows
from pagewise_scheduler.core.tiers.arena import WindowShape

from tests.core_requests import change
from tests.scheduler.core.arenas import check_arena, create
from tests.scheduler.core.builders import create_request
from tests.scheduler.core.checking_executor import CheckingExecutor
from tests.scheduler.core.driving import executor_for, run

WINDOWS = (WindowShape(8, 3), WindowShape(16, 1, chunked=True))


def begun(scheduler: Scheduler, executor: CheckingExecutor, *requests: Request) -> None:
    """Let the prompts of requests be computed, and a token more."""
    for request in requests:
        scheduler.add(request)
    for _ in range(8):
        if (plan := scheduler.schedule(0.0)) is not None:
            scheduler.update(executor.execute(plan))


@pytest.mark.parametrize("num_pages", [40, 41, 100])
def test_the_longest_sequence_is_the_longest_that_the_arena_has_pages_for(num_pages: int) -> None:
    scheduler = create(num_pages, 2, WINDOWS, budget=8)
    longest = scheduler.kv.capacity_tokens
    assert scheduler.kv.room_for(longest) <= num_pages < scheduler.kv.room_for(longest + 1)
    assert scheduler.fits(longest, 1)
    assert not scheduler.fits(longest, 2)
    scheduler.add(create_request(prompt=longest, max_tokens=1))
    run(scheduler, executor_for(scheduler))
    check_arena(scheduler)


def test_pages_in_use_are_the_pages_of_all_tables() -> None:
    scheduler = create(400, 2, WINDOWS)
    executor, kv = executor_for(scheduler), scheduler.kv
    requests = [create_request(prompt=50, max_tokens=40) for _ in range(3)]
    begun(scheduler, executor, *requests)
    tables = [sequence.table for sequence in scheduler.running]
    assert kv.num_in_use == kv.num_held(tables) == sum(kv.num_held([one]) for one in tables) > 3 * 2 * 13
    available = kv.num_available
    freed = kv.num_freed(tables[0])
    scheduler.abort(requests[0].request_id)
    assert kv.num_available == available + freed
    report = executor_report("e", scheduler).device
    assert report.num_blocks == report.free + report.cached + report.in_use == 400
    assert report.in_use == kv.num_in_use == kv.num_total - kv.num_available
    assert [(one.kind, one.window, one.pages_per_block) for one in report.groups] == [
        ("full", 0, 2), ("window", 8, 3), ("chunk", 16, 1),
    ]  # fmt: skip
    assert report.in_use == sum(one.in_use for one in report.groups)
    assert report.cached == sum(one.cached for one in report.groups)
    assert report.groups[0].in_use == 2 * kv.pool.num_in_use
    assert report.groups[1].snapshots == 4  # of each prompt, and of the end of the request that was aborted


def test_outputs_of_a_prompt_share_pages() -> None:
    scheduler = create(400, 2, WINDOWS)
    begun(scheduler, executor_for(scheduler), create_request(prompt=50, max_tokens=40, n=3))
    tables = [sequence.table for sequence in scheduler.running]
    kv = scheduler.kv
    assert len(tables) == 3
    assert kv.num_in_use == kv.num_held(tables) < sum(kv.num_held([one]) for one in tables) - 2 * 12 * 2
    check_arena(scheduler)


def test_routing_predicts_when_there_are_pages() -> None:
    """The blocks of the full layers would fit, but not the blocks of the windows."""
    scheduler = create(160, 1, (WindowShape(100, 3),), budget=64)
    view = ExecutorView(scheduler)
    begun(scheduler, executor_for(scheduler), create_request(prompt=100, max_tokens=40))
    query = PrefixQuery(create_request(prompt=100, max_tokens=1))
    taken = scheduler.kv.room_for(100)
    assert scheduler.kv.blocks_for(100) < scheduler.kv.num_available < taken
    assert view.room_seconds(query, taken, 0.0) > 0
    assert view.room_seconds(query, scheduler.kv.num_available, 0.0) == 0


def test_a_share_of_the_memory_is_a_share_of_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key whose windows hold most of the pages gives way, though it holds few blocks of the other layers."""
    monkeypatch.setattr(windows, "MARGIN", 0)
    scheduler = create(240, 1, (WindowShape(64, 6),), budget=16)
    executor = executor_for(scheduler)
    large, small = (create_request(prompt=60, max_tokens=100) for _ in range(2))
    change(large, key="large")
    change(small, key="small")
    for _ in range(6):
        begun(scheduler, executor, *([] if large.sequences else [large]))
    (sequence,) = scheduler.running
    assert scheduler.kv.num_held([sequence.table]) > 120 > 3 * len(sequence.table.blocks)
    scheduler.add(small)
    run(scheduler, executor)
    assert sequence.num_preemptions == 1
    check_arena(scheduler)
