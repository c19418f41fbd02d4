"""Turns the counts and the recoveries of an executor's scheduler into metrics and log lines."""

import logging
from collections import Counter
from math import isnan

from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.recovery_plan import Recovery
from pagewise_scheduler.metrics import MEMORY_EVENTS, Metrics

log = logging.getLogger(__name__)


class MemoryWatch:
    """Reports the changes of one scheduler when it is asked to.

    ``num_generated``: tokens generated, which its executor handle counts. ``cached_tokens``: found in caches, by tier
    (``SOURCES``).
    """

    def __init__(self, executor_id: str, scheduler: Scheduler, metrics: Metrics, bytes_per_block: int) -> None:
        self._executor_id = executor_id
        self._scheduler = scheduler
        self._metrics = metrics
        self._bytes_per_block = bytes_per_block
        self.num_generated, self.cached_tokens = 0, Counter[str]()
        self._counters = {name: metrics.block_events(name) for name in MEMORY_EVENTS} | metrics.of_features
        self._counters |= {
            "preemptions": metrics.num_preemptions,
            "prefix queries": metrics.prefix_cache_queries,
            "prefix hits": metrics.prefix_cache_hits,
            "generated": metrics.generation_tokens,
            "fetch seconds": metrics.block_transfer_seconds,
        }
        self._seen: dict[str, float] = {}

    def report(self) -> None:
        """Bring the metrics up to date."""
        totals = self._totals()
        more = {name: total - self._seen.get(name, 0) for name, total in totals.items()}
        self._seen = totals
        for name, number in more.items():
            if number:
                self._counters[name].inc(number)
        if number := more["corrupt"]:
            text = "%s: %d blocks came back corrupt from tiers below the device, they are computed again"
            log.warning(text, self._executor_id, number)
        if number := more["fetched"]:
            self._metrics.block_transfer_bytes.inc(number * self._bytes_per_block)
        reports = self._scheduler.recoveries.reports
        while reports:
            self._report_recovery(reports.popleft())

    def _totals(self) -> dict[str, float]:
        """All counts since the scheduler began, by the names of ``_counters``."""
        scheduler = self._scheduler
        queries, hits = scheduler.prefix_hits
        return scheduler.kv.pool.counters.by_name() | scheduler.features.counts() | {
            "preemptions": scheduler.num_preemptions,
            "prefix queries": queries,
            "prefix hits": hits,
            "generated": self.num_generated,
            "fetch seconds": scheduler.recoveries.fetch_seconds,
        }  # fmt: skip

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
