"""Releases cached blocks for an operator: all blocks, or the blocks of one cache salt."""

from collections.abc import Iterator
from dataclasses import dataclass

from pagewise_shared.block_hash import is_below
from pagewise_shared.protocol import DEVICE

from pagewise_scheduler.core.memory.eviction_history import LossReason
from pagewise_scheduler.core.memory.prefix_tree import NOWHERE, CachedBlock, cache_salt_of
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager
from pagewise_scheduler.core.tiers.pool import Pool
from pagewise_scheduler.core.tiers.snapshots import SnapshotPool


@dataclass(slots=True, frozen=True)
class ResetOutcome:
    """The result of a reset. ``released``: the number of released blocks by the number of the tier, or of released
    pages if the model has several groups of layers.

    ``num_in_use``: blocks in the prefix tree that stay, because sequences and copies use them or blocks behind them.
    """

    released: dict[int, int]
    num_in_use: int


def reset_cache(kv: KVCacheManager, salt: str = "") -> ResetOutcome:
    """Release the blocks of a cache salt (see ``is_below``) in all tiers with ids, as far as they are not in use.

    Blocks that the executor has listed by hash, and that no prompt has requested yet, are released under every salt,
    because a hash does not show the salt.
    """
    used = {number: _num_used(kv, tier) for number, tier in kv.tiers.items()}
    for tier in kv.tiers.values():
        tier.forget_recoverable()
    for pool in snapshot_pools(kv):
        pool.forget_recoverable()
    history = kv.eviction_history
    history.reserves_for(None, 0)
    history.reason = "cache reset"
    num_in_use = sum(_reset(kv, root) for root in roots_of(kv, salt))
    history.reason = "evicted"
    return ResetOutcome({number: used[number] - _num_used(kv, tier) for number, tier in kv.tiers.items()}, num_in_use)


def roots_of(kv: KVCacheManager, salt: str) -> list[CachedBlock]:
    """The roots of a cache salt, and of the salts below it (see ``is_below``)."""
    return [root for root in kv.pool.tree.roots if is_below(cache_salt_of(root), salt)]


def nodes_below(root: CachedBlock) -> list[CachedBlock]:
    """The blocks below a root, parents before their children."""
    nodes = [*root.children.values()]
    for node in nodes:  # grows while it is walked
        nodes += node.children.values()
    return nodes


def _num_used(kv: KVCacheManager, tier: Pool) -> int:
    if tier.number == DEVICE:
        return kv.num_total - kv.num_free
    lower = kv.cache_tier(tier.number)
    assert lower is not None
    return lower.memory[1]


def snapshot_pools(kv: KVCacheManager) -> Iterator[SnapshotPool]:
    """The pools of windows and states, on the device and in the tiers below it."""
    for group in kv.windows:
        pool: SnapshotPool | None = group
        while pool is not None:
            yield pool
            pool = pool.below


def _reset(kv: KVCacheManager, root: CachedBlock) -> int:
    """Release the blocks of a cache salt; returns the number of blocks that stay."""
    num_in_use = 0
    for node in reversed(nodes_below(root)):
        release_node(kv, node, "cache reset")
        num_in_use += node.num_tiers > 0
    return num_in_use


def release_node(kv: KVCacheManager, node: CachedBlock, reason: LossReason) -> bool:
    """Release a block in all tiers with ids, where neither it nor a block behind it is in use; returns whether no tier
    has it any more, and one had."""
    before = node.nearest_tier
    for tier in kv.tiers.values():
        tier.forget(node)
    if node.num_tiers:
        return False
    if before != NOWHERE:
        kv.eviction_history.note(node, reason, before, kv.pool.policy, 0.0)
    if not node.children:
        parent = node.parent
        assert parent is not None
        kv.pool.tree.remove(node)
        for lower in kv.pool.lower:
            lower.offer(parent)
    return before != NOWHERE
