"""The cached prefixes of one executor, by the blocks with which they begin."""

import heapq
from collections import Counter

from pagewise_shared.block_hash import client_salt, is_below
from pagewise_shared.protocol import tier_name
from pagewise_shared.reports import CachedPrefixes, ExecutorCache

from pagewise_scheduler.core.group_report import SnapshotFinder
from pagewise_scheduler.core.memory.eviction import CLASSES_PER_USE
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, cache_salt_of
from pagewise_scheduler.core.memory.tick_times import TickTimes
from pagewise_scheduler.core.scheduling.scheduler import Scheduler

_MOST_BLOCKS = 100_000
"""Maximum number of blocks that are counted, because the scheduler does nothing else meanwhile."""


def executor_cache(
    executor_id: str,
    scheduler: Scheduler,
    bytes_per_block: int,
    salt: str,
    limit: int,
    ticks: TickTimes,
    now: float,
    most_blocks: int = _MOST_BLOCKS,
) -> ExecutorCache:
    """Return at most ``limit`` entries of cached prefixes under a cache salt (see ``is_below``)."""
    kv, found, left = scheduler.kv, list[CachedPrefixes](), most_blocks
    snapshots = SnapshotFinder(kv)
    for root in kv.pool.tree.roots:
        own = cache_salt_of(root)
        for child in root.children.values() if is_below(own, salt) else ():
            if left <= 0:
                break
            entry = _entry(scheduler, child, bytes_per_block, left, snapshots, ticks, now)
            entry.salt = client_salt(own)
            left -= entry.num_blocks
            found.append(entry)
    largest = heapq.nlargest(limit, found, key=lambda entry: entry.num_blocks)
    return ExecutorCache(executor_id, kv.block_size, bytes_per_block, largest, left <= 0 or len(found) > limit)


def _entry(
    scheduler: Scheduler,
    first: CachedBlock,
    bytes_per_block: int,
    most: int,
    snapshots: SnapshotFinder,
    ticks: TickTimes,
    now: float,
) -> CachedPrefixes:
    pool, nodes = scheduler.kv.pool, [first]
    blocks, deepest, newest, uses, in_use, num_snapshots = Counter[int](), 0, 0, 0, 0, 0
    tiers, hashed = tuple(scheduler.kv.tiers), tuple(scheduler.kv.hashed.values())
    for node in nodes:  # grows while it is walked
        if len(nodes) < most:
            nodes += node.children.values()
        for tier in tiers:
            blocks[tier] += node.block_id(tier) >= 0
        for stored in hashed:
            blocks[stored.number] += stored.holds(node)
        deepest, newest = max(deepest, node.depth), max(newest, node.last_used)
        uses = max(uses, node.kind // CLASSES_PER_USE)
        in_use += node.block >= 0 and pool.references(node.block) > 0
        if snapshots.pools:
            num_snapshots += sum(1 for _ in snapshots.at(node))
    ref = first.cached_by
    held = {tier_name(tier): number for tier, number in blocks.items() if number}
    return CachedPrefixes(
        len(nodes),
        deepest * scheduler.kv.block_size,
        held,
        {name: number * bytes_per_block for name, number in held.items()},
        in_use,
        num_snapshots,
        key=ref.key if ref is not None else "",
        adapter=ref.adapter if ref is not None else "",
        request_id=ref.request_id if ref is not None else "",
        uses=uses if pool.policy.learns else None,
        last_used_seconds=round(max(0.0, now - ticks.time_of(newest, now)), 3) if newest else None,
    )
