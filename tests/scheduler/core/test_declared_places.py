"""Snapshots at the places that requests declare."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers import declared_places, place_worth
from pagewise_scheduler.core.tiers.arena import WindowShape

from tests.scheduler.core.arenas import check_arena, check_tokens, create, drive_at_random, serve_alone
from tests.scheduler.core.builders import create_request
from tests.scheduler.core.checking_executor import CheckingExecutor
from tests.scheduler.core.driving import assert_all_free, executor_for, run

STATES = WindowShape(2, 7, state=True)
WINDOW = WindowShape(9, 1)
SYSTEM = [*range(203)]


def begin(scheduler: Scheduler, executor: CheckingExecutor, prompt: list[int], *places: int) -> Request:
    return serve_alone(scheduler, executor, prompt, places=places)


def asked(number: int, length: int = 120) -> list[int]:
    """The tokens of a message that no other has."""
    return [10_000 * number + index for index in range(length)]


@pytest.mark.parametrize("windows", [(STATES,), (WINDOW,), (STATES, WINDOW)], ids=["states", "windows", "both"])
@pytest.mark.parametrize("budget", [32, 512])
def test_the_second_prompt_begins_at_a_declared_place(windows: tuple[WindowShape, ...], budget: int) -> None:
    for places, hits in (((203,), [0, 200, 200]), ((), [0, 0, 200])):
        scheduler = create(2000, 1, windows, budget=budget)
        executor = executor_for(scheduler)
        found = [begin(scheduler, executor, SYSTEM + asked(n), *places).num_cached_tokens for n in (1, 2, 3)]
        assert found == hits


def test_a_place_is_taken_once() -> None:
    scheduler = create(2000, 1, (STATES,))
    executor = executor_for(scheduler)
    counters = scheduler.kv.pool.counters
    for number in range(1, 5):
        begin(scheduler, executor, SYSTEM + asked(number), 203)
    assert counters.snapshots_taken == 1 + 4 * 2, "beside the ends of the prompts and of the answers"


def test_places_that_save_little_are_left_out() -> None:
    """Places near the beginning, near each other, and near a junction."""
    scheduler = create(2000, 1, (STATES,))
    executor = executor_for(scheduler)
    taken = scheduler.kv.pool.counters
    begin(scheduler, executor, SYSTEM + asked(1), 0, 40, 150, 203)
    assert taken.snapshots_taken == 3
    begin(scheduler, executor, SYSTEM + asked(2), 203, 230)
    assert taken.snapshots_taken == 5, "the second place saves less than 64 tokens"


def test_a_place_near_the_end_replaces_the_one_that_was_learned() -> None:
    scheduler = create(2000, 1, (STATES,))
    executor = executor_for(scheduler)
    prompt = SYSTEM + asked(1)
    begin(scheduler, executor, prompt, 203, len(prompt) - 21)
    assert scheduler.kv.pool.counters.snapshots_taken == 3
    assert begin(scheduler, executor, prompt[:-21] + asked(2)).num_cached_tokens == (len(prompt) - 21) // 4 * 4
    assert begin(scheduler, executor, prompt[:-21] + asked(3)).num_cached_tokens == (len(prompt) - 21) // 4 * 4


def test_no_more_states_are_held_than_admission_counts() -> None:
    """Many places in one chunk: those that save the least are given up."""
    scheduler = create(2000, 1, (STATES,), budget=1024)
    executor = executor_for(scheduler)
    (group,) = scheduler.kv.windows
    most = 0

    def execute(plan: object) -> object:
        nonlocal most
        most = max([most, *(len(one.table.windows[0].blocks) for one in request.sequences)])
        return original(plan)

    original = executor.execute
    executor.execute = execute  # type: ignore[method-assign,assignment]
    prompt = [*range(903)]
    request = create_request(prompt=prompt, max_tokens=3)
    request.places = [100, 300, 400, 500, 600, 800]
    scheduler.add(request)
    run(scheduler, executor)
    assert most == group.most_blocks
    hits = [begin(scheduler, executor, prompt[:length] + asked(length)).num_cached_tokens for length in (850, 700, 250)]
    assert hits == [800, 300, 0]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(1, 29), max_size=8))
def test_no_rule_of_memory_is_broken_wherever_places_are(seed: int, places: list[int]) -> None:
    """Sequences share prefixes, are preempted and aborted, and steps fail, in a small arena."""
    rng = random.Random(seed)
    windows = [(WindowShape(2, rng.choice((1, 3, 9)), state=True),), (WINDOW,), (WINDOW, STATES)][rng.randrange(3)]
    pages, budget, longest = rng.choice((1, 2, 5)), rng.choice((3, 8, 32)), 40
    needed = create(10**6, pages, windows, budget=budget).kv.room_for(longest)
    with pytest.MonkeyPatch.context() as patch:  # also inside of prompts
        patch.setattr(place_worth, "_LEAST_TOKENS", 1)
        scheduler = create(
            needed + rng.randrange(90), pages, windows, budget=budget, seqs=rng.choice((1, 3, 8)),
            eviction=rng.choice(("lru", "cost")), host_pages=rng.choice((0, 10, needed)),
        )  # fmt: skip
    executor = executor_for(scheduler)

    def copied() -> None:
        for message in executor.finish_copies(rng.randrange(4)):
            scheduler.copied(message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(declared_places, "LEAST_TOKENS", 1)
        requests, in_flight = drive_at_random(
            rng, scheduler, executor, executor.execute, longest, lambda: check_arena(scheduler), copied, places
        )
        while in_flight:
            scheduler.update(in_flight.popleft())
        run(scheduler, executor)
    check_tokens(requests)
    check_arena(scheduler)
    assert_all_free(scheduler)


@pytest.mark.parametrize("length", range(30, 38))
def test_a_prompt_that_just_fits_is_served_with_many_places(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared_places, "LEAST_TOKENS", 1)
    room = create(10**6, 1, (STATES,), budget=64).kv.room_for(length + 3)
    scheduler = create(room, 1, (STATES,), budget=64)
    executor = executor_for(scheduler)
    begin(scheduler, executor, [*range(length)], 4, 8, 12, 16, 20, 24)
    begin(scheduler, executor, [*range(22), *asked(1, length - 22)], 4, 8, 12, 16, 20, 24)
