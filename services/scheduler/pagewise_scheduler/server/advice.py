"""Gives a client's advice to the executors that have the KV, and adds up what came of it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import inf
from time import monotonic as clock

from pagewise_shared.protocol import Advise, Advised

from pagewise_scheduler.core.features.advice import Outcome
from pagewise_scheduler.server.executor_handle import ExecutorHandle

_MOST_NAMES, _MOST_CHARACTERS = 128, 1024


def advise(
    advice: Advise,
    executors: Sequence[ExecutorHandle],
    guard: Callable[[ExecutorHandle], AbstractContextManager[None]],
) -> Advised:
    """Follow advice at all executors that have some of the KV. ``guard``: as the router has it.

    It is accepted if one of them accepts it; clipped if none does, and one follows a part.
    """
    if not (advice.session or advice.request_id or len(advice.tokens) >= 4) or len(advice.tokens) % 4:
        return Advised(advice.number, "refused", "it names no session, request or prompt")
    names = (advice.session, advice.request_id, advice.parent, *advice.tools)
    if len(names) > _MOST_NAMES or max(map(len, names)) > _MOST_CHARACTERS:
        return Advised(advice.number, "refused", f"over {_MOST_NAMES} names, or {_MOST_CHARACTERS} characters of one")
    if not -1.0 <= advice.seconds < inf:
        return Advised(advice.number, "refused", f"it is for {advice.seconds} s")
    outcomes: list[Outcome] = []
    size = 1
    if advice.kind == "willneed" and executors:  # the session continues at one of them
        executors = [max(executors, key=lambda one: one.scheduler.features.advice.knows(advice))]
    for executor in executors:
        with guard(executor):
            scheduler = executor.scheduler
            size = scheduler.kv.block_size
            outcomes.append(scheduler.features.advice.advise(advice, clock()))
            executor.touch()
    found = [one for one in outcomes if one.found] or outcomes
    if not found:
        return Advised(advice.number, "refused", "there is no executor")
    rank = ("accepted", "clipped", "refused")
    best = min(found, key=lambda one: rank.index(one.outcome))
    blocks = sum(one.blocks for one in found)
    return Advised(advice.number, best.outcome, best.reason, blocks, blocks * size, best.seconds)
