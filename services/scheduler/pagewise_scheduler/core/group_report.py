"""Makes the parts of reports that speak of groups of layers: their pages, tables and snapshots."""

from collections.abc import Iterator

from pagewise_shared.protocol import GroupKind, tier_name
from pagewise_shared.reports import GroupReport, SnapshotReport, TableReport

from pagewise_scheduler.core.memory.block_table import BlockTable, StateTable, WindowTable
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.tiers.arena import SharedBlockPool, SharedHostTier
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager
from pagewise_scheduler.core.tiers.pool import Pool
from pagewise_scheduler.core.tiers.snapshots import SnapshotPool


def group_pages(kv: KVCacheManager, tier: Pool) -> Iterator[tuple[GroupKind, int, int, int, int]]:
    """Yield the kind of each group, its window, pages of a block, pages in use and cached pages, in a tier.

    It takes no longer in large tiers. A tier of a model with one group has one, in pages of one block.
    """
    pages = tier.pages_per_block if isinstance(tier, SharedBlockPool | SharedHostTier) else 1
    yield kv.group_kinds[0], 0, pages, pages * tier.num_in_use, pages * tier.num_cached
    for one in tier.snapshots if isinstance(tier, SharedBlockPool | SharedHostTier) else ():
        pages, in_use = one.pages_per_block, one.num_used - one.num_cached
        yield kv.group_kinds[one.number], one.window, pages, pages * in_use, pages * one.num_cached


def num_pages(tier: Pool) -> int:
    """Return the pages of a tier, or its blocks if the model has one group."""
    return tier.arena.num_pages if isinstance(tier, SharedBlockPool | SharedHostTier) else tier.num_blocks


def group_reports(kv: KVCacheManager, tier: Pool) -> list[GroupReport]:
    """Return the groups of a tier, none if the model has one group."""
    if not isinstance(tier, SharedBlockPool | SharedHostTier):
        return []
    snapshots = (0, *(len({*one.at.values()}) for one in tier.snapshots))
    return [GroupReport(*pages, number) for pages, number in zip(group_pages(kv, tier), snapshots, strict=True)]


def table_reports(kv: KVCacheManager, table: BlockTable) -> list[TableReport]:
    """Return the blocks of a sequence in each group, none if the model has one group."""
    if not kv.windows:
        return []
    full = TableReport(kv.group_kinds[0], 0, len(table.blocks), len(table.blocks) * kv.pages_per_block)
    return [full, *map(_table_report, kv.group_kinds[1:], kv.windows, table.windows)]


def _table_report(kind: GroupKind, group: SnapshotPool, table: WindowTable) -> TableReport:
    report = TableReport(kind, group.window, len(table.blocks), len(table.blocks) * group.pages_per_block)
    if isinstance(table, StateTable):
        report.tokens = table.tokens[:]
    else:
        report.first = table.first * group.block_size
    return report


class SnapshotFinder:
    """Finds the snapshots behind blocks, in all tiers with ids. ``pools``: the pools that have snapshots."""

    def __init__(self, kv: KVCacheManager) -> None:
        self.pools: list[tuple[GroupKind, SnapshotPool]] = []
        for group in kv.windows:
            pool: SnapshotPool | None = group
            while pool is not None:
                self.pools.append((kv.group_kinds[pool.number], pool))
                pool = pool.below

    def at(self, node: CachedBlock) -> Iterator[SnapshotReport]:
        """Yield the snapshots whose last block of tokens is ``node``'s."""
        for kind, pool in self.pools:
            if (found := pool.at.get(node)) is not None and found.node is node:
                tier, places = tier_name(pool.tier), len(found.points)
                yield SnapshotReport(kind, pool.window, tier, node.depth, places, found.was_used)
