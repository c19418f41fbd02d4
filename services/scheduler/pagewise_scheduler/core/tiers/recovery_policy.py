"""Decides how KV comes back, and which KV is worth keeping for that in a tier below."""

from collections.abc import Iterable

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.tiers.cost_model import CostModel, Link, RecoveryEstimate
from pagewise_scheduler.core.tiers.recovery_plan import Method, RecoveryMode
from pagewise_scheduler.core.tiers.tier import Tier

_WORTH_BOTH = 0.975


class RecoveryPolicy:
    """Goes by the costs, unless ``mode`` says what is to be done."""

    __slots__ = ("_costs", "mode")

    def __init__(self, costs: CostModel, mode: RecoveryMode = "auto") -> None:
        self.mode: RecoveryMode = mode
        self._costs = costs

    def method(self, estimate: RecoveryEstimate, links: Iterable[Link]) -> Method:
        """How to get blocks back that ``links`` could bring."""
        if self.mode == "swap":
            return "load"
        if self.mode != "auto":
            return self.mode
        load, both = estimate.load + estimate.after, estimate.both + estimate.after
        better: Method = "load" if load <= estimate.recompute else "recompute"
        # Both at once keeps the executor and the link busy: it has to win by more than the noise of the estimate.
        if both < _WORTH_BOTH * min(load, estimate.recompute):
            return "both"
        self._costs.both_passed_over()
        if better == "recompute":
            for link in links:
                link.passed_over()
        return better

    def is_worth_copying(self, node: CachedBlock, tier: Tier) -> bool:
        """Whether copying the prefix that ends with ``node`` to ``tier`` is worth it, block by block on average.

        The copies save, if the prefix is used again, what recovering from both ends saves over computing alone. They
        cost their time on the link, by how busy the link is: an idle one costs nothing.
        """
        if self.mode != "auto":
            return self.mode != "recompute"
        extends = node.parent is not None and tier.holds(node.parent)
        depth = node.depth if extends else (node.depth + 1) // 2
        busy = tier.num_arriving / max(1, tier.max_arriving)
        recompute, load = self._costs.block_seconds(depth, tier.costs.load)
        saved = recompute * recompute / (recompute + load) if recompute > 0 else 0.0
        return tier.policy.probability(node) * saved >= busy * tier.costs.store.predict(0, 1)
