"""Blocks that the device has no room for go to the host and come back: by loading, by computing, or by both."""

from collections import deque
from math import isnan

import pytest
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.cost_model import CopyCosts, Costs
from pagewise_scheduler.core.tiers.recovery_plan import Method, RecoveryMode
from pagewise_shared.protocol import HOST
from pagewise_shared.sampling import BeamParams

from tests.core_requests import change
from tests.scheduler.core.builders import cached_prefix, create_request, create_scheduler, host_of, recoveries_of
from tests.scheduler.core.checking_executor import CheckingExecutor
from tests.scheduler.core.driving import assert_all_free, check_states, executor_for, expected_tokens, run

LONG = list(range(100, 140))
OTHER = list(range(200, 240))

SLOW_LINK = Costs(step=1e-4, token=1e-5, tiers={HOST: CopyCosts(1e-3, 1e-3)})
FAST_LINK = Costs(step=1e-4, token=1e-3, tiers={HOST: CopyCosts(1e-5, 1e-5)})
EVEN = Costs(step=0, token=1e-3, attention=0, tiers={HOST: CopyCosts(0, 4e-3)})


def serve(scheduler: Scheduler, executor: CheckingExecutor, prompt: list[int], max_tokens: int = 2) -> Request:
    request = create_request(prompt=prompt, max_tokens=max_tokens)
    scheduler.add(request)
    run(scheduler, executor)
    assert request.sequences[0].output_token_ids.tolist() == expected_tokens(request)
    return request


def after_eviction(
    recovery: RecoveryMode, costs: Costs = EVEN, num_host_blocks: int = 16
) -> tuple[Scheduler, CheckingExecutor]:
    """A scheduler that has computed LONG and then needed all its blocks for OTHER."""
    scheduler = create_scheduler(
        num_blocks=11, num_host_blocks=num_host_blocks, recovery=recovery, costs=costs, max_num_batched_tokens=8
    )
    executor = executor_for(scheduler)
    serve(scheduler, executor, LONG)
    serve(scheduler, executor, OTHER)
    return scheduler, executor


@pytest.mark.parametrize(
    ("mode", "method", "loaded"), [("swap", "load", 9), ("recompute", "device", 0), ("both", "both", None)]
)
def test_every_method_of_recovery_gives_the_same_tokens(mode: RecoveryMode, method: Method, loaded: int | None) -> None:
    scheduler, executor = after_eviction(mode)
    before, recoveries = executor.num_computed, recoveries_of(scheduler)
    again = serve(scheduler, executor, LONG)
    report = recoveries[-1] if recoveries else None
    if method == "device":  # nothing was kept on the host
        assert report is None or report.method == "device"
        assert executor.num_stored == executor.num_loaded == 0
    else:
        assert report is not None
        assert report.method == method
        assert not isnan(report.ended)
        assert executor.num_loaded == report.loaded_tokens // 4
    if loaded is not None:
        assert executor.num_loaded == loaded
    else:
        assert 0 < executor.num_loaded < 9, "some of it is computed, some of it loaded"
    computed = executor.num_computed - before - (len(again.sequences[0].output_token_ids) - 1)
    assert computed == len(LONG) - again.num_cached_tokens
    check_states(scheduler.kv.pool)


@pytest.mark.parametrize("budget", [3, 5, 6, 7])
def test_a_front_whose_budget_ends_inside_a_block_goes_on(budget: int) -> None:
    """The link brings whole blocks only, so nothing but the front can complete the block that it has begun."""
    costs = Costs(step=2e-2, token=1e-3, attention=0, tiers={HOST: CopyCosts(1e-4, 1.6e-2)})
    scheduler = create_scheduler(
        num_blocks=11, num_host_blocks=16, recovery="both", costs=costs, max_num_batched_tokens=budget
    )
    executor = executor_for(scheduler)
    for prompt in (LONG, OTHER, LONG):
        serve(scheduler, executor, prompt)
    check_states(scheduler.kv.pool)


@pytest.mark.parametrize(("costs", "method"), [(SLOW_LINK, "recompute"), (FAST_LINK, "load"), (EVEN, "both")])
def test_auto_takes_the_cheapest_method(costs: Costs, method: Method) -> None:
    scheduler, executor = after_eviction("auto", costs)
    executor.elapsed_us = 0
    recoveries = recoveries_of(scheduler)
    serve(scheduler, executor, LONG)
    report = recoveries[-1]
    estimate = report.estimate
    if method == "recompute" and estimate is None:
        assert executor.num_stored == 0, "what is never worth loading is never stored"
        return
    assert estimate is not None
    assert report.method == method
    assert report.predicted <= min(estimate.load, estimate.recompute)


def test_a_preempted_sequence_comes_back_from_the_host() -> None:
    scheduler = create_scheduler(num_blocks=14, num_host_blocks=40, recovery="swap", max_num_seqs=4)
    executor = executor_for(scheduler)
    recoveries = recoveries_of(scheduler)
    requests = [create_request(prompt=8, max_tokens=24) for _ in range(4)]
    for request in requests:
        scheduler.add(request)
    run(scheduler, executor)
    assert scheduler.num_preemptions > 0
    assert executor.num_loaded > 0
    assert any(report.resumed and report.method == "load" for report in recoveries)
    assert [r.sequences[0].output_token_ids.tolist() for r in requests] == [expected_tokens(r) for r in requests]
    assert_all_free(scheduler)


def test_a_full_host_lets_its_tails_go_first() -> None:
    scheduler, executor = after_eviction("swap", num_host_blocks=4)
    pool = scheduler.kv.pool
    assert host_of(scheduler).num_used == 4
    assert pool.counters.by_name()["host_evicted"] > 0
    again = create_request(prompt=LONG, max_tokens=2)
    scheduler.add(again)
    run(scheduler, executor)
    assert again.sequences[0].output_token_ids.tolist() == expected_tokens(again)
    assert executor.num_loaded == 4, "the beginning of the prompt was kept, not its end"
    check_states(pool)


def test_a_clean_copy_is_not_stored_twice() -> None:
    scheduler, executor = after_eviction("swap", num_host_blocks=40)
    serve(scheduler, executor, LONG)
    stored = executor.num_stored
    serve(scheduler, executor, OTHER)  # evicts LONG again, whose blocks are still on the host
    assert executor.num_stored <= stored + 1
    check_states(scheduler.kv.pool)


def test_a_corrupt_copy_is_noticed_and_computed_again() -> None:
    scheduler, executor = after_eviction("swap", num_host_blocks=40)
    prefix = cached_prefix(scheduler.kv, create_request(LONG).prompt_token_ids.tobytes(), 39)
    executor.spoil = {prefix.offloaded[3].copies[HOST]}
    again = serve(scheduler, executor, LONG)
    assert scheduler.kv.pool.counters.corrupt == 1
    assert again.sequences[0].num_preemptions == 1
    check_states(scheduler.kv.pool)


def test_an_abort_under_a_load_keeps_the_target_blocks_until_it_is_done() -> None:
    scheduler, executor = after_eviction("swap")
    again = create_request(prompt=LONG, max_tokens=2)
    scheduler.add(again)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert plan.copies
    assert plan.chunks == ()
    result = executor.execute(plan)
    scheduler.abort(again.request_id)
    scheduler.update(result)
    num_loading = scheduler.recoveries.transfers.num_loading
    assert num_loading == 9
    assert scheduler.kv.num_available == 11 - num_loading
    for message in executor.finish_copies():
        scheduler.copied(message)
    assert_all_free(scheduler)
    check_states(scheduler.kv.pool)


def test_a_busy_link_takes_no_more_prefixes_but_finishes_the_one_it_has_begun() -> None:
    scheduler = create_scheduler(num_blocks=11, num_host_blocks=40, recovery="swap")
    host_of(scheduler).max_arriving = 3
    executor = executor_for(scheduler)
    for prompt in (LONG, OTHER, LONG):
        scheduler.add(create_request(prompt=prompt, max_tokens=2))
        while (plan := scheduler.schedule(0.0)) is not None:
            scheduler.update(executor.execute(plan))
    host = host_of(scheduler)
    # All of LONG, whose copies have not been confirmed when OTHER has to go.
    assert executor.num_stored == host.counters.demoted == host.num_arriving == 10
    assert host.counters.dropped > 0
    assert host.num_used == 10
    for message in executor.finish_copies():
        scheduler.copied(message)
    assert host.num_arriving == 0


def test_blocks_before_a_corrupt_one_can_be_evicted_again() -> None:
    scheduler, executor = after_eviction("swap", num_host_blocks=12)
    host = host_of(scheduler)
    again = create_request(prompt=LONG, max_tokens=2)
    executor.spoil = {cached_prefix(scheduler.kv, again.prompt_token_ids.tobytes(), 39).offloaded[5].copies[HOST]}
    scheduler.add(again)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    result = executor.execute(plan)
    messages = executor.finish_copies()
    scheduler.abort(again.request_id)
    for message in messages:
        scheduler.copied(message)
    scheduler.update(result)
    host.evict(host.num_blocks)
    assert host.num_free == host.num_blocks


def test_copies_that_fail_blame_no_request() -> None:
    scheduler = create_scheduler(num_blocks=11, num_host_blocks=40, recovery="swap")
    scheduler.add(create_request(prompt=[1, 2], max_tokens=5))
    assert scheduler.schedule(0.0) is not None
    before = scheduler.limits.max_num_batched_tokens
    assert scheduler.fail(2, shrink_steps=False) == []
    assert scheduler.num_waiting == 1
    assert scheduler.limits.max_num_batched_tokens == before


def test_recomputing_reports_what_it_took() -> None:
    scheduler, executor = after_eviction("auto", SLOW_LINK)
    recoveries = recoveries_of(scheduler)
    scheduler.recoveries.planner.policy.mode = "recompute"
    scheduler.add(create_request(prompt=LONG, max_tokens=2))
    now = 0.0
    while (plan := scheduler.schedule(now)) is not None:
        now += 1.0
        scheduler.update(executor.execute(plan))
    (report,) = recoveries
    assert report.method == "recompute"
    assert report.ended - report.began == 5.0  # 40 tokens, 8 in a step


def test_one_slow_load_does_not_end_loading_for_ever() -> None:
    scheduler, _ = after_eviction("auto", FAST_LINK)
    prefix = cached_prefix(scheduler.kv, create_request(LONG).prompt_token_ids.tobytes(), 39)
    choose, load = scheduler.recoveries.planner.choose, host_of(scheduler).costs.load
    assert choose(prefix, 1.0).method == "load"
    for _ in range(20):
        scheduler.costs.load_waited(load, 10.0)
        load.observe(10.0, 1, 9)
    assert choose(prefix, 1.0).method != "load"
    assert any(choose(prefix, 1.0).method == "load" for _ in range(1000))


def test_recoveries_share_the_link_one_after_the_other_and_know_it() -> None:
    prompts = [list(range(start, start + 400)) for start in range(1000, 5000, 1000)]
    costs = Costs(step=1e-4, token=1e-1, tiers={HOST: CopyCosts(1e-5, 1e-3)})
    scheduler = create_scheduler(
        num_blocks=420, num_host_blocks=1000, recovery="swap", costs=costs, max_num_batched_tokens=4096
    )
    executor = executor_for(scheduler)
    for prompt in [*prompts, *([start] * 1600 for start in (1, 2))]:
        serve(scheduler, executor, prompt)
    for prompt in prompts:
        scheduler.add(create_request(prompt=prompt, max_tokens=2))
    scheduler.schedule(0.0)
    recoveries = list(scheduler.recoveries._active.values())
    assert len(recoveries) == 4
    predicted = [recovery.predicted for recovery in recoveries]
    assert predicted == sorted(predicted)
    assert predicted[3] > 3 * predicted[0]


def test_usage_counts_what_was_there_before_the_request_and_not_its_own_work() -> None:
    scheduler, executor = after_eviction("swap")
    moved = create_request(prompt=LONG, max_tokens=2)
    moved.scheduled_time, moved.num_cached_tokens = 0.0, 8  # it had started elsewhere, and computed more there
    scheduler.add(moved)
    run(scheduler, executor)
    assert executor.num_loaded == 9
    assert moved.num_cached_tokens == 8
    assert moved.loaded_tokens == {}


@pytest.mark.parametrize("num_blocks", [11, 14])
def test_usage_of_a_search_does_not_count_what_its_hypotheses_have_computed(num_blocks: int) -> None:
    scheduler = create_scheduler(num_blocks=num_blocks, num_host_blocks=60, recovery="swap", max_num_seqs=4)
    executor = executor_for(scheduler)
    searches = [create_request(prompt=14, max_tokens=9, n=2) for _ in range(3)]
    for request in searches:
        change(request, beam=BeamParams(3))
        scheduler.add(request)
    run(scheduler, executor)
    assert executor.num_loaded > 0, "no hypothesis came back from the host: that was not tried"
    assert [request.num_cached_tokens for request in searches] == [0, 0, 0]


def test_usage_tells_device_and_host_apart() -> None:
    scheduler, executor = after_eviction("swap")
    again = serve(scheduler, executor, LONG)
    assert again.cached_tokens["host"] == again.num_cached_tokens == 4 * executor.num_loaded > 0
    once_more = serve(scheduler, executor, LONG)
    assert once_more.loaded_tokens == {}
    assert once_more.num_cached_tokens == 39


def test_copies_compete_for_a_busy_link_and_the_hopeless_lose() -> None:
    scheduler = create_scheduler(num_blocks=11, num_host_blocks=40, recovery="auto", costs=EVEN, eviction="cost")
    serve(scheduler, executor_for(scheduler), LONG)
    node = cached_prefix(scheduler.kv, create_request(LONG).prompt_token_ids.tobytes(), 39).blocks[0]
    host, costs, policy = host_of(scheduler), scheduler.costs, scheduler.kv.pool.policy
    is_worth_copying = scheduler.recoveries.planner.policy.is_worth_copying
    assert 0 < policy.probability(node) < 1
    assert is_worth_copying(node, host), "an idle link costs nothing"
    recompute, load = costs.block_seconds(node.depth, host.costs.load)
    saved = policy.probability(node) * recompute**2 / (recompute + load)
    host.costs.store.constants[:] = [0.0, 2 * saved]
    host.num_arriving = host.max_arriving // 4
    assert is_worth_copying(node, host)
    host.num_arriving = host.max_arriving * 3 // 4
    assert not is_worth_copying(node, host)


def test_nothing_is_loaded_over_what_a_step_in_flight_touches() -> None:
    scheduler, executor = after_eviction("swap")
    ends, begins = create_request(prompt=8, max_tokens=4), create_request(prompt=LONG, max_tokens=2)
    scheduler.add(ends)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    result = executor.execute(plan)
    scheduler.abort(ends.request_id)
    scheduler.add(begins)
    results = deque([result])
    while (plan := scheduler.schedule(0.0)) is not None:
        results.append(executor.execute(plan))  # which checks the blocks of its copies
    while results:
        scheduler.update(results.popleft())
    run(scheduler, executor)
    assert begins.sequences[0].output_token_ids.tolist() == expected_tokens(begins)


def test_a_block_that_the_host_has_not_kept_is_computed_again() -> None:
    """The executor tells it when it confirms the copy, so that no request waits for the block and starts over."""
    scheduler = create_scheduler(num_blocks=11, num_host_blocks=16, recovery="swap", costs=FAST_LINK)
    executor = executor_for(scheduler)
    executor.unkept = {2, 3}
    serve(scheduler, executor, LONG)
    serve(scheduler, executor, OTHER)
    host, counters = host_of(scheduler), scheduler.kv.pool.counters
    assert host.node(2) is host.node(3) is None
    assert 0 < counters.stored < executor.num_stored
    serve(scheduler, executor, LONG)
    assert counters.corrupt == 0
    assert scheduler.num_preemptions == 0
    check_states(scheduler.kv.pool)
