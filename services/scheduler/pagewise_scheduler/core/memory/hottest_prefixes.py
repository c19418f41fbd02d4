"""The prefixes of a cache that are the most likely to be of use: what an executor that leaves hands over to others."""

import heapq
from dataclasses import dataclass

from pagewise_scheduler.core.memory.block_pool import BlockPool
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock


@dataclass(slots=True, frozen=True)
class HotPrefix:
    """A prefix of ``num_blocks`` full blocks: its ``tokens`` (int32 bytes), and whose cache it is in."""

    cache_salt: str | None
    tokens: bytes
    num_blocks: int


def hottest_prefixes(pool: BlockPool, limit: int) -> list[HotPrefix]:
    """The prefixes that eviction would give up last, at most ``limit``, the most valuable first."""
    leaves: list[tuple[float, int, CachedBlock, str | None]] = []
    number = 0
    for root in pool.tree.roots:
        cache_salt = pool.tree.cache_salt_of(root)
        below = list(root.children.values())
        for node in below:  # grows while it is walked
            below += node.children.values()
            if not node.children:
                number += 1
                leaves.append((pool.policy.priority(node, 0.0), number, node, cache_salt))
    return [_prefix(node, cache_salt) for _, _, node, cache_salt in heapq.nlargest(limit, leaves)]


def _prefix(node: CachedBlock, cache_salt: str | None) -> HotPrefix:
    pieces: list[bytes] = []
    current: CachedBlock | None = node
    while current is not None and current.depth:
        pieces.append(current.tokens)
        current = current.parent
    return HotPrefix(cache_salt, b"".join(reversed(pieces)), len(pieces))
