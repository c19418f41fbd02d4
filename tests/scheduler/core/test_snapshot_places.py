"""Where snapshots of states are taken."""

from pagewise_scheduler.core.tiers.arena import WindowShape

from tests.scheduler.core.arenas import create
from tests.scheduler.core.builders import create_request
from tests.scheduler.core.driving import executor_for, run

STATES = WindowShape(2, 7, state=True)


def test_a_prompt_keeps_states_where_the_last_ones_were_left() -> None:
    """Each prompt has all but the last 32 to 35 tokens of the one before, as if messages had been cut."""
    scheduler = create(4000, 1, (STATES,), budget=512, eviction="cost")
    executor = executor_for(scheduler)
    text, missed, shared = [*range(400)], list[int](), 0
    for turn in range(12):
        request = create_request(prompt=text, max_tokens=2)
        scheduler.add(request)
        run(scheduler, executor)
        if turn:
            missed.append(shared // 4 * 4 - request.num_cached_tokens)
        shared = len(text) - 32 - turn % 4
        text = text[:shared] + [1000 * (turn + 1) + index for index in range(100)]
    assert missed[0] >= 80, "at first nothing is known"
    assert max(missed[-4:]) <= 8
