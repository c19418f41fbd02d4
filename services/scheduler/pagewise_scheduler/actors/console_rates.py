"""How fast things happen, from what was counted when consoles asked before."""

from collections import Counter, deque
from typing import NamedTuple

from pagewise_shared.protocol import SOURCES

from pagewise_scheduler.actors.engine import Engine

EVENTS = ("evicted", "demoted", "dropped", "stored", "loaded", "fetched", "copied", "recalled", "written")
"""The events of blocks whose rates are shown."""

_RATE_SECONDS, _HIT_SECONDS = 2.0, 60.0
_BETWEEN_SECONDS = 0.25
_FORGOTTEN_SECONDS = 30.0


class _Sample(NamedTuple):
    """What an engine had counted at a time. ``hits``: cached tokens by where they lay."""

    time: float
    generated: int
    prompt: int
    events: dict[str, int]
    hits: dict[str, int]


class Rates(NamedTuple):
    """Per second, over the last two seconds. ``prompt_of_last_minute``, ``hits``: prompt tokens of the last minute, and
    those of them that were found in a cache, by where they lay."""

    tokens: float
    prompt_tokens: float
    events: dict[str, float]
    prompt_of_last_minute: int
    hits: dict[str, int]


class EngineRates:
    """Keeps what one engine had counted during the last minute, as far as somebody asked."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()

    def of(self, engine: Engine, now: float) -> Rates:
        """Its rates at ``now``, in seconds of ``clock``; all of them 0 the first time."""
        latest = _sample(engine, now)
        samples = self._samples
        if samples and now - samples[-1].time > _FORGOTTEN_SECONDS:
            samples.clear()
        if not samples or now - samples[-1].time >= _BETWEEN_SECONDS:
            samples.append(latest)
        while now - samples[0].time > _HIT_SECONDS:
            samples.popleft()
        oldest = samples[0]
        recent = next((one for one in samples if now - one.time <= _RATE_SECONDS), samples[-1])
        seconds = max(now - recent.time, _BETWEEN_SECONDS)
        return Rates(
            round((latest.generated - recent.generated) / seconds, 1),
            round((latest.prompt - recent.prompt) / seconds, 1),
            {name: round((latest.events[name] - recent.events[name]) / seconds, 1) for name in EVENTS},
            latest.prompt - oldest.prompt,
            {source: latest.hits[source] - oldest.hits[source] for source in SOURCES},
        )


def _sample(engine: Engine, now: float) -> _Sample:
    counters, watch = engine.scheduler.kv.pool.counters, engine.watch
    cached: Counter[str] = watch.cached_tokens
    return _Sample(
        now,
        watch.num_generated,
        engine.scheduler.prefix_hits[0],
        {name: getattr(counters, name) for name in EVENTS},
        {source: cached[source] for source in SOURCES},
    )
