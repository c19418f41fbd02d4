"""Watches executors' blocks for KV events and for histograms of block lifetimes, where an option asks for them."""

from collections.abc import Iterable
from time import monotonic as clock

from pagewise_shared.block_hash import HASH_BYTES, BlockHash
from pagewise_shared.config import SchedulerConfig, parse_kv_events
from pagewise_shared.protocol import StoredGone

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
            for tier in kv.hashed.values():
                tier.watcher = watcher
        if self._sample:
            kv.watchers.append(BlockLifetimes(self._sample, self._observe, clock))

    def stored_gone(self, executor: ExecutorHandle, message: StoredGone) -> None:
        """Note that the disk or the store of an executor has deleted blocks, which others that share it lose too."""
        packed = message.hashes
        hashes = [BlockHash(packed[at : at + HASH_BYTES]) for at in range(0, len(packed), HASH_BYTES)]
        if (told := executor.scheduler.kv.hashed.get(message.tier)) is None:
            return
        for other, watcher in self._joined.items():
            tier = other.scheduler.kv.hashed.get(message.tier)
            if tier is not None and (tier is told or tier.identity == told.identity):
                watcher.gone(hashes, message.tier)

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
