"""Keeps the gauges of queues and memory fresh: sampled, because they change in every step."""

import logging
import traceback
from collections import Counter
from collections.abc import Iterable

from pagewise_shared.logs import BoundedLog
from pagewise_shared.protocol import tier_name
from pagewise_shared.service_process import num_tasks

from pagewise_scheduler.core.features.advice import Advice
from pagewise_scheduler.core.group_report import group_pages
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager
from pagewise_scheduler.executor_gauges import ExecutorState
from pagewise_scheduler.metrics import KV_BLOCKS, KV_PAGES, Metrics
from pagewise_scheduler.server.executor_handle import ExecutorHandle
from pagewise_scheduler.server.router import Router

log = logging.getLogger(__name__)

_SECONDS = 1.0


class Gauges:
    """Refreshes the gauges. Requests are served even if that fails."""

    def __init__(self, router: Router, metrics: Metrics) -> None:
        self._router = router
        self._metrics = metrics
        self._complaints = BoundedLog(log)
        self._refreshed = float("-inf")

    def refresh(self, now: float) -> None:
        """Set all gauges, if a second has passed since the last time. ``now``: seconds."""
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
    """Show the present state of all executors."""
    states = [(executor.executor_id, _state(executor)) for executor in router.executors]
    metrics.executors.show(states)
    nothing = ExecutorState(*[0] * len(ExecutorState._fields))
    totals = ExecutorState(*map(sum, zip(nothing, *(state for _, state in states), strict=True)))
    if router.budgets is not None:
        metrics.key_memory.show(router.budgets.uses())
    metrics.num_requests_running.set(totals.running)
    metrics.num_requests_waiting.set(router.waiting.sequences)
    metrics.num_prompt_tokens_waiting.set(router.waiting.tokens)
    metrics.num_requests_staying.set(router.num_staying)
    metrics.kv_cache_usage_perc.set(totals.in_use / max(1, totals.free + totals.cached + totals.in_use))
    blocks = Counter({("device", state): getattr(totals, state) for state in ("free", "cached", "in_use")})
    for tier in (tier for executor in router.executors for tier in executor.scheduler.kv.pool.lower):
        size, used = tier.memory
        blocks[tier_name(tier.number), "cached"] += used
        blocks[tier_name(tier.number), "free"] += size - used
    for tier_and_state in KV_BLOCKS:
        metrics.kv_blocks(*tier_and_state).set(blocks[tier_and_state])
    pages = _pages(executor.scheduler.kv for executor in router.executors)
    for tier_kind_and_state in KV_PAGES:
        metrics.kv_pages(*tier_kind_and_state).set(pages[tier_kind_and_state])
    features = [executor.scheduler.features for executor in router.executors]
    metrics.adapters_resident.set(sum(one.adapters.num_resident for one in features if one.options.adapters.slots))
    pins = [feature.pins for one in features for feature in one.in_use if isinstance(feature, Advice)]
    metrics.kv_blocks_pinned.set(sum(one.size for one in pins))
    metrics.scheduler_tasks.set(num_tasks())


def _pages(memories: Iterable[KVCacheManager]) -> Counter[tuple[str, str, str]]:
    """The pages of models with several groups of layers, by tier, kind of the group, and state."""
    pages = Counter[tuple[str, str, str]]()
    for kv in memories:
        for tier in (kv.pool, *kv.pool.lower) if kv.windows else ():
            for kind, _, _, in_use, cached in group_pages(kv, tier):
                pages[tier_name(tier.number), kind, "in_use"] += in_use
                pages[tier_name(tier.number), kind, "cached"] += cached
    return pages


def _state(executor: ExecutorHandle) -> ExecutorState:
    scheduler, kv = executor.scheduler, executor.scheduler.kv
    return ExecutorState(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        free=kv.num_free,
        cached=kv.num_total - kv.num_free - kv.num_in_use,
        in_use=kv.num_in_use,
        tasks=executor.num_tasks,
        fallback=int(executor.hello.fallback),
    )
