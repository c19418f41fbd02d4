"""Snapshots of states inside of long prompts, and places that take none."""

from collections import deque

import pytest
from pagewise_scheduler.core.memory.block_table import StateTable
from pagewise_scheduler.core.memory.eviction import CostAware, ending
from pagewise_scheduler.core.memory.roles import ANSWER, INSIDE, PROMPT, new_role, place_of, role_after, role_at_end
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.arena import WindowShape
from pagewise_shared.protocol import StepResult

from tests.scheduler.core.arenas import create, serve_alone
from tests.scheduler.core.builders import create_request
from tests.scheduler.core.checking_executor import CheckingExecutor
from tests.scheduler.core.driving import executor_for

STATES = WindowShape(2, 7, state=True)
SIZE, BUDGET, TOKENS = 16, 128, 40


def serve(scheduler: Scheduler, executor: CheckingExecutor, prompt: list[int]) -> Request:
    return serve_alone(scheduler, executor, prompt, TOKENS)


def num_inside(scheduler: Scheduler) -> int:
    """Snapshots that were taken inside of prompts."""
    return sum(place_of(one.kind) == INSIDE for one in scheduler.kv.windows[0].at.values())


@pytest.mark.parametrize("shared", [400, 600, 900])
@pytest.mark.parametrize("budget", [BUDGET, 2 * BUDGET + 5])
def test_the_second_prompt_begins_inside_of_the_first(shared: int, budget: int) -> None:
    """Nothing shows the place where it leaves the first one before it comes."""
    scheduler = create(4000, 1, (STATES,), budget=budget, block_size=SIZE, eviction="cost")
    executor = executor_for(scheduler)
    serve(scheduler, executor, [*range(1000)])
    hits = serve(scheduler, executor, [*range(shared), *[7] * 400]).num_cached_tokens
    assert shared - budget - SIZE < hits <= shared


def test_no_place_is_behind_the_tokens_that_are_computed_next() -> None:
    """After a chunk for which the sequence had no block of states left."""
    scheduler = create(600, 1, (WindowShape(2, 3, state=True),), budget=133, block_size=SIZE, eviction="cost")
    executor = executor_for(scheduler)
    serve(scheduler, executor, [*range(900), *[1] * 400])
    request = create_request([*range(300), *[2] * 400], 3)
    scheduler.add(request)
    (sequence,), results = request.sequences, deque[StepResult]()
    while not sequence.prefilled:
        while len(results) < 2 and (plan := scheduler.schedule(0.0)) is not None:
            results.append(executor.execute(plan))
        scheduler.update(results.popleft())
    (table,) = sequence.table.windows
    assert isinstance(table, StateTable)
    assert {*table.inside} <= {node.depth for node in scheduler.kv.windows[0].at}


def test_no_more_is_taken_than_a_share_of_the_free_pages() -> None:
    scheduler = create(200, 1, (STATES,), budget=BUDGET, block_size=SIZE, eviction="cost")
    executor = executor_for(scheduler)
    serve(scheduler, executor, [*range(1600)])
    assert 0 < num_inside(scheduler) * 7 <= (200 - 100) // 2


def test_layers_with_windows_keep_the_places_that_they_have() -> None:
    scheduler = create(4000, 1, (STATES, WindowShape(9, 1)), budget=BUDGET, block_size=SIZE, eviction="cost")
    executor = executor_for(scheduler)
    serve(scheduler, executor, [*range(1000)])
    assert not num_inside(scheduler), "sequences could not begin there"


def learn(scheduler: Scheduler, place: int, *, used: bool) -> None:
    """Let the policy have seen many snapshots at a place, which were used after a while or never."""
    policy = scheduler.kv.pool.policy
    assert isinstance(policy, CostAware)
    history, role = policy._history, role_at_end(new_role(place), ending(TOKENS))
    keys = [hash((place, number)) for number in range(400)]
    for key in keys:
        history.lives(key, role, returned=False)
    history.now += 2_000
    for key in keys if used else ():
        history.lives(key, role_after(role, begun=True), returned=True)
    history.now += 100_000
    history._learn()


@pytest.mark.parametrize("used", [False, True])
def test_nothing_is_taken_inside_while_other_memory_is_worth_more(used: bool) -> None:
    scheduler = create(400, 1, (STATES,), budget=BUDGET, block_size=SIZE, eviction="cost")
    executor, counters = executor_for(scheduler), scheduler.kv.pool.counters
    learn(scheduler, INSIDE, used=used)
    for place in (PROMPT, ANSWER):
        learn(scheduler, place, used=True)
    for number in range(1, 9):  # memory is full of prompts like those that are used
        serve(scheduler, executor, [number] * 700)
    before, skipped = counters.snapshots_taken, counters.snapshots_skipped
    serve(scheduler, executor, [9] * 700)
    assert counters.snapshots_skipped > skipped, "places between those that are worth it"
    assert (counters.snapshots_taken > before + 2) == used, "beside the ends of the prompt and of the answer"
