"""Loads ahead in models with several groups of layers, from host memory.

A sequence that begins with loaded blocks needs the windows and states at their end. So blocks are loaded up to the last
place of which the device or host memory has both, and the windows and states come with the last of them.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from pagewise_scheduler.core.features.prefix_load import Piece, PrefixLoad
from pagewise_scheduler.core.memory.block_table import BlockTable, CachedPrefix
from pagewise_scheduler.core.memory.eviction import CostAware
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.memory.roles import ANSWER
from pagewise_scheduler.core.tiers.arena import SharedBlockPool, SharedHostTier
from pagewise_scheduler.core.tiers.grouped import GroupedKVCacheManager
from pagewise_scheduler.core.tiers.tier import Location
from pagewise_scheduler.core.tiers.transfers import Loads
from pagewise_scheduler.core.tiers.windows import WindowGroup

if TYPE_CHECKING:
    from pagewise_scheduler.core.scheduling.scheduler import Scheduler

_PIECE_BLOCKS = 256


class LoadsOfGroups:
    """Loads the prefixes of one executor. ``policy``: values them; None: they take free memory alone."""

    def __init__(self, scheduler: "Scheduler", kv: GroupedKVCacheManager, policy: CostAware | None) -> None:
        self._scheduler, self._kv, self._policy = scheduler, kv, policy

    @staticmethod
    def num_reachable(path: Sequence[CachedBlock]) -> int:
        """How many blocks of a path, from the first one on, lie on the device or in host memory."""
        return sum(1 for _ in takewhile(lambda node: node.num_tiers, path))

    def begin(self, load: PrefixLoad, path: Sequence[CachedBlock], step: int, loads: Loads) -> bool:
        """Let the plan of ``step`` bring the next blocks of a path that lie in host memory, if that pays now.

        False: there are none that a sequence could begin with.
        """
        kv, host, salt = self._kv, self._kv.host, load.table.cache_salt
        found = [*path[: self.num_reachable(path)]]
        here = kv.begin_with(salt, found, b"")
        if host is None or not here.offloaded:
            return False
        end = len(here.blocks) + len(here.offloaded)
        prefix, node = kv.loaded_to(here, end), found[end - 1]
        missing = found[len(prefix.blocks) : end]
        lacking = [group for group in kv.windows if group.blocks_at(node) is None]
        if not self._pays(here, prefix, node, lacking, len(missing), host):
            return True
        if len(missing) > _PIECE_BLOCKS:
            missing, lacking = missing[:_PIECE_BLOCKS], []
        # All are held before room is made for them, which demotes other blocks to host memory.
        locations, windows = host.hold(missing), [self._hold(host, node, group) for group in lacking]
        load.table = table = kv.new_table(salt, load.table.owner)
        load.tokens = b"".join(one.tokens for one in found[:end])
        load.hold(self._scheduler, prefix.blocks)
        for group, one, held in zip(kv.windows, table.windows, prefix.windows, strict=True):
            group.pin(held.blocks)
            one.take(held)
        for group, some in zip(lacking, windows, strict=True):
            if some:
                blocks, evicted = group.reserve(len(some))
                self._scheduler.plan.copy(evicted)
                table.windows[group.number - 1].blocks[:0] = blocks
                load.pieces.append(Piece(load, blocks, group.number))
                self._scheduler.recoveries.transfers.ask(step, loads, load.pieces[-1], some, blocks)
        if locations:
            load.ask(self._scheduler, step, loads, locations)
        return True

    def _pays(
        self,
        here: CachedPrefix,
        prefix: CachedPrefix,
        node: CachedBlock,
        lacking: Sequence[WindowGroup],
        num_missing: int,
        host: SharedHostTier,
    ) -> bool:
        """Whether there is room, and each page is worth more with the load than with the content that is evicted first.

        ``here``: the blocks of a prefix up to ``node`` that the device has, and ``prefix``: with windows of other
        places. Behind it, ``num_missing`` blocks and the windows and states of the groups ``lacking`` are missing.
        """
        kv, costs, pool = self._kv, self._scheduler.costs, self._kv.pool
        assert isinstance(pool, SharedBlockPool)
        at_end = [(group, host.snapshots[group.number - 1].blocks_at(node) or ()) for group in lacking]
        num_pages = num_missing * kv.pages_per_block + sum(len(some) * one.pages_per_block for one, some in at_end)
        # The load holds the blocks that the device has, so they cannot be evicted for it.
        kept = kv.pages_per_block * sum(not pool.references(one.block) for one in prefix.blocks)
        for group, table in zip(kv.windows, prefix.windows, strict=True):
            kept += group.pages_per_block * sum(not group.users(block) for block in table.blocks)
        if num_pages + kept > self._scheduler.prefilling.num_spare(len(self._scheduler.decoding)):
            return False
        if num_pages <= kv.num_free:
            return True
        if self._policy is None:
            return False
        start, size = len(here.blocks), kv.block_size
        num_blocks = num_missing + kv.num_lacking_in_windows(node, node.depth)
        seconds = host.link.seconds(num_blocks, host.link.num_loading)
        saved = min(seconds, costs.compute_seconds(start * size, (node.depth - start) * size))
        return self._policy.uses_from(node, seconds) * saved / num_pages > pool.arena.next_value()

    @staticmethod
    def _hold(host: SharedHostTier, node: CachedBlock, group: WindowGroup) -> list[Location]:
        """Hold the windows or states of a group at the end of a node in host memory. That is no use of them."""
        pool = host.snapshots[group.number - 1]
        pool.pin(blocks := pool.blocks_at(node) or [])
        return [Location(host, pool.tier, block, node, group=group.number) for block in blocks]

    def keep(self, table: BlockTable, pieces: Sequence[Piece]) -> None:
        """Make snapshots of the windows and states that have come for a table, with the roles and predictions that they
        have in host memory."""
        node, host = table.last_node, self._kv.host
        assert node is not None
        for piece in pieces:
            group = self._kv.windows[piece.group - 1]
            group.take_snapshot(node, table.windows[piece.group - 1], ANSWER)
            below = host.snapshots[piece.group - 1].at.get(node) if host is not None else None
            if below is not None:
                if group.has_states:
                    group.has_role(node, below.kind)
                group.predict(node, below.prediction, below.last_used)

    def let_go(self, table: BlockTable) -> None:
        """Release the windows and states of a table, which take no snapshots at its end."""
        for group, one in zip(self._kv.windows, table.windows, strict=True):
            group.drop(one.blocks, None)
            one.clear()
        table.windows = ()
