"""The details of one block, for consoles."""

from collections.abc import Iterable
from itertools import islice

from pagewise_shared.protocol import tier_name
from pagewise_shared.reports import BlockDetails, BlockLocation

from pagewise_scheduler.core.console.block_map import STATES
from pagewise_scheduler.core.console.prefixes import probability, token_ids
from pagewise_scheduler.core.memory.block_table import BlockTable
from pagewise_scheduler.core.memory.eviction import CostAware, LeastRecentlyUsed
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, ancestors, cache_salt_of, hash_of
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.pool import Pool

_MOST_REQUESTS = 32


def block_details(
    executor_id: str,
    scheduler: Scheduler,
    tier: Pool,
    block: int,
    others: Iterable[tuple[str, Scheduler]],
    *,
    tokens: bool,
) -> BlockDetails:
    """Return the details of a block of ``tier``. ``others``: the other executors. ``tokens``: whether its tokens are
    shown."""
    pool, node = scheduler.kv.pool, tier.node(block)
    state = STATES[tier.states[block]]
    details = BlockDetails(executor_id, tier_name(tier.number), block, state, tier.references(block), [])
    if tier is pool and state == "in use":
        holders = (one.request.request_id for one in scheduler.running if _holds(one.table, block, node))
        # Every reference is a holder's or a copy's, so the search ends when as many holders are found.
        details.requests = list(dict.fromkeys(islice(holders, min(_MOST_REQUESTS, details.references))))
    if node is None:
        return details
    details.hash, details.depth = hash_of(node).hex(), node.depth
    known = token_ids(node)
    details.tokens = len(known)
    details.token_ids = known if tokens else None
    details.copies = _locations(node, scheduler)
    details.elsewhere = [found for name, other in others for found in _same(node, name, other)]
    if state == "cached":
        policy = pool.policy
        if isinstance(policy, (CostAware, LeastRecentlyUsed)):
            details.unused_for = max(0, policy.now - node.last_used)
        details.price, details.probability = policy.value(node), probability(policy, node)
    return details


def _holds(table: BlockTable, block: int, node: CachedBlock | None) -> bool:
    """Whether ``block``, which has the content of ``node``, is in the table. Only blocks with unknown content are
    searched for: all tables together may have hundreds of thousands, and a step would wait."""
    if node is not None:  # a prefix is at the same place in each table
        return table.blocks[node.depth - 1 : node.depth] == [block]
    return block in islice(reversed(table.blocks), len(table.blocks) - table.num_known)


def _locations(node: CachedBlock, scheduler: Scheduler) -> dict[str, int]:
    return {tier_name(number): block for number in scheduler.kv.tiers if (block := node.block_id(number)) >= 0}


def _same(node: CachedBlock, executor_id: str, other: Scheduler) -> list[BlockLocation]:
    """Where another executor has the content of ``node``."""
    keys = [one.tokens for one in ancestors(node)]
    tree = other.kv.pool.tree
    path = tree.walk(tree.root_of(cache_salt_of(node)), reversed(keys))
    if len(path) < len(keys):
        return []
    return [BlockLocation(executor_id, tier, block) for tier, block in _locations(path[-1], other).items()]
