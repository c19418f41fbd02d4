"""Roles of snapshots of states, and what is evicted by them."""

from itertools import count

import pytest
from pagewise_scheduler.core.memory.eviction import NUM_ENDINGS, TOOL_CALL
from pagewise_scheduler.core.memory.roles import (
    ANSWER,
    FIRST_KNOWN,
    JUNCTION,
    NUM_CLASSES,
    PROMPT,
    new_role,
    role_after,
    role_at_end,
)
from pagewise_scheduler.core.memory.use_history import UseHistory
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.arena import WindowShape

from tests.scheduler.core.arenas import check_arena, create
from tests.scheduler.core.builders import create_request
from tests.scheduler.core.checking_executor import CheckingExecutor
from tests.scheduler.core.driving import executor_for, run

STATES = WindowShape(2, 7, state=True)


def serve(scheduler: Scheduler, executor: CheckingExecutor, prompt: list[int]) -> int:
    """Serve a request alone. Returns how many of its tokens were cached."""
    request = create_request(prompt=prompt, max_tokens=3)
    scheduler.add(request)
    run(scheduler, executor)
    check_arena(scheduler)
    return sum(request.cached_tokens.values())


@pytest.mark.parametrize("place", [PROMPT, ANSWER, JUNCTION])
def test_a_role_says_what_has_become_of_a_snapshot(place: int) -> None:
    new = [role_at_end(new_role(place), ending) for ending in range(NUM_ENDINGS)]
    passed, begun = ({role_after(one, begun=begun) for one in new} for begun in (False, True))
    assert len({*new}) == NUM_ENDINGS
    assert max(new) < FIRST_KNOWN, "what becomes of them is not known"
    (over,), (once,) = passed, begun
    often = role_after(once, begun=True)
    assert over != once != often != over
    assert role_after(over, begun=True) == once
    assert {role_after(often, begun=begun) for begun in (False, True)} == {often}
    assert all(role_after(one, begun=False) == one == role_at_end(one, TOOL_CALL) for one in (over, once, often))
    assert min(over, once, often) >= FIRST_KNOWN and max(over, once, often) < NUM_CLASSES  # noqa: PT018


def test_roles_that_return_are_worth_more_than_others() -> None:
    history, used, unused = UseHistory(), new_role(PROMPT), new_role(ANSWER)
    for number in range(100):
        for role in (used, unused):
            history.lives(1000 * role + number, role, returned=False)
        history.now += 100
        assert history.role(1000 * used + number) == used
        history.lives(1000 * used + number, role_after(used, begun=True), returned=True)
    history._learn()
    assert history.density(used, history.now) > 10 * history.density(unused, history.now)


def test_passed_snapshots_are_expected_to_be_used_more_rarely_until_more_is_known() -> None:
    history = UseHistory()
    for new in (role_at_end(new_role(place), TOOL_CALL) for place in (PROMPT, ANSWER, JUNCTION)):
        for passed in (role_after(new, begun=False), role_after(new, begun=True)):
            assert history.density(passed, history.now) < 0.5 * history.density(new, history.now)


def test_the_snapshot_near_the_end_of_a_prompt_outlives_what_is_learned_of_answers() -> None:
    """It inherits from the snapshot at the answer's end, which is lost first. When it becomes known that no prompt has
    the tokens of an answer, it is still worth what snapshots near the ends of prompts are."""
    scheduler = create(320, 1, (STATES,), eviction="cost")
    executor = executor_for(scheduler)
    (group,) = scheduler.kv.windows
    serve(scheduler, executor, [*range(120)])
    prompt, answer = sorted(group.at.values(), key=lambda one: one.node.depth)
    own, last_used = prompt.kind, prompt.last_used
    scheduler.kv.pool.policy._history.now += 1  # the answer's is the one that was used last
    answer.last_used += 1
    value = group._queue.value(prompt)
    group._queue.bequeath(answer)
    assert (prompt.kind, prompt.last_used) == (own, last_used)
    assert prompt.inherited is not None
    assert (prompt.inherited.kind, prompt.inherited.last_used) == (answer.kind, answer.last_used)
    assert group._queue.value(prompt) >= value
    serve(scheduler, executor, [*range(110), 7, 7])
    assert prompt.inherited is None, "a sequence has begun with it"


def test_what_the_next_turn_began_with_goes_before_what_it_left() -> None:
    """Conversations take turns; each has four. At the end, all of them hit what the turn before has left."""
    scheduler = create(640, 1, (STATES,), eviction="cost")
    executor, names = executor_for(scheduler), count(1)
    lost = 0
    for wave in range(6):
        texts = [[next(names)] * 120 for _ in range(6)]
        for turn in range(4):
            for text in texts:
                hits = serve(scheduler, executor, text)
                lost += wave > 3 and turn > 0 and hits < len(text) - 60
                text += [next(names)] * 40
    assert scheduler.kv.pool.counters.snapshots_unused > 10, "memory was short"
    assert not lost


def test_the_host_first_gives_up_what_the_device_has_too() -> None:
    scheduler = create(110, 1, (STATES,), host_pages=900, recovery="swap", eviction="cost")
    executor = executor_for(scheduler)
    (group,) = scheduler.kv.windows
    prompts = [[1000 * number + index for index in range(101)] for number in range(1, 6)]
    for prompt in (*prompts, [*prompts[0], 7, 7]):
        serve(scheduler, executor, prompt)
    host = group.below
    assert host is not None
    both = group.at.keys() & host.at.keys()
    assert both, "what was loaded stays in the host"
    assert host.next_value() == 0.0
