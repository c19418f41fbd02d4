"""Deletes blocks in the tiers without ids: all blocks of a cache salt, or blocks that the scheduler names."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagewise_shared.block_hash import pack_names, salt_tag
from pagewise_shared.protocol import DropStored

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, ancestors, cache_salt_of, name_of
from pagewise_scheduler.core.tiers.cache_reset import nodes_below, roots_of
from pagewise_scheduler.core.tiers.hashed import HashedTier

if TYPE_CHECKING:
    from pagewise_scheduler.core.scheduling.scheduler import Scheduler


def drop_salt(scheduler: "Scheduler", tier: HashedTier, number: int, salt: str) -> DropStored:
    """The message that deletes the blocks of a cache salt and of salts below it in a tier (empty: all blocks).

    ``number``: of the answer.
    """
    kv = scheduler.kv
    for root in roots_of(kv, salt):
        for node in nodes_below(root):
            tier.dropped(node)
    tag = salt_tag(salt) if salt else b""
    return DropStored(scheduler.epoch, number, tier.number, _last_copies(scheduler), tag=tag)


def drop_blocks(scheduler: "Scheduler", nodes: Sequence[CachedBlock]) -> list[DropStored]:
    """The messages that delete blocks in all tiers without ids."""
    tiers = scheduler.kv.hashed.values() if nodes else ()
    for tier in tiers:
        for node in nodes:
            tier.dropped(node)
    step, names = _last_copies(scheduler), pack_names(map(name_of, nodes))
    return [DropStored(scheduler.epoch, 0, tier.number, step, names) for tier in tiers]


def _last_copies(scheduler: "Scheduler") -> int:
    """The last step that copies blocks to these tiers, as far as copies have been decided."""
    return scheduler.last_step + 1 if scheduler.has_unsent_demotions else scheduler.newest_in_flight or 0


def only_stored(scheduler: "Scheduler", last: CachedBlock | None) -> list[CachedBlock]:
    """The blocks up to ``last`` that left the prefix tree, and that a tier without ids has; the last one first.

    Not the blocks that requests have brought back to the tree since.
    """
    path = [*ancestors(last)]
    tree, tiers = scheduler.kv.pool.tree, scheduler.kv.hashed.values()
    if last is None or not tiers:
        return []
    num_there = len(tree.walk(tree.root_of(cache_salt_of(last)), (node.tokens for node in reversed(path))))
    return [node for node in path[: len(path) - num_there] if any(tier.holds(node) for tier in tiers)]
