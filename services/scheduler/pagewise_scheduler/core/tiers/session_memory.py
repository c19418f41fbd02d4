"""The effects of advice on the memory of a session: its blocks, and where layers are in several groups, the windows and
states at their ends."""

from collections.abc import Container, Iterable, Sequence

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.tiers.cache_reset import release_node, snapshot_pools
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager
from pagewise_scheduler.core.tiers.snapshots import Snapshot
from pagewise_scheduler.core.tiers.tier import BlockCopy

_PREDICTED_SNAPSHOTS = 2
"""The last snapshots of a path whose next use is predicted with the session's: near the end of its last prompt, and of
the answer. The next turn begins behind one of them."""


def blocks_behind(first: CachedBlock) -> list[CachedBlock]:
    """A session's first own block and all blocks behind it, the last ones first: the session's turns had them, and some
    turns have left them. Blocks behind which other sessions have some are not among them."""
    nodes, kept = [first], set[CachedBlock]()
    for node in nodes:  # grows while it is walked: parents come before their children
        nodes += node.children.values()
    for node in reversed(nodes):
        if node.session != first.session or not kept.isdisjoint(node.children.values()):
            kept.add(node)
    return [node for node in reversed(nodes) if node.num_tiers and node not in kept]


def release(kv: KVCacheManager, nodes: Sequence[CachedBlock]) -> int:
    """Release blocks in all tiers with ids as far as nothing uses them, the last ones first; returns their number."""
    return sum(release_node(kv, node, "advice") for node in nodes)


def demote(kv: KVCacheManager, nodes: Sequence[CachedBlock], copies: list[BlockCopy]) -> int:
    """Evict blocks from the device as far as nothing uses them, the last ones first; returns their number.

    The windows and states at their ends go first, as always: the blocks are of use below the device with them alone.
    ``copies``: the list to which the copies are added that keep them.
    """
    num_demoted = 0
    kv.eviction_history.reserves_for(None)
    for node in nodes:
        if node.block < 0 or node.num_on_device or kv.pool.references(node.block):
            continue
        for group in kv.windows:
            group.evict(node, copies)
        copies += kv.pool.evict_nodes([node], "advice")
        num_demoted += node.block < 0
    return num_demoted


def drop_snapshots(kv: KVCacheManager, nodes: Iterable[CachedBlock], kept: Container[CachedBlock]) -> None:
    """No sequence begins behind these nodes any more: release the windows and states there, except behind nodes
    in ``kept``. Blocks of full layers that are of use with them alone go first then."""
    history, pools = kv.eviction_history, list(snapshot_pools(kv))
    history.reason = "advice"
    for node in nodes if pools else ():
        for pool in pools if node not in kept else ():
            pool.forget(node)
    history.reason = "evicted"


def predict_snapshots(kv: KVCacheManager, nodes: Iterable[CachedBlock], prediction: int, tick: int) -> None:
    """Predict the next use of the last windows and states of a session, counted from a tick.

    ``nodes``: the session's blocks, the last one first.
    """
    path = [*nodes] if kv.windows else []
    for pool in snapshot_pools(kv):
        last: dict[Snapshot, None] = {}
        for node in path:
            if (snapshot := pool.at.get(node)) is not None:
                last[snapshot] = None
                if len(last) == _PREDICTED_SNAPSHOTS:
                    break
        for snapshot in last:
            pool.predict(snapshot.node, prediction, tick)
