"""Measures whether the load generator itself was the bottleneck."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

from pagewise.bench.metrics import Outcome, percentile

_INTERVAL = 0.01
MOST_CPU = 0.85
"""Share of a core: one event loop cannot use more than one, and is late before it has used all of it."""

MOST_LAG = 0.02
"""Seconds, 99th percentile: an event that waits so long for the event loop would be read as a gap between tokens."""


class Health:
    """Measures how late the event loop is and what the process computes, while its context lasts."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._task: asyncio.Task[None] | None = None
        self._began = self._cpu_began = 0.0

    async def __aenter__(self) -> "Health":
        self._began, self._cpu_began = time.perf_counter(), time.process_time()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._seconds, self._cpu = time.perf_counter() - self._began, time.process_time() - self._cpu_began
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _watch(self) -> None:
        while True:
            due = time.perf_counter() + _INTERVAL
            await asyncio.sleep(_INTERVAL)
            self._lags.append(max(0.0, time.perf_counter() - due))

    def report(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """Return what was measured: share of a core, lag of the event loop, and how late requests were sent (ms)."""
        lags = sorted(self._lags) or [0.0]
        late = sorted(max(0.0, one.sent - one.due) for one in outcomes) or [0.0]
        cpu, lag = self._cpu / max(1e-9, self._seconds), percentile(lags, 99)
        reasons = []
        if cpu > MOST_CPU:
            reasons.append(f"it used {cpu:.0%} of a core, and has one event loop")
        if lag > MOST_LAG:
            reasons.append(f"its event loop was late by {1e3 * lag:.0f} ms or more in 1% of the time")
        return {
            "cpu_share": round(cpu, 4),
            "loop_lag_p99_ms": round(1e3 * lag, 2),
            "loop_lag_max_ms": round(1e3 * lags[-1], 2),
            "sent_late_p99_ms": round(1e3 * percentile(late, 99), 2),
            "bottleneck": bool(reasons),
            "reasons": reasons,
        }
