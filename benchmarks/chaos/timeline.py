"""The causes of a pause, second by second: missing processes, and the number of executors that could serve."""

import asyncio
import contextlib
import json
import urllib.error
import urllib.request
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from time import monotonic

from benchmarks.chaos.disturbances import Disturbance
from benchmarks.processes import Cluster

_EVERY = 0.2
_GRAIN = 0.1
_PATIENCE = 1.0


@dataclass
class Timeline:
    """How many executors took work, sampled several times a second.

    ``freeze``: seconds that a process is frozen or cut off. ``timeout``: seconds after which a silent one is given up
    if its heartbeats were regular.
    """

    freeze: float
    timeout: float
    _times: list[float] = field(default_factory=list)
    _ready: list[int | None] = field(default_factory=list)

    async def watch(self, cluster: Cluster) -> None:
        """Sample until cancelled."""
        while True:
            ready = await asyncio.to_thread(_executors_ready, cluster)
            self._times.append(monotonic())
            self._ready.append(ready)
            await asyncio.sleep(_EVERY)

    def explain(
        self, begin: float, end: float, gateway: str, request_id: str, events: list[Disturbance]
    ) -> dict[str, float]:
        """The causes of the seconds from ``begin`` to ``end``, for a stream that came through ``gateway``."""
        found: Counter[str] = Counter()
        steps = max(1, round((end - begin) / _GRAIN))
        for step in range(steps):
            moment = begin + (step + 0.5) * (end - begin) / steps
            found[self._state(moment, gateway, request_id, events)] += 1
        return {state: round(count / steps * (end - begin), 1) for state, count in found.most_common()}

    def _state(self, moment: float, gateway: str, request_id: str, events: list[Disturbance]) -> str:
        frozen = {
            one.victim for one in events if one.kind.startswith("hang ") and self._lasts(one, moment, self.freeze)
        }
        if gateway in frozen:
            return "its gateway is frozen"
        if "scheduler" in frozen:
            return "the scheduler is frozen"
        if any(one.kind == "kill scheduler" and one.overlaps(moment, moment) for one in events):
            return "the scheduler is started again"
        ready = self._ready_at(moment)
        if ready is None:
            return "no answer of the scheduler"
        if not ready:
            return "no executor is ready"
        silent = [one for one in events if one.kind in ("hang", "cut off") and request_id in one.request_ids]
        if any(self._lasts(one, moment, min(self.freeze, self.timeout + 0.5)) for one in silent):
            return "its executor is silent and has not been given up"
        return f"{ready} executors compute or wait for room"

    @staticmethod
    def _lasts(event: Disturbance, moment: float, seconds: float) -> bool:
        return event.time <= moment < event.time + seconds

    def _ready_at(self, moment: float) -> int | None:
        index = bisect_right(self._times, moment)
        return self._ready[min(index, len(self._ready) - 1)] if self._ready else None


def _executors_ready(cluster: Cluster) -> int | None:
    """Executors that take work; None: no scheduler answers."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        try:
            with urllib.request.urlopen(f"{cluster.able()}/health", timeout=_PATIENCE) as answer:
                told = json.load(answer)
        except urllib.error.HTTPError as error:  # 503, with the reason
            told = json.load(error)
        return int(told["executors"]) if told["scheduler"] else None
    return None
