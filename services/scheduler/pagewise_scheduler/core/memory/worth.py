"""What is most worth keeping of a cache that has to go."""

import heapq
from dataclasses import dataclass

from pagewise_scheduler.core.memory.block_pool import BlockPool
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock


@dataclass(slots=True, frozen=True)
class Chain:
    """A prefix of ``num_blocks`` full blocks: its ``tokens`` (int32 bytes), and whose cache it is in."""

    space: str | None
    tokens: bytes
    num_blocks: int


def most_valuable_chains(pool: BlockPool, limit: int) -> list[Chain]:
    """The prefixes that eviction would give up last, at most ``limit``, the most valuable first."""
    leaves: list[tuple[float, int, CachedBlock, str | None]] = []
    number = 0
    for root in pool.tree.roots:
        space = pool.tree.space_of(root)
        below = list(root.children.values())
        for node in below:  # grows while it is walked
            below += node.children.values()
            if not node.children:
                number += 1
                leaves.append((pool.policy.priority(node, 0.0), number, node, space))
    return [_chain(node, space) for _, _, node, space in heapq.nlargest(limit, leaves)]


def _chain(node: CachedBlock, space: str | None) -> Chain:
    pieces: list[bytes] = []
    current: CachedBlock | None = node
    while current is not None and current.depth:
        pieces.append(current.tokens)
        current = current.parent
    return Chain(space, b"".join(reversed(pieces)), len(pieces))
