"""What consoles tell of one executor."""

from collections.abc import Mapping

from pagewise_shared.protocol import tier_name

from pagewise_scheduler.core.console.reports import BlockCounts, LinkState, TierState
from pagewise_scheduler.core.memory.copy_costs import Link
from pagewise_scheduler.core.scheduling.scheduler import Scheduler


def block_counts(scheduler: Scheduler) -> BlockCounts:
    """The blocks of its device by state."""
    pool = scheduler.kv.pool
    copying = min(scheduler.recoveries.transfers.num_loading, pool.num_in_use)
    lent = min(pool.num_lent, pool.num_in_use - copying)
    return BlockCounts(pool.num_free, pool.num_cached, pool.num_in_use - copying - lent, lent, copying)


def tier_states(scheduler: Scheduler) -> dict[str, TierState]:
    """Its tiers below the device, by their names."""
    return {
        tier_name(tier.number): TierState(
            tier.num_blocks, tier.num_used, tier.num_arriving, tier.costs.load.num_loading
        )
        for tier in scheduler.kv.pool.lower
    }


def link_states(scheduler: Scheduler, names: Mapping[str, str]) -> list[LinkState]:
    """Its ways to get blocks. ``names``: of executors, by their block endpoints; links to others are left out."""
    costs = scheduler.costs
    tiers = [_link(link.load, tier=tier_name(number)) for number, link in costs.tiers.items()]
    return tiers + [_link(link, peer=names[peer]) for peer, link in costs.peers.items() if peer in names]


def _link(link: Link, *, tier: str | None = None, peer: str | None = None) -> LinkState:
    setup, block = (round(1e6 * constant, 1) for constant in link.constants)
    return LinkState(setup, block, round(link.error, 4), link.num_loading, tier, peer)


def saved_blocks(scheduler: Scheduler) -> int:
    """How many blocks more the sequences of an executor would hold if they shared none.

    That is the number of references of block tables beyond one for each block.
    """
    kv = scheduler.kv
    held = sum(len(sequence.table.blocks) for request in scheduler.requests for sequence in request.sequences)
    return max(0, held - kv.pool.num_in_use)
