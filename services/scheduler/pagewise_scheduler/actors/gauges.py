"""Keeps the gauges of queues and memory fresh: sampled, because they change in every step."""

import asyncio
import logging
import traceback

from pagewise_shared.logs import BoundedLog
from pagewise_shared.protocol import HOST

from pagewise_scheduler.actors.router import Router
from pagewise_scheduler.collectors import ExecutorState
from pagewise_scheduler.metrics import Metrics

log = logging.getLogger(__name__)

_SECONDS = 1.0


async def keep_gauges_fresh(router: Router, metrics: Metrics) -> None:
    """Refresh them every second, until cancelled. Requests are served whether that works or not."""
    complaints = BoundedLog(log)
    while True:
        try:
            refresh_gauges(router, metrics)
            router.observe_backlog()
        except Exception:
            metrics.refresh_errors.inc()
            complaints.warning("gauges could not be brought up to date: %s", traceback.format_exc())
        await asyncio.sleep(_SECONDS)


def refresh_gauges(router: Router, metrics: Metrics) -> None:
    """Show what is the case now."""
    engines = router.engines
    schedulers = [engine.scheduler for engine in engines]
    metrics.num_requests_running.set(sum(scheduler.num_running for scheduler in schedulers))
    metrics.num_requests_waiting.set(router.waiting.sequences)
    metrics.num_prompt_tokens_waiting.set(router.waiting.tokens)
    pools = [scheduler.kv.pool for scheduler in schedulers]
    blocks = sum(pool.num_blocks for pool in pools)
    metrics.kv_cache_usage_perc.set(sum(pool.num_in_use for pool in pools) / blocks if blocks else 0.0)
    for state in ("free", "cached", "in_use"):
        metrics.kv_blocks("device", state).set(sum(getattr(pool, f"num_{state}") for pool in pools))
    hosts = [host for scheduler in schedulers if (host := scheduler.kv.cache_tier(HOST)) is not None]
    metrics.kv_blocks("host", "cached").set(sum(host.num_used for host in hosts))
    metrics.kv_blocks("host", "free").set(sum(host.num_free for host in hosts))
    metrics.executors.show(
        (
            engine.executor_id,
            ExecutorState(
                scheduler.num_running, scheduler.num_waiting, pool.num_free, pool.num_cached, pool.num_in_use
            ),
        )
        for engine, scheduler, pool in zip(engines, schedulers, pools, strict=True)
    )
