"""Watches executors' blocks for KV events and for histograms of block lifetimes, where an option asks for them."""

from collections.abc import Iterable
from time import monotonic as clock

from pagewise_shared.config import SchedulerConfig, parse_kv_events

from pagewise_scheduler.core.memory.block_watch import BlockLifetimes
from pagewise_scheduler.metrics import Metrics
from pagewise_scheduler.server.executor_handle import ExecutorHandle
from pagewise_scheduler.server.kv_events import ExecutorEvents, KVEvents


class BlockWatchers:
    """Adds the watchers to the memory of executors that join."""

    def __init__(self, config: SchedulerConfig, metrics: Metrics) -> None:
        """Open the sockets of KV events, if they are on.

        Raises:
            zmq.ZMQError: an endpoint cannot be used.
        """
        events = parse_kv_events(config.kv_events_config) if config.kv_events_config else None
        self._events = KVEvents(events, metrics) if events is not None and events.publishes else None
        self._sample = config.kv_cache_metrics_sample if config.kv_cache_metrics else 0.0
        self._metrics = metrics
        self._joined: dict[ExecutorHandle, ExecutorEvents] = {}

    def join(self, executor: ExecutorHandle) -> None:
        """Watch the blocks of an executor from now on; it has none yet."""
        kv = executor.scheduler.kv
        if self._events is not None:
            watcher = self._joined[executor] = self._events.join(kv.block_size, kv.group_kinds[0])
            kv.watchers.append(watcher)
        if self._sample:
            kv.watchers.append(BlockLifetimes(self._sample, self._observe, clock))

    def leave(self, executor: ExecutorHandle) -> None:
        """Publish the last events of an executor whose memory is closed."""
        if self._events is not None:
            self._events.leave(self._joined.pop(executor))

    def _observe(self, lifetime: float, idle: float, gaps: Iterable[float]) -> None:
        self._metrics.kv_block_lifetime.observe(lifetime)
        self._metrics.kv_block_idle.observe(idle)
        for gap in gaps:
            self._metrics.kv_block_reuse_gap.observe(gap)

    def flush(self) -> None:
        """Publish the events of this round."""
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Close the sockets."""
        if self._events is not None:
            self._events.close()
