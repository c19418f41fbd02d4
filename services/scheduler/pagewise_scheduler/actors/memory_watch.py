"""Turns what an executor's scheduler has counted and decided into metrics and log lines."""

import logging
from math import isnan

from pagewise_scheduler.core.recovery.recovery_plan import Recovery
from pagewise_scheduler.core.scheduling.adapter_scheduler import AdapterScheduler
from pagewise_scheduler.metrics import MEMORY_EVENTS, Metrics

log = logging.getLogger(__name__)


class MemoryWatch:
    """Looks at one scheduler every so often, and reports what is new."""

    def __init__(self, executor_id: str, scheduler: AdapterScheduler, metrics: Metrics, bytes_per_block: int) -> None:
        self._executor_id = executor_id
        self._scheduler = scheduler
        self._metrics = metrics
        self._bytes_per_block = bytes_per_block
        self._seen = (0, 0, 0)
        self._seen_of_segments = (0, 0, 0)
        self._seen_of_adapters = (0, 0, 0)
        self._seen_of_drafts = (0, 0, 0)
        self._fetch_seconds = 0.0
        self._events = [(name, metrics.block_events(name)) for name in MEMORY_EVENTS]
        self._counted = dict.fromkeys(MEMORY_EVENTS, 0)

    def report(self) -> None:
        """Bring the metrics up to date."""
        scheduler, metrics = self._scheduler, self._metrics
        seen = (scheduler.num_preemptions, *scheduler.prefix_hits)
        if seen != self._seen:
            preemptions, queries, hits = self._seen
            metrics.num_preemptions.inc(seen[0] - preemptions)
            metrics.prefix_cache_queries.inc(seen[1] - queries)
            metrics.prefix_cache_hits.inc(seen[2] - hits)
            self._seen = seen
        adapters = scheduler.adapters
        of_adapters = (adapters.num_loads, adapters.num_load_errors, adapters.num_evictions)
        if of_adapters != self._seen_of_adapters:
            loads, errors, evictions = map(int.__sub__, of_adapters, self._seen_of_adapters)
            metrics.lora_loads.inc(loads)
            metrics.lora_load_errors.inc(errors)
            metrics.lora_evictions.inc(evictions)
            self._seen_of_adapters = of_adapters
        drafts = scheduler.speculation
        of_drafts = (drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_tokens)
        if of_drafts != self._seen_of_drafts:
            drafted, tokens, accepted = map(int.__sub__, of_drafts, self._seen_of_drafts)
            metrics.spec_decode_num_drafts.inc(drafted)
            metrics.spec_decode_num_draft_tokens.inc(tokens)
            metrics.spec_decode_num_accepted_tokens.inc(accepted)
            self._seen_of_drafts = of_drafts
        segments = scheduler.segments
        of_segments = (segments.num_wanted, segments.num_found, segments.num_moved)
        if of_segments != self._seen_of_segments:
            wanted, found, moved = map(int.__sub__, of_segments, self._seen_of_segments)
            metrics.segment_tokens("found").inc(found)
            metrics.segment_tokens("computed").inc(wanted - found)
            metrics.segment_moved_tokens.inc(moved)
            self._seen_of_segments = of_segments
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

    def _report_recovery(self, recovery: Recovery) -> None:
        metrics, method, origin = self._metrics, recovery.method, recovery.origin
        metrics.recoveries(method, origin).inc()
        metrics.cached_tokens("device").inc(recovery.device_tokens)
        if recovery.loaded_tokens:
            metrics.cached_tokens(origin).inc(recovery.loaded_tokens)
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
