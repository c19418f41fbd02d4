"""Who gives way when memory is short."""

import heapq

from pagewise_shared.protocol import DEVICE

from pagewise_scheduler.core.requests.account import Account
from pagewise_scheduler.core.requests.request import Sequence
from pagewise_scheduler.core.tiers.cost_model import CostModel
from pagewise_scheduler.core.tiers.device import BlockPool

_CANDIDATES = 16


def choose_victim(
    running: list[Sequence], pool: BlockPool, costs: CostModel, account: Account | None = None
) -> Sequence:
    """The sequence to preempt: of the lowest priority, the cheapest to recover per block that really becomes free.

    Only the latest arrivals are weighed, and never the first in line: somebody always gets on. A block that others
    share becomes nobody's gain. ``account``: the key whose sequences are preferred, if it has candidates.
    """
    lowest = max(sequence.request.priority for sequence in running)
    first = min(running, key=_order)
    others = [s for s in running if s.request.priority == lowest and s is not first]
    if account is not None:
        others = [s for s in others if s.request.account is account] or others
    latest = heapq.nlargest(_CANDIDATES, others, key=_order)
    if not latest:
        return first
    return min(latest, key=lambda sequence: _seconds_per_block(sequence, pool, costs))


def _order(sequence: Sequence) -> tuple[int, float, int]:
    return (*sequence.request.order, sequence.index)


def _seconds_per_block(sequence: Sequence, pool: BlockPool, costs: CostModel) -> float:
    references, blocks = pool.references, sequence.table.blocks
    freed = sum(1 for block in blocks if references(block) == 1)
    if not freed:
        return float("inf")
    start, link = (len(blocks) - freed) * costs.block_size, costs.link_below(DEVICE)
    if link is None:
        return costs.compute_seconds(start, freed * costs.block_size) / freed
    estimate = costs.estimate(start, freed, link)
    return min(estimate.load, estimate.both, estimate.recompute) / freed
