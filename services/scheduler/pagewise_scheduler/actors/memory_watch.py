"""Turns what an executor's scheduler has counted and decided into metrics and log lines."""

import logging
from collections import Counter
from math import isnan

from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.recovery_plan import Recovery
from pagewise_scheduler.metrics import MEMORY_EVENTS, Metrics

log = logging.getLogger(__name__)


class MemoryWatch:
    """Looks at one scheduler every so often, and reports what is new.

    ``num_generated``: tokens generated, which its engine counts. ``cached_tokens``: those found in caches, by where
    they lay (``SOURCES``).
    """

    def __init__(self, executor_id: str, scheduler: Scheduler, metrics: Metrics, bytes_per_block: int) -> None:
        self._executor_id = executor_id
        self._scheduler = scheduler
        self._metrics = metrics
        self._bytes_per_block = bytes_per_block
        # In the order of ``_totals``.
        self._counters = (
            metrics.num_preemptions,
            metrics.prefix_cache_queries,
            metrics.prefix_cache_hits,
            metrics.generation_tokens,
        )
        self._of_features = Counter[str]()
        self._seen = (0,) * len(self._counters)
        self.num_generated, self.cached_tokens = 0, Counter[str]()
        self._fetch_seconds = 0.0
        self._events = [(name, metrics.block_events(name)) for name in MEMORY_EVENTS]
        self._counted = dict.fromkeys(MEMORY_EVENTS, 0)

    def report(self) -> None:
        """Bring the metrics up to date."""
        scheduler, metrics = self._scheduler, self._metrics
        totals = self._totals()
        if totals != self._seen:
            for counter, total, seen in zip(self._counters, totals, self._seen, strict=True):
                if total != seen:
                    counter.inc(total - seen)
            self._seen = totals
        if (of_features := scheduler.features.counts()) != self._of_features:
            for name, total in of_features.items():
                metrics.of_features[name].inc(total - self._of_features[name])
            self._of_features = Counter(of_features)
        counts, counted = scheduler.kv.pool.counters.by_name(), self._counted
        for name, metric in self._events:
            if (value := counts[name]) != counted[name]:
                if name == "spoiled":
                    log.warning(
                        "%s: %d blocks came back spoiled from tiers below the device, they are computed again",
                        self._executor_id,
                        value - counted[name],
                    )
                if name == "fetched":
                    metrics.block_transfer_bytes.inc((value - counted[name]) * self._bytes_per_block)
                metric.inc(value - counted[name])
                counted[name] = value
        if (seconds := scheduler.recoveries.fetch_seconds) != self._fetch_seconds:
            metrics.block_transfer_seconds.inc(seconds - self._fetch_seconds)
            self._fetch_seconds = seconds
        reports = scheduler.recoveries.reports
        while reports:
            self._report_recovery(reports.popleft())

    def _totals(self) -> tuple[int, ...]:
        """What was counted since the scheduler began."""
        return self._scheduler.num_preemptions, *self._scheduler.prefix_hits, self.num_generated

    def _report_recovery(self, recovery: Recovery) -> None:
        metrics, method, origin = self._metrics, recovery.method, recovery.origin
        metrics.recoveries(method, origin).inc()
        metrics.cached_tokens("device").inc(recovery.device_tokens)
        self.cached_tokens["device"] += recovery.device_tokens
        for source, tokens in recovery.loaded.items():
            metrics.cached_tokens(source).inc(tokens)
            self.cached_tokens[source] += tokens
        estimate = recovery.estimate
        if estimate is not None:
            log.debug(
                "%s: request %s: %s after %d tokens on the device; predicted load %.4f s, recompute %.4f s, "
                "both %.4f s; took %.4f s, %d tokens loaded from the %s",
                self._executor_id,
                recovery.sequence.request.request_id,
                method,
                recovery.device_tokens,
                estimate.load,
                estimate.recompute,
                estimate.both,
                recovery.ended - recovery.began,
                recovery.loaded_tokens,
                origin,
            )
        if estimate is not None and not isnan(recovery.ended):
            metrics.recovery_seconds(method, origin, recovery.predicted, recovery.ended - recovery.began)
