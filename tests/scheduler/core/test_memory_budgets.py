"""Budgets of memory per owner: minima, low marks and high marks, on the device and in host memory."""

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from pagewise_scheduler.core.memory.budgets import Budget
from pagewise_scheduler.core.memory.prefix_tree import cache_salt_of
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.memory_budgets import MemoryBudgets
from pagewise_shared.config.options import EvictionName
from pagewise_shared.protocol import DEVICE, HOST, StepPlan, encode
from pagewise_shared.sampling import SamplingParams

from tests.core_requests import change, make_request
from tests.scheduler.core.builders import create_request, create_scheduler, evict
from tests.scheduler.core.driving import executor_for, run

Schedule = Callable[[float], StepPlan | None]
Budgets = dict[str, dict[int, Budget]]


def owner_of(cache_salt: str | None) -> str:
    return cache_salt or "nobody"


def with_budgets(scheduler: Scheduler, budgets: Budgets, longest: int = 0) -> MemoryBudgets:
    memory = MemoryBudgets(scheduler.kv, owner_of, longest)
    assert memory.try_set(budgets, 0)
    return memory


def serve(scheduler: Scheduler, owner: str, tokens: list[int]) -> Request:
    request = create_request(prompt=tokens, max_tokens=1)
    change(request, cache_salt=owner)
    scheduler.add(request)
    return request


def num_cached(scheduler: Scheduler, owner: str, tier: int = DEVICE) -> int:
    pool = scheduler.kv.tiers[tier]
    nodes = filter(None, map(pool.node, range(pool.num_blocks)))
    return sum(cache_salt_of(node) == owner for node in nodes)


def filled(budgets: Budgets, *, num_host_blocks: int = 0) -> Scheduler:
    """A pool of 40 blocks, of which the owner "old" has cached the first 20 and the owner "new" the others."""
    scheduler = create_scheduler(num_blocks=40, num_host_blocks=num_host_blocks, max_num_batched_tokens=80)
    if budgets:
        with_budgets(scheduler, budgets)
    executor = executor_for(scheduler)
    for owner in ("old", "new"):
        serve(scheduler, owner, [1 + (owner == "new"), *range(10, 89)])
        run(scheduler, executor)
    assert num_cached(scheduler, "old") == num_cached(scheduler, "new") == 20
    return scheduler


@pytest.mark.parametrize(
    ("budgets", "left"),
    [
        ({}, (5, 20)),
        ({"old": Budget(min=15)}, (15, 10)),
        ({"old": Budget(low=18)}, (18, 7)),
        ({"old": Budget(low=30)}, (20, 5)),
        ({"old": Budget(low=30), "new": Budget(low=30)}, (5, 20)),
        ({"new": Budget(high=8)}, (17, 8)),
        ({"old": Budget(min=15), "new": Budget(high=12)}, (15, 10)),
    ],
    ids=str,
)
def test_others_take_what_the_budgets_let_them(budgets: dict[str, Budget], left: tuple[int, int]) -> None:
    scheduler = filled({owner: {DEVICE: budget} for owner, budget in budgets.items()})
    evict(scheduler, 15)
    assert (num_cached(scheduler, "old"), num_cached(scheduler, "new")) == left


def test_low_gives_way_before_anything_fails_and_min_never_does() -> None:
    scheduler = filled({"old": {DEVICE: Budget(min=4, low=20)}, "new": {DEVICE: Budget(min=6)}})
    assert scheduler.kv.num_available == 30
    evict(scheduler, 40)
    assert (num_cached(scheduler, "old"), num_cached(scheduler, "new")) == (4, 6)
    assert scheduler.kv.num_in_use == 0


def test_a_key_begins_with_its_protected_prefix_while_others_have_the_rest() -> None:
    scheduler = filled({"old": {DEVICE: Budget(min=15)}})
    serve(scheduler, "new", [3, *range(200, 274)])
    assert scheduler.schedule(0.0) is not None
    assert scheduler.kv.num_available == scheduler.kv.num_total - 19 - 15
    own = serve(scheduler, "old", [1, *range(10, 70)])
    assert scheduler.schedule(0.0) is not None
    assert [sequence.request for sequence in scheduler.running] == [own]
    assert own.num_cached_tokens == 60


@pytest.mark.parametrize("least", [0, 10, 18, 20])
def test_preemption_frees_as_many_blocks_as_it_says(least: int) -> None:
    """Blocks of a key below its minimum are cached then, and nobody gets them."""
    scheduler = filled({"old": {DEVICE: Budget(min=least)}})
    serve(scheduler, "old", [1, *range(10, 89)])
    plan = scheduler.schedule(0.0)
    assert plan is not None
    (sequence,), kv = scheduler.running, scheduler.kv
    before, freed = kv.num_available, kv.num_freed(sequence.table)
    kv.free(sequence.table, None)
    assert kv.num_available == before + freed
    assert freed == 20 - min(19, least)


def test_preempting_two_sequences_of_a_key_frees_as_many_blocks_as_it_says() -> None:
    scheduler = create_scheduler(num_blocks=40, max_num_batched_tokens=80)
    with_budgets(scheduler, {"old": {DEVICE: Budget(min=18)}})
    executor = executor_for(scheduler)
    for first in (1, 2):
        change(request := create_request(prompt=[first, *range(10, 57)], max_tokens=9), cache_salt="old")
        scheduler.add(request)
    for _ in range(3):  # the blocks of both prompts are computed
        plan = scheduler.schedule(0.0)
        assert plan is not None
        scheduler.update(executor.execute(plan))
    kv, tables = scheduler.kv, [sequence.table for sequence in scheduler.running]
    promised = [kv.num_freed(table, tables[:number]) for number, table in enumerate(tables)]
    alone, available = [kv.num_freed(table) for table in tables], [kv.num_available]
    for table in tables:
        kv.free(table, None)
        available.append(kv.num_available)
    assert [after - before for before, after in pairwise(available)] == promised
    assert sum(alone) > sum(promised), "what protects a key grows while its sequences let go"


def test_protected_blocks_in_host_memory_stay() -> None:
    scheduler = filled({"old": {HOST: Budget(min=8)}}, num_host_blocks=16)
    evict(scheduler, 40)
    assert num_cached(scheduler, "old", HOST) == 8
    assert num_cached(scheduler, "new", HOST) == 8


def test_minima_that_are_too_large_together_shrink_by_the_same_factor() -> None:
    scheduler = create_scheduler(num_blocks=40)
    memory = with_budgets(scheduler, {"a": {DEVICE: Budget(min=30)}, "b": {DEVICE: Budget(min=10)}})
    assert memory.scaled == {DEVICE}
    assert [use.budget.min for _, _, use in memory.uses()] == [15, 5]
    # The longest request fits beside them.
    other = create_scheduler(num_blocks=40)
    longest = MemoryBudgets(other.kv, owner_of, longest=30 * 4)
    assert longest.try_set({"a": {DEVICE: Budget(min=20)}}, 0)
    assert [use.budget.min for _, _, use in longest.uses()] == [10]


def test_budgets_wait_while_they_would_take_back_promised_blocks() -> None:
    scheduler = filled({})
    memory = MemoryBudgets(scheduler.kv, owner_of, 0)
    assert not memory.try_set({"old": {DEVICE: Budget(min=15)}}, 26)
    assert scheduler.kv.num_available == 40
    assert memory.try_set({"old": {DEVICE: Budget(min=15)}}, 25)
    assert scheduler.kv.num_available == 25


def test_budgets_count_blocks_that_were_there_before_and_survive_a_reset() -> None:
    scheduler = filled({})
    memory = with_budgets(scheduler, {"old": {DEVICE: Budget(min=10)}})
    assert [use.cached for _, _, use in memory.uses()] == [20]
    scheduler.fail(2)
    assert [use.cached for _, _, use in memory.uses()] == [0]
    executor = executor_for(scheduler)
    serve(scheduler, "old", list(range(80)))
    run(scheduler, executor)
    evict(scheduler, 40)
    assert num_cached(scheduler, "old") == 10


def test_owners_whose_budgets_wait_are_known_after_a_reset() -> None:
    scheduler = filled({})
    memory = with_budgets(scheduler, {"old": {DEVICE: Budget(min=5)}})
    budgets = {"old": {DEVICE: Budget(min=5)}, "new": {DEVICE: Budget(min=10)}}
    assert not memory.try_set(budgets, 40)
    scheduler.fail(2)
    serve(scheduler, "new", list(range(80)))
    run(scheduler, executor_for(scheduler))
    assert [use.cached for _, _, use in memory.uses()] == [0, 20]
    assert memory.try_set(budgets, 0)
    evict(scheduler, 40)
    assert num_cached(scheduler, "new") == 10


@pytest.mark.parametrize(
    ("eviction", "budgets"),
    [("lru", {"a": {DEVICE: Budget()}, "b": {HOST: Budget(high=100)}}), ("cost", {})],  # "cost" values blocks anew
)
def test_budgets_that_promise_nothing_change_no_plan(eviction: EvictionName, budgets: Budgets) -> None:
    plans: list[list[bytes]] = []
    for divided in (False, True):
        scheduler = create_scheduler(num_blocks=24, num_host_blocks=12, eviction=eviction)
        if divided:
            with_budgets(scheduler, budgets)
        executor, rng, made = executor_for(scheduler), random.Random(7), list[bytes]()
        schedule = scheduler.schedule

        def noted(now: float, schedule: Schedule = schedule, made: list[bytes] = made) -> StepPlan | None:
            if (plan := schedule(now)) is not None:
                made.append(encode(plan))
            return plan

        scheduler.schedule = noted  # type: ignore[method-assign]
        for _ in range(12):
            for number in range(4):
                prompt = [*range(rng.choice((0, 9, 20))), *(rng.randrange(3) for _ in range(rng.randrange(1, 30)))]
                request = make_request(f"r{number}", prompt, 3, SamplingParams(temperature=0), arrival_time=0.0)
                change(request, cache_salt=rng.choice(("a", "b", "c")))
                scheduler.add(request)
            run(scheduler, executor)
        assert scheduler.kv.pool.counters.evicted > 100
        plans.append(made)
    assert plans[0] == plans[1]
