"""Notes the snapshots that are lost and taken, beside the pools that take and evict them, and counts demoted ones."""

from collections.abc import Iterable
from itertools import islice

from pagewise_scheduler.core.memory.counters import MemoryCounters
from pagewise_scheduler.core.memory.eviction import EvictionPolicy
from pagewise_scheduler.core.memory.eviction_history import LossLog, LossReason
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.tiers.snapshots import SnapshotPool, nearest_pool

_MOST_AT_ONCE = 8_192
"""The most snapshots of a pool that are noted when an executor is lost."""


class _Watch:
    """Is called with each node at which the snapshot of ``pool`` has changed, before the pool's own ``changed``.

    ``group``: the device's pool of the same layers.
    """

    def __init__(
        self,
        group: SnapshotPool,
        pool: SnapshotPool,
        history: LossLog,
        counters: MemoryCounters,
        policy: EvictionPolicy,
    ) -> None:
        self._group, self._pool, self._then = group, pool, pool.changed
        self._history, self._counters, self._policy = history, counters, policy

    def __call__(self, node: CachedBlock) -> None:
        pool, group = self._pool, self._group
        if (snapshot := pool.at.get(node)) is None:
            if nearest_pool(group, node) is None:
                self._history.note_snapshot(node, pool.number, pool.tier, self._policy)
        elif pool is group:
            self._history.snapshot_taken(node, pool.number)
        elif snapshot.node is node and node in group.at:  # a demoted snapshot leaves the device afterwards
            self._counters.snapshots_demoted += 1
        self._then(node)


def watch(group: SnapshotPool, history: LossLog, counters: MemoryCounters, policy: EvictionPolicy) -> None:
    """Note and count new, demoted and lost snapshots of a group of layers on the device and below it."""
    pool: SnapshotPool | None = group
    while pool is not None:
        pool.changed = _Watch(group, pool, history, counters, policy)
        pool = pool.below


def note_all(groups: Iterable[SnapshotPool], history: LossLog, policy: EvictionPolicy, reason: LossReason) -> None:
    """All snapshots of an executor are lost at once."""
    history.taker, history.reason = None, reason
    for group in groups:
        pool: SnapshotPool | None = group
        while pool is not None:
            for node in islice(pool.at, _MOST_AT_ONCE):
                history.note_snapshot(node, pool.number, pool.tier, policy)
            pool = pool.below
    history.reason = "evicted"
