"""The prefixes of a cache that are the most likely to be of use: an executor that leaves hands them over to others."""

import heapq
from dataclasses import dataclass

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, ancestors
from pagewise_scheduler.core.tiers.device import BlockPool


@dataclass(slots=True, frozen=True)
class HotPrefix:
    """A prefix of ``num_blocks`` full blocks: its ``tokens`` (int32 bytes), and whose cache it is in."""

    cache_salt: str | None
    tokens: bytes
    num_blocks: int


def hottest_prefixes(pool: BlockPool, limit: int) -> list[HotPrefix]:
    """The prefixes that eviction would give up last, at most ``limit``, the most valuable first."""
    hottest = heapq.nlargest(limit, pool.tree.leaves(), key=lambda leaf: pool.policy.value(leaf[1]))
    return [_prefix(cache_salt, leaf) for cache_salt, leaf in hottest]


def _prefix(cache_salt: str | None, leaf: CachedBlock) -> HotPrefix:
    pieces = [node.tokens for node in ancestors(leaf)]
    return HotPrefix(cache_salt, b"".join(reversed(pieces)), len(pieces))
