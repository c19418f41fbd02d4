"""When executors come and go: a policy over the queue, with hysteresis. Pure: no Ray, no clock.

It follows what Kubernetes' autoscaler is told in ``deploy/autoscaling``: more executors as soon as a queue stays, fewer
only after it has been quiet for long, one at a time, because a new executor has to load its model.
"""

import math
from typing import NamedTuple

_STEADY = 0.8
"""Of the rows of the executors that would remain, what may be in use when one goes. The rest keeps it from coming back
right away."""


class Load(NamedTuple):
    """What the scheduler reports: sequences that wait and run, and executors that take work."""

    waiting: int
    running: int
    ready: int


class Policy(NamedTuple):
    """Bounds, and when to act.

    Fields:
        minimum, maximum: of executors.
        queue: waiting sequences per executor above which one more is wanted.
        rows: sequences that an executor runs at the same time.
        up_after, down_after: seconds for which the queue has to stay above, or below, before anything happens.
    """

    minimum: int
    maximum: int
    queue: int
    rows: int
    up_after: float
    down_after: float


class Decision(NamedTuple):
    """A number of executors, and why it is that."""

    executors: int
    reason: str


class Scaler:
    """Decides how many executors there should be, from loads at increasing times."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._above = self._below = math.inf  # since when the queue has been so; infinity: it is not

    def decide(self, now: float, load: Load, executors: int) -> Decision | None:
        """Return another number of executors than the ``executors`` that are wanted now; None: it stays.

        While executors that were asked for have not joined, none are added: these would not be counted yet. But they
        may never join, where there is no room for them, so that one of them goes if it is not needed any more. Nothing
        is known of the load while fewer than the minimum serve.
        """
        policy = self._policy
        if load.ready < min(executors, policy.minimum):
            self._above = self._below = math.inf
            return None
        above = load.ready >= executors and load.waiting > policy.queue * executors
        rows_after = policy.rows * min(load.ready, executors - 1)
        below = not load.waiting and executors > policy.minimum and load.running <= _STEADY * rows_after
        # With one executor, "none at all" is the only load that fits into those that remain.
        self._above = min(self._above, now) if above else math.inf
        self._below = min(self._below, now) if below else math.inf
        if now - self._above >= policy.up_after and executors < policy.maximum:
            # As many as the queue asks for, at most twice as many as there are.
            asked = max(executors + 1, math.ceil(load.waiting / max(1, policy.queue)))
            target = min(asked, max(1, 2 * executors), policy.maximum)
            reason = f"{load.waiting} sequences have waited for {now - self._above:.0f} s or more"
        elif now - self._below >= policy.down_after:
            target = executors - 1
            reason = (
                f"nothing has waited for {now - self._below:.0f} s, and {load.running} running sequences fit into "
                f"{target} executors"
            )
        else:
            return None
        self._above = self._below = math.inf
        return Decision(target, reason)
