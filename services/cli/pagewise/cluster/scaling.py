"""The number of executors: a policy over the queue, with hysteresis. Pure: no Ray, no clock.

It has the rules of the Kubernetes autoscaler in ``deploy/autoscaling``: more executors as soon as a queue persists,
fewer only after a long quiet time, one at a time, because a new executor has to load its model.
"""

import math
from typing import NamedTuple

_STEADY = 0.8
"""Share of the remaining executors' rows that may be in use when one stops. The rest keeps it from coming back soon."""


class Load(NamedTuple):
    """The scheduler's load: sequences that wait, sequences that run, and executors that take work."""

    waiting: int
    running: int
    ready: int


class Policy(NamedTuple):
    """Bounds and thresholds.

    Fields:
        minimum, maximum: number of executors.
        queue: waiting sequences per executor above which one more is wanted.
        rows: sequences that an executor runs at the same time.
        up_after, down_after: seconds for which the queue has to stay above, or below, before the number changes.
    """

    minimum: int
    maximum: int
    queue: int
    rows: int
    up_after: float
    down_after: float


class Decision(NamedTuple):
    """A new number of executors, and the reason."""

    executors: int
    reason: str


class Scaler:
    """Decides the number of executors from loads at increasing times."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._above = self._below = math.inf  # since when the queue has been so; infinity: it is not

    def decide(self, now: float, load: Load, executors: int) -> Decision | None:
        """Return a number of executors that replaces ``executors``, the number wanted now; None: it stays.

        Executors that have been started and have not joined keep more from being added. They may never join, if the
        cluster has no room for them; so an unneeded one is still removed. The load is unknown while fewer than the
        minimum serve.
        """
        policy = self._policy
        if load.ready < min(executors, policy.minimum):
            self._above = self._below = math.inf
            return None
        above = load.ready >= executors and load.waiting > policy.queue * executors
        rows_after = policy.rows * min(load.ready, executors - 1)
        below = not load.waiting and executors > policy.minimum and load.running <= _STEADY * rows_after
        # With one executor wanted, only a load of zero fits into the executors that remain.
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
