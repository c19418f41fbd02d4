"""Counts the tokens and the memory events of one executor for metrics, consoles and the log.

The core emits each recovery when it ends (``Recoveries.emit``). Events of blocks (evicted, demoted, copied) are only
counted there, because a step may have hundreds of them; the counts are read once a second. The facts of one request
(queued, started, preempted for another one, finished) go straight to its ``Timeline`` and the histories of its
sequences, from which reports, explanations and traces are made: an emitter between them would serve one subscriber.
"""

import logging
from collections import Counter, deque
from math import isnan
from time import monotonic as clock
from typing import NamedTuple

from pagewise_shared.protocol import SOURCES, Hello

from pagewise_scheduler.core.memory.tick_times import TickTimes
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.recovery_plan import Recovery
from pagewise_scheduler.metrics import MEMORY_EVENTS, Metrics

log = logging.getLogger(__name__)

_RATED_EVENTS = ("evicted", "demoted", "dropped", "stored", "loaded", "fetched", "copied", "recalled", "written")
"""The events of blocks whose rates consoles show."""

_RATE_SECONDS, _HIT_SECONDS = 2.0, 60.0
_BETWEEN_SECONDS = 0.25
_STALE_SECONDS = 30.0


class _Sample(NamedTuple):
    """The counts of an executor at a time. ``hits``: cached tokens by tier. ``spared``: see ``ExecutorStats``."""

    time: float
    generated: int
    prompt: int
    events: dict[str, int]
    hits: dict[str, int]
    spared: dict[str, int]


class Rates(NamedTuple):
    """Per second, over the last two seconds; tokens are None until two samples are there. ``prompt_of_last_minute``,
    ``hits``: prompt tokens of the last minute, and how many of them were found in a cache, by tier. ``spared``: of the
    last minute too."""

    tokens: float | None
    prompt_tokens: float | None
    events: dict[str, float]
    prompt_of_last_minute: int
    hits: dict[str, int]
    spared: dict[str, int]


class ExecutorStats:
    """The counts of one executor.

    ``num_generated``: tokens generated, which its executor handle counts. ``cached_tokens``: found in caches, by tier
    (``SOURCES``). ``spared``: prompt tokens, by the name of the API key, that one GiB more would have kept. ``ticks``:
    times of the eviction policy's ticks.
    """

    def __init__(self, hello: Hello, metrics: Metrics) -> None:
        self._executor_id, self._bytes_per_block = hello.executor_id, hello.bytes_per_block
        self._metrics = metrics
        self.num_generated, self.cached_tokens, self.spared = 0, Counter[str](), Counter[str]()
        self._counters = {name: metrics.block_events(name) for name in MEMORY_EVENTS} | metrics.of_features
        self._counters |= {
            "preemptions": metrics.num_preemptions,
            "prefix queries": metrics.prefix_cache_queries,
            "prefix hits": metrics.prefix_cache_hits,
            "generated": metrics.generation_tokens,
            "fetch seconds": metrics.block_transfer_seconds,
        }
        self._seen: dict[str, float] = {}
        self.ticks = TickTimes()
        self._samples: deque[_Sample] = deque()  # of the last minute, while consoles ask

    def record(self, scheduler: Scheduler) -> None:
        """Add to the metrics by how much the counts of ``scheduler`` have risen since the last call."""
        self.ticks.note(scheduler.kv.pool.policy.now, clock())
        totals = self._totals(scheduler)
        more = {name: total - self._seen.get(name, 0) for name, total in totals.items()}
        self._seen = totals
        for name, number in more.items():
            if number:
                self._counters[name].inc(number)
        if spared := scheduler.kv.eviction_history.spared:
            for key, tokens in spared.items():
                self._metrics.key_spared(key).inc(tokens)
            self.spared.update(spared)
            spared.clear()
        if number := more["corrupt"]:
            text = "%s: %d blocks came back corrupt from tiers below the device, they are computed again"
            log.warning(text, self._executor_id, number)
        if number := more["fetched"]:
            self._metrics.block_transfer_bytes.inc(number * self._bytes_per_block)

    def _totals(self, scheduler: Scheduler) -> dict[str, float]:
        """All counts since the scheduler began, by the names of ``_counters``."""
        queries, hits = scheduler.prefix_hits
        return scheduler.kv.pool.counters.by_name() | scheduler.features.counts() | {
            "preemptions": scheduler.num_preemptions,
            "prefix queries": queries,
            "prefix hits": hits,
            "generated": self.num_generated,
            "fetch seconds": scheduler.recoveries.fetch_seconds,
        }  # fmt: skip

    def add_recovery(self, recovery: Recovery) -> None:
        """Count a recovery that has ended, and log its predicted and actual time."""
        metrics, method, origin = self._metrics, recovery.method, recovery.origin
        metrics.recoveries(method, origin).inc()
        for source, tokens in {"device": recovery.device_tokens, **recovery.loaded}.items():
            metrics.cached_tokens(source).inc(tokens)
            self.cached_tokens[source] += tokens
        estimate = recovery.estimate
        if estimate is None:
            return
        log.debug(
            "%s: request %s: %s after %d tokens on the device; predicted load %.4f s, recompute %.4f s, both %.4f s; "
            "took %.4f s, %d tokens loaded from the %s",
            self._executor_id,
            recovery.request.request_id,
            method,
            recovery.device_tokens,
            estimate.load,
            estimate.recompute,
            estimate.both,
            recovery.ended - recovery.began,
            recovery.loaded_tokens,
            origin,
        )
        if not isnan(recovery.ended):
            metrics.recovery_seconds(method, origin, recovery.predicted, recovery.ended - recovery.began)

    def rates(self, scheduler: Scheduler, now: float) -> Rates:
        """Return the rates at ``now`` (seconds), from the samples that earlier calls took."""
        counters, samples = scheduler.kv.pool.counters, self._samples
        latest = _Sample(
            now,
            self.num_generated,
            scheduler.prefix_hits[0],
            {name: getattr(counters, name) for name in _RATED_EVENTS},
            {source: self.cached_tokens[source] for source in SOURCES},
            dict(self.spared),
        )
        if samples and now - samples[-1].time > _STALE_SECONDS:
            samples.clear()
        if not samples or now - samples[-1].time >= _BETWEEN_SECONDS:
            samples.append(latest)
        while now - samples[0].time > _HIT_SECONDS:
            samples.popleft()
        earlier = [one for one in samples if now - one.time >= _BETWEEN_SECONDS]
        before = next((one for one in earlier if now - one.time <= _RATE_SECONDS), earlier[-1] if earlier else latest)
        seconds = max(now - before.time, _BETWEEN_SECONDS)
        return Rates(
            round((latest.generated - before.generated) / seconds, 1) if earlier else None,
            round((latest.prompt - before.prompt) / seconds, 1) if earlier else None,
            {name: round((latest.events[name] - before.events[name]) / seconds, 1) for name in _RATED_EVENTS},
            latest.prompt - samples[0].prompt,
            {source: latest.hits[source] - samples[0].hits[source] for source in SOURCES},
            {key: more for key, tokens in latest.spared.items() if (more := tokens - samples[0].spared.get(key, 0))},
        )
