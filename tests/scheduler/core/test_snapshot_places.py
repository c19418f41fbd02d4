"""Where snapshots of states are taken, and which of them stay."""

import random

from hypothesis import given
from hypothesis import strategies as st
from pagewise_scheduler.core.memory.eviction_roles import Place, RoleHistory, role
from pagewise_scheduler.core.memory.prefix_tree import ancestors
from pagewise_scheduler.core.tiers.arena import WindowShape
from pagewise_scheduler.core.tiers.snapshots import SnapshotPool

from tests.scheduler.core.arenas import check_arena, create
from tests.scheduler.core.builders import create_request
from tests.scheduler.core.driving import executor_for, run

STATES = WindowShape(2, 7, state=True)


def test_a_prompt_keeps_states_where_the_last_ones_were_left() -> None:
    """Each prompt has all but the last 12 to 15 tokens of the one before, as if messages had been cut."""
    scheduler = create(4000, 1, (STATES,), budget=512, eviction="cost")
    executor = executor_for(scheduler)
    text, missed, shared = [*range(400)], list[int](), 0
    for turn in range(12):
        request = create_request(prompt=text, max_tokens=2)
        scheduler.add(request)
        run(scheduler, executor)
        if turn:
            missed.append(shared // 4 * 4 - request.num_cached_tokens)
        shared = len(text) - 12 - turn % 4
        text = text[:shared] + [1000 * (turn + 1) + index for index in range(100)]
    assert missed[0] >= 80, "at first nothing is known"
    assert max(missed[-4:]) <= 8


def test_the_inside_of_a_long_prompt_is_kept_while_memory_is_free() -> None:
    scheduler = create(4000, 1, (STATES,), budget=512, block_size=16, eviction="cost")
    executor = executor_for(scheduler)
    for prompt in ([*range(4000)], [*range(2500), *range(10_000, 10_050)]):
        request = create_request(prompt=prompt)
        scheduler.add(request)
        run(scheduler, executor)
    assert 1500 < request.num_cached_tokens < 2500
    check_arena(scheduler)


def test_what_is_evicted_early_is_not_taken_for_useless() -> None:
    roles = RoleHistory()
    short, idle = role(Place.PROMPT, 0, followed=False), role(Place.ANSWER, 0, followed=False)
    for number in range(100):
        roles.kept(short, 0.02)
        roles.kept(idle, 1.0)
        if number % 50 == 0:
            roles.used(short)
    assert roles.share(idle) < 0.05 < 0.5 < roles.share(short)


def test_nothing_is_evicted_for_the_inside_of_a_prompt() -> None:
    scheduler = create(1000, 1, (STATES,), budget=512, block_size=16, eviction="cost")
    executor = executor_for(scheduler)
    taken = [0]
    for number in range(8):
        scheduler.add(create_request(prompt=[10_000 * number + index for index in range(4000)]))
        run(scheduler, executor)
        taken.append(scheduler.kv.pool.counters.snapshots_taken)
    assert taken[1] > 2
    assert taken[-1] - taken[-2] <= 2, taken
    check_arena(scheduler)


def check_neighbours(pool: SnapshotPool) -> None:
    """Each snapshot knows the one before it once it is looked at."""
    snapshots = set(pool.at.values())
    for snapshot in snapshots:
        pool._link(snapshot)
    for snapshot in snapshots:
        point = next((node for node in ancestors(snapshot.points[-1].parent) if node in pool.at), None)
        assert snapshot.before is (pool.at[point] if point is not None else None)
        assert snapshot.since == (point.depth if point is not None else 0) < snapshot.node.depth
        assert snapshot.num_behind == sum(one.before is snapshot for one in snapshots)


@given(st.integers(0, 1 << 20))
def test_snapshots_know_their_neighbours(seed: int) -> None:
    rng = random.Random(seed)  # nosec B311 # no secret
    groups = rng.choice(((STATES,), (WindowShape(9, 1),), (STATES, WindowShape(9, 1))))
    scheduler = create(rng.choice((120, 200)), 1, groups, eviction=rng.choice(("lru", "cost")), host_pages=100)
    executor = executor_for(scheduler)
    texts = [[*range(40)]]
    for number in range(8):
        text = rng.choice(texts)
        text = text[: rng.randint(1, len(text))] + [100 * (number + 1) + index for index in range(rng.randint(1, 20))]
        texts.append(text)
        scheduler.add(create_request(prompt=text, max_tokens=rng.randint(1, 6)))
        run(scheduler, executor)
        for group in scheduler.kv.windows:
            check_neighbours(group)
            if group.below is not None:
                check_neighbours(group.below)
    check_arena(scheduler)
