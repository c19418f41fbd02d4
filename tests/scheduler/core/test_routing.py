"""The executors of requests: the inputs of each policy, and that placed requests count at once."""

from array import array
from operator import mul

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.routing.executor_view import ExecutorView, Match, Placement
from pagewise_scheduler.core.routing.policies import (
    ROUTING_NAMES,
    Candidate,
    LeastTimeToFirstToken,
    PredictedRecovery,
    RoutingName,
    cheapest_recovery,
    look_up,
    make_routing,
    place,
)
from pagewise_scheduler.core.routing.prompts import PendingPrefixes, PrefixQuery
from pagewise_scheduler.core.tiers.cost_model import CostModel, Costs
from pagewise_scheduler.core.tiers.peer import Peer, PrefixDirectory
from pagewise_shared.protocol import Adapter, AdapterLoaded, LoadAdapter
from pagewise_shared.segments import make_segments, mark_segments

from tests.core_requests import change
from tests.scheduler.core.builders import create_request, create_scheduler
from tests.scheduler.core.driving import executor_for, run

COSTS = Costs(step=1e-3, token=1e-3, attention=0.0)
LONG = list(range(100, 140))
OTHER = list(range(200, 240))


def executor_view(
    *cached: list[int],
    num_blocks: int = 256,
    num_host_blocks: int = 0,
    costs: Costs = COSTS,
    salt: str | None = None,
    block_size: int = 4,
) -> ExecutorView:
    """An executor that has served these prompts."""
    scheduler = create_scheduler(
        num_blocks=num_blocks, num_host_blocks=num_host_blocks, costs=costs, block_size=block_size
    )
    executor = executor_for(scheduler)
    for prompt in cached:
        request = create_request(prompt=prompt, max_tokens=1)
        change(request, cache_salt=salt)
        scheduler.add(request)
        run(scheduler, executor)
    return ExecutorView(scheduler)


def placed(name: RoutingName, prompt: list[int], *executors: ExecutorView, now: float = 0.0) -> Placement:
    return place(make_routing(name), create_request(prompt=prompt), executors, now)


def find(view: ExecutorView, prompt: list[int], salt: str | None = None) -> Match:
    request = create_request(prompt=prompt)
    change(request, cache_salt=salt)
    return view.find(PrefixQuery(request))


# ---- the directory -----------------------------------------------------------------------------------


def test_the_directory_counts_full_blocks_and_leaves_the_newest_token_out() -> None:
    holder = executor_view(LONG)
    assert find(holder, LONG) == Match(36, 0, 36)
    assert find(holder, [*LONG, 1]) == Match(40, 0, 40)
    assert find(holder, LONG[:6] + OTHER) == Match(4, 0, 4)
    assert find(holder, OTHER) == Match(0, 0, 0)


@pytest.mark.parametrize("name", ["prefix", "ttft"])
def test_executors_with_blocks_of_other_sizes_are_compared_by_tokens(name: RoutingName) -> None:
    small, large, none = executor_view(LONG), executor_view(LONG, block_size=16), executor_view(block_size=16)
    query = PrefixQuery(create_request(prompt=LONG))
    assert [view.find(query) for view in (large, small, none)] == [Match(32, 0, 32), Match(36, 0, 36), Match(0, 0, 0)]
    assert placed(name, LONG, none, large, small).executor is small
    assert placed(name, LONG[:34], none, large).executor is large


def test_a_salt_asks_its_own_space() -> None:
    holder = executor_view(LONG, salt="tenant")
    assert find(holder, LONG).device == 0
    assert find(holder, LONG, "tenant").device == 36
    assert find(holder, LONG, "another").device == 0


def test_what_lies_on_the_host_is_told_apart() -> None:
    holder = executor_view(LONG, OTHER, num_blocks=14, num_host_blocks=64)
    match = find(holder, LONG)
    assert match.device + match.lower == 36
    assert match.lower > 0
    assert find(holder, OTHER) == Match(36, 0, 36)


def test_prompt_logprobs_use_no_cache() -> None:
    holder = executor_view(LONG)
    request = create_request(prompt=LONG)
    change(request, sampling=request.params.sampling.__class__(temperature=0, prompt_logprobs=1))
    assert holder.find(PrefixQuery(request)) == Match(0, 0, 0)


def test_one_that_moves_is_looked_up_with_its_outputs() -> None:
    request = create_request(prompt=LONG[:38], max_tokens=8)
    request.create_sequences()
    request.sequences[0].output_token_ids.extend([138, 139, 7])
    assert executor_view(LONG).find(PrefixQuery(request)).device == 40


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=8),
    st.lists(st.integers(0, 2), max_size=12),
)
def test_the_longest_prefix_shared_with_any_prompt_is_found(prompts: list[list[int]], wanted: list[int]) -> None:
    pending = PendingPrefixes()
    for prompt in prompts:
        pending.add(None, array("i", prompt).tobytes())
    longest = max(
        (
            next((i for i in range(len(wanted)) if prompt[i : i + 1] != wanted[i : i + 1]), len(wanted))
            for prompt in prompts
        ),
        default=0,
    )
    assert pending.shared(None, array("i", wanted).tobytes(), 0, 1) == longest
    assert pending.shared(None, array("i", wanted).tobytes(), 0, 4) == longest // 4 * 4
    assert pending.shared(None, array("i", wanted).tobytes(), 3, 1) == max(3, longest)
    assert pending.shared("another", array("i", wanted).tobytes(), 0, 1) == 0
    for prompt in prompts:
        pending.remove(None, array("i", prompt).tobytes())
    assert pending.shared(None, array("i", wanted).tobytes(), 0, 1) == 0


# ---- policies ----------------------------------------------------------------------------------------


def test_round_robin_takes_turns() -> None:
    policy, executors = make_routing("round-robin"), [executor_view(LONG), executor_view(), executor_view()]
    chosen = [place(policy, create_request(prompt=LONG), executors, 0.0).executor for _ in range(6)]
    assert chosen == executors * 2


def test_least_loaded_counts_what_was_placed_and_not_finished() -> None:
    policy, executors = make_routing("least-loaded"), [executor_view(), executor_view()]
    first, second = (place(policy, create_request(n=2), executors, 0.0) for _ in range(2))
    assert [first.executor, second.executor] == executors
    second.end(1.0)
    assert place(policy, create_request(), executors, 1.0).executor is second.executor
    assert [one.load for one in executors] == [2, 1]


def test_prefix_takes_the_holder_however_long_its_queue_is() -> None:
    holder, idle = executor_view(LONG), executor_view(LONG[:8])
    for _ in range(20):
        placement = placed("prefix", LONG, idle, holder)
        assert (placement.executor, placement.reason) == (holder, "cached")
    placement = placed("prefix", OTHER, holder, idle)
    assert (placement.executor, placement.reason) == (idle, "load"), "load breaks ties"


def test_the_first_token_comes_soonest_where_the_prompt_is_cached() -> None:
    placement = placed("ttft", [*LONG, 1], executor_view(), executor_view(LONG), executor_view(LONG[:20]))
    assert placement.reason == "cached"
    assert placement.predicted == pytest.approx(2e-3, rel=0.01), "one step of one token"


def test_a_hot_prefix_comes_to_a_second_executor_when_waiting_takes_longer_than_computing() -> None:
    holder, idle = executor_view(LONG), executor_view()
    reasons = [placed("ttft", [*LONG, number, *range(12)], holder, idle).reason for number in range(12)]
    assert reasons[0] == "cached"
    assert "elsewhere" in reasons
    first = reasons.index("elsewhere")
    assert reasons[:first] == ["cached"] * first
    assert "cached" in reasons[first:], "then both hold it, as far as anybody knows"


def test_sessions_stick_to_their_executor_while_it_is_not_much_busier() -> None:
    policy, executors = make_routing("ttft"), [executor_view() for _ in range(4)]
    running = {one: executor_for(one.scheduler) for one in executors}
    prompts = [[1000 * session + i for i in range(40)] for session in range(4)]
    homes: list[set[int]] = [set() for _ in prompts]
    for turn in range(5):
        for session, prompt in enumerate(prompts):
            request = create_request(prompt=list(prompt))
            placement = place(policy, request, executors, 10.0 * turn)
            scheduler = placement.executor.scheduler
            scheduler.add(request)
            run(scheduler, running[placement.executor])
            placement.end(10.0 * turn + 1)
            homes[session].add(executors.index(placement.executor))
            prompt += [*request.sequences[0].output_token_ids, turn, turn, turn, turn]
    assert all(len(home) == 1 for home in homes)


def test_a_burst_spreads_before_any_scheduler_has_heard_of_it() -> None:
    policy, executors = make_routing("ttft"), [executor_view() for _ in range(4)]
    for number in range(16):
        place(policy, create_request(prompt=[number * 100 + i for i in range(40)]), executors, 0.0)
    assert [one.load for one in executors] == [4, 4, 4, 4]


def test_a_burst_of_one_prefix_stays_together_before_any_of_it_is_computed() -> None:
    costs = Costs(step=1e-4, token=1e-3, attention=0.0)
    policy, executors = make_routing("ttft"), [executor_view(num_blocks=2048, costs=costs) for _ in range(4)]
    document = list(range(4000))
    burst = [place(policy, create_request(prompt=[*document, n]), executors, 0.0) for n in range(5)]
    assert len({one.executor for one in burst}) == 1
    assert [one.start for one in burst] == [0, 4000, 4000, 4000, 4000], "what others will compute is not computed twice"


def test_an_executor_that_would_evict_valuable_blocks_is_passed_over() -> None:
    full, free = executor_view(LONG, num_blocks=10), executor_view(num_blocks=10)
    for executors in ([full, free], [free, full]):
        placement = placed("ttft", OTHER[:36], *executors)
        assert placement.executor is free
        placement.end(0.0)


def test_a_full_batch_means_waiting_for_others_to_end() -> None:
    holder, idle = executor_view(LONG), executor_view()
    placements = [placed("prefix", LONG[:8], holder) for _ in range(8)]  # all of its rows
    for one in placements:
        one.answered(0.0)
    placement = placed("ttft", LONG, holder, idle)
    assert (placement.executor, placement.reason) == (idle, "elsewhere")


def test_a_faster_executor_takes_more() -> None:
    fast = executor_view(costs=Costs(step=1e-3, token=2.5e-4, attention=0.0))
    slow = executor_view()
    policy = make_routing("ttft")
    for number in range(10):
        place(policy, create_request(prompt=[number * 100 + i for i in range(40)]), [slow, fast], 0.0)
    assert (fast.load, slow.load) == (8, 2)


def test_of_many_executors_the_holder_and_the_least_loaded_are_found() -> None:
    policy, many = make_routing("ttft"), [executor_view() for _ in range(40)]
    for one in many[:-1]:
        place(make_routing("prefix"), create_request(prompt=OTHER), [one], 0.0)
    assert place(policy, create_request(prompt=LONG), many, 0.0).executor is many[-1]
    many[17] = executor_view(LONG)
    assert place(policy, create_request(prompt=[*LONG, 1]), many, 0.0).executor is many[17]


def test_better_priorities_do_not_wait_for_worse_ones() -> None:
    one = executor_view()
    for number in range(4):
        place(
            make_routing("ttft"), create_request(prompt=[number * 100 + i for i in range(40)], priority=1), [one], 0.0
        )
    assert one.queue_seconds(0, 0.0) == 0.0
    assert one.queue_seconds(1, 0.0) == pytest.approx(4 * 40e-3, rel=0.1)


def test_what_is_computed_of_the_queue_is_not_waited_for_again() -> None:
    one = executor_view()
    request = create_request(prompt=[*range(500, 596)], max_tokens=1, arrival_time=0.0)
    placement = place(make_routing("ttft"), request, [one], 0.0)
    assert one.queue_seconds(0, 10.0) == pytest.approx(0.1, rel=0.1), "nobody has begun"
    scheduler, executor = one.scheduler, executor_for(one.scheduler)
    scheduler.add(request)
    plan = scheduler.schedule(10.0)
    assert plan is not None
    scheduler.update(executor.execute(plan))
    assert one.queue_seconds(0, 10.06) == pytest.approx(0.04, rel=0.1)
    assert one.queue_seconds(0, 99.0) < 0.01, "it takes longer than predicted"
    placement.answered(99.0)
    assert one.queue_seconds(0, 99.0) == 0.0


def test_another_method_of_recovery_is_one_more_term() -> None:
    asked: list[tuple[ExecutorView, ExecutorView]] = []

    def with_fetch(candidate: Candidate, holder: Candidate) -> PredictedRecovery:
        asked.append((candidate.executor, holder.executor))
        fetched = PredictedRecovery(1e-6 * (holder.match.device - candidate.match.device), holder.match.device)
        return min(cheapest_recovery(candidate, holder), fetched)

    holder, idle = executor_view(LONG), executor_view()
    placed("prefix", OTHER, holder)
    placement = place(LeastTimeToFirstToken(with_fetch), create_request(prompt=LONG), [holder, idle], 0.0)
    assert placement.executor is idle
    assert asked == [(holder, holder), (idle, holder)]


def lending(*executors: ExecutorView) -> None:
    """Let them fetch from each other."""
    directory = PrefixDirectory()
    for number, one in enumerate(executors):
        own = Peer(f"peer{number}", ("format", 4, 1024), one.scheduler, lambda: None)
        one.scheduler.recoveries.planner.join(directory, own)


def test_what_is_fetched_is_not_booked_as_computed() -> None:
    fetching = Costs(step=1e-3, token=1e-2, attention=0.0, fetch_setup=1e-3, fetch_block=1e-4)
    holder, idle = executor_view(LONG, costs=fetching), executor_view(costs=fetching)
    lending(holder, idle)
    placed("prefix", OTHER, holder, now=0.0)
    placement = placed("ttft", [*LONG, 1], holder, idle)
    assert (placement.executor, placement.reason, placement.start) == (idle, "elsewhere", 40)
    assert placement.predicted == pytest.approx(1e-3 + 10 * 1e-4 + 1e-2 + 1e-3, rel=0.3)
    assert placement.num_blocks == 11, "what is fetched takes blocks"
    assert idle.queue_seconds(0, 0.0) < 0.02
    assert placed("ttft", [*LONG, 1], holder, idle).executor is idle, "it will be there"


def test_of_what_comes_from_both_ends_the_front_is_booked_as_computed() -> None:
    slow = Costs(step=1e-4, token=1e-3, attention=0.0, fetch_setup=1e-4, fetch_block=4e-3)
    document = list(range(4000))
    holder, idle = (executor_view(*held, num_blocks=2048, costs=slow) for held in ([document], []))
    lending(holder, idle)
    found = cheapest_recovery(*(look_up(one, PrefixQuery(create_request(prompt=document))) for one in (idle, holder)))
    assert found.seconds == pytest.approx(2.0, rel=0.1), "four seconds of either"
    assert found.start == pytest.approx(2000, rel=0.1)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(ROUTING_NAMES),
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 60), st.integers(0, 3), st.integers(0, 2)), max_size=40),
)
def test_whatever_ends_leaves_nothing_behind(name: RoutingName, steps: list[tuple[int, int, int, int]]) -> None:
    policy, executors = make_routing(name), [executor_view() for _ in range(3)]
    live: list[Placement] = []
    now = 0.0
    for prefix, length, priority, action in steps:
        now += 0.5
        prompt = [prefix * 1000 + i for i in range(length)]
        if action == 2 and live:
            live.pop(len(live) // 2).end(now)
            continue
        if action == 1 and live:
            live[0].answered(now)
            live[0].answered(now)
        request: Request = create_request(prompt=prompt, priority=priority, n=1 + prefix % 2)
        placement = place(policy, request, executors, now)
        assert placement.executor in executors
        assert placement.predicted >= 0.0
        live.append(placement)
        assert sum(one.load for one in executors) == sum(one.request.params.num_sequences for one in live)
    for placement in live:
        placement.end(now)
        placement.end(now)
    for one in executors:
        assert (one.load, one.num_decoding, one.queue_seconds(9, now)) == (0, 0, 0.0)
        assert find(one, list(range(1000, 1060))) == Match(0, 0, 0)


def test_a_cost_model_that_started_far_off_learns_from_few_kinds_of_steps() -> None:
    """Constants that are kept from falling below zero must not push the others up."""
    truth, model = (4e-3, 4e-5, 1.3e-9, 0.0), CostModel(Costs(), 16, 8192)
    spans = [(0, 4096), (3584, 512), (4000, 96)]
    for number in range(600):
        features = model.features(*spans[number % 3 if number < 60 else 1 + number % 2])
        model.prefill.observe(sum(map(mul, truth, features)), *features)
    for span in spans[1:]:
        assert model.compute_seconds(*span) == pytest.approx(sum(map(mul, truth, model.features(*span))), rel=0.1)


def test_a_request_goes_where_its_segments_are_cached() -> None:
    """Its own prompt is cached nowhere; the documents in it are, behind the same root, wherever they stood."""
    documents = [[100 + i for i in range(40)], [200 + i for i in range(40)], [300 + i for i in range(40)]]
    root = list(range(8))

    def asking(order: list[int], question: int) -> Request:
        prompt, ranges = [*root], []
        for number in order:
            ranges.append((len(prompt), len(prompt) + 40))
            prompt += documents[number]
        request = create_request(prompt=[*prompt, question, 1, 2], max_tokens=1)
        request.segments = make_segments(len(request.prompt_token_ids), ranges)
        mark_segments(request.prompt_token_ids, request.segments)
        return request

    views = []
    for order in ([0, 1], [1, 2]):
        scheduler = create_scheduler(num_blocks=128)
        scheduler.add(asking(order, 50))
        run(scheduler, executor_for(scheduler))
        views.append(ExecutorView(scheduler))
    for order, expected in (([1, 0], 0), ([2, 1], 1), ([0], 0), ([2], 1)):
        query = PrefixQuery(asking(order, 60))
        matches = [view.find(query) for view in views]
        assert matches[expected].reused == 8 + 40 * len(order)
        assert matches[expected].reused > matches[1 - expected].reused
        placed = place(make_routing("prefix"), asking(order, 61), views, now=0.0)
        assert placed.executor is views[expected]
        assert placed.reason == "cached"


def test_an_adapter_is_a_reason_to_go_where_it_is() -> None:
    adapter = Adapter("one", "/adapters/one", b"1" * 32, 50_000_000, 16)
    views, slots = [], []
    for _ in range(2):
        scheduler = create_scheduler(costs=COSTS, max_adapters=1, max_adapter_rank=16)
        slots.append(scheduler.features.adapters)
        views.append(ExecutorView(scheduler))
    wanting = create_request(prompt=LONG)
    change(wanting, adapter=adapter)
    slots[1].enter(wanting)
    (load,) = slots[1].messages(0.0)
    assert isinstance(load, LoadAdapter)
    slots[1].take(AdapterLoaded(1, load.number, 80_000), 0.1)

    def chosen(executors: list[ExecutorView], adapter: Adapter | None) -> Placement:
        request = create_request(prompt=LONG)
        change(request, adapter=adapter)
        return place(make_routing("ttft"), request, executors, 0.0)

    there = chosen(views, adapter)
    assert there.executor is views[1]
    without = chosen(views[:1], adapter)
    assert without.predicted == pytest.approx(there.predicted + slots[0].seconds(adapter))
