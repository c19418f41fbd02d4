"""Which running sequence gives up its blocks when there are too few."""

import heapq

from pagewise_shared.protocol import DEVICE

from pagewise_scheduler.core.requests.request import Sequence
from pagewise_scheduler.core.requests.virtual_tokens import Account
from pagewise_scheduler.core.tiers.cost_model import CostModel
from pagewise_scheduler.core.tiers.device import BlockPool

_CANDIDATES = 16
"""How many sequences are weighed when one is to be preempted."""


def choose_victim(
    running: list[Sequence], pool: BlockPool, costs: CostModel, account: Account | None = None
) -> Sequence:
    """The sequence to preempt: of the lowest priority, the cheapest to recover per block that really becomes free.

    Only the latest arrivals are weighed, and never the first in line: one sequence always gets on. A block that others
    share does not become free. ``account``: the key whose sequences are preferred, if it has candidates.
    """
    lowest = max(sequence.request.params.priority for sequence in running)
    first = min(running, key=_arrival_order)
    others = [one for one in running if one.request.params.priority == lowest and one is not first]
    if account is not None:
        others = [one for one in others if one.request.account is account] or others
    latest = heapq.nlargest(_CANDIDATES, others, key=_arrival_order)
    return min(latest, key=lambda sequence: _seconds_per_block(sequence, pool, costs)) if latest else first


def _arrival_order(sequence: Sequence) -> tuple[int, float, int]:
    return (*sequence.request.order, sequence.index)


def _seconds_per_block(sequence: Sequence, pool: BlockPool, costs: CostModel) -> float:
    blocks = sequence.table.blocks
    freed = pool.num_freed(blocks)
    if not freed:
        return float("inf")
    start, link = (len(blocks) - freed) * costs.block_size, costs.link_below(DEVICE)
    if link is None:
        return costs.compute_seconds(start, freed * costs.block_size) / freed
    estimate = costs.estimate(start, freed, link)
    return min(estimate.load, estimate.both, estimate.recompute) / freed
