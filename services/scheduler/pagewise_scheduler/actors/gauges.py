"""Keeps the gauges of queues and memory fresh: sampled, because they change in every step."""

import logging
import traceback

from pagewise_shared.logs import BoundedLog
from pagewise_shared.protocol import tier_name
from pagewise_shared.service_process import num_tasks

from pagewise_scheduler.actors.router import Router
from pagewise_scheduler.collectors import ExecutorState
from pagewise_scheduler.metrics import LOWER_TIERS, Metrics

log = logging.getLogger(__name__)

_SECONDS = 1.0


class Gauges:
    """Refreshes the gauges. Requests are served whether that works or not."""

    def __init__(self, router: Router, metrics: Metrics) -> None:
        self._router = router
        self._metrics = metrics
        self._complaints = BoundedLog(log)
        self._refreshed = float("-inf")

    def refresh(self, now: float) -> None:
        """Show what is the case now, if a second has passed since the last time. ``now``: seconds."""
        if now - self._refreshed < _SECONDS:
            return
        self._refreshed = now
        try:
            refresh_gauges(self._router, self._metrics)
            self._router.observe_backlog(now)
        except Exception:
            self._metrics.refresh_errors.inc()
            self._complaints.warning("gauges could not be brought up to date: %s", traceback.format_exc())


def refresh_gauges(router: Router, metrics: Metrics) -> None:
    """Show what is the case now."""
    engines = router.engines
    schedulers = [engine.scheduler for engine in engines]
    metrics.num_requests_running.set(sum(scheduler.num_running for scheduler in schedulers))
    metrics.num_requests_waiting.set(router.waiting.sequences)
    metrics.num_prompt_tokens_waiting.set(router.waiting.tokens)
    metrics.num_requests_staying.set(router.placer.num_staying)
    pools = [scheduler.kv.pool for scheduler in schedulers]
    blocks = sum(pool.num_blocks for pool in pools)
    metrics.kv_cache_usage_perc.set(sum(pool.num_in_use for pool in pools) / blocks if blocks else 0.0)
    for state in ("free", "cached", "in_use"):
        metrics.kv_blocks("device", state).set(sum(getattr(pool, f"num_{state}") for pool in pools))
    lower = [tier for pool in pools for tier in pool.lower]
    for name in LOWER_TIERS:
        tiers = [tier for tier in lower if tier_name(tier.number) == name]
        metrics.kv_blocks(name, "cached").set(sum(tier.num_used for tier in tiers))
        metrics.kv_blocks(name, "free").set(sum(tier.num_free for tier in tiers))
    serving = [scheduler.features for scheduler in schedulers if scheduler.features.options.adapters.slots]
    metrics.adapters_resident.set(sum(one.adapters.num_resident for one in serving))
    metrics.scheduler_tasks.set(num_tasks())
    metrics.executors.show(
        (
            engine.executor_id,
            ExecutorState(
                running=scheduler.num_running,
                waiting=scheduler.num_waiting,
                free=pool.num_free,
                cached=pool.num_cached,
                in_use=pool.num_in_use,
                tasks=engine.num_tasks,
                fallback=int(engine.hello.fallback),
            ),
        )
        for engine, scheduler, pool in zip(engines, schedulers, pools, strict=True)
    )
