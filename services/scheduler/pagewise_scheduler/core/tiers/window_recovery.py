"""Recoveries of models with windowed layers: a sequence begins where some tier has the windows, or computes.

The blocks of the full layers come from any tier, as in other models. But a sequence that loads them needs the windows
at their end as well, so its recovery ends at a place where one source has them. The method is to load everything, or to
compute everything from the last place on where the device has the windows. Both at once would be of no use: the windows
where the two meet lie nowhere.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile
from math import inf
from operator import attrgetter
from typing import NamedTuple

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.tiers.cost_model import CostModel, Link, RecoveryEstimate, together
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager
from pagewise_scheduler.core.tiers.recovery_plan import HoldWindows, Offer, RecoveryPlan, RecoveryPolicy, compose
from pagewise_scheduler.core.tiers.tier import Location, Source


class ResumePoint(NamedTuple):
    """A place where a sequence can begin: behind the first ``end`` blocks of its prompt, with windows of ``source``.

    ``hold``: holds them. ``offer``: blocks of full layers that the source has; None: all of them lie in the tiers of
    this executor.
    """

    source: Source
    end: int
    hold: HoldWindows
    offer: Offer | None = None


class WindowPlanner:
    """Makes the plans of one executor. ``offers_below``: returns the offers of blocks of its own lower tiers, of which
    the first has a number. ``queued``: returns how many blocks a link has before it."""

    def __init__(
        self,
        kv: KVCacheManager,
        costs: CostModel,
        policy: RecoveryPolicy,
        offers_below: Callable[[int, Sequence[CachedBlock]], list[Offer]],
        queued: Callable[[Link], int],
    ) -> None:
        self._kv, self._costs, self._policy = kv, costs, policy
        self._offers_below, self._queued = offers_below, queued

    def plan(self, start: int, path: Sequence[CachedBlock], resume: ResumePoint, share: float) -> RecoveryPlan | None:
        """A plan to begin at ``resume``; None: some blocks before it lie nowhere.

        ``start``: the blocks behind which the device can begin. ``path``: the blocks behind these in the prefix tree.
        ``share``: the part of a step's token budget that the sequence would get for computing.
        """
        path = path[: resume.end - start]
        at = start + sum(1 for _ in takewhile(lambda node: node.block >= 0, path))
        offers = self._offers_below(at, [*takewhile(attrgetter("num_tiers"), path[at - start :])])
        offers += [resume.offer] if resume.offer is not None else []
        offers.sort(key=lambda offer: offer.source.link.predict(0, 1))
        offers = [one.part(at, one.stop) if one.start < at else one for one in offers if one.stop > at]
        parts = [Offer(resume.source, at, at, _nothing)]
        if at < resume.end:
            if not any(one.start == at for one in offers):
                return None
            found = [one for one in compose(offers) if one.start < resume.end]
            parts = [one.part(one.start, min(one.stop, resume.end)) for one in found]
        plan = RecoveryPlan("load", parts, start, windows=resume.hold)
        if plan.end < resume.end:
            return None
        node = path[-1] if start + len(path) == resume.end else None
        blocks = plan.blocks_of(plan.end)
        link = resume.source.link
        blocks[link] = blocks.get(link, 0) + self._kv.num_lacking_in_windows(node, resume.end)
        plan.estimate = self._estimate(start, resume.end, blocks, share)
        plan.method = self._policy.method(plan.estimate)
        return plan

    def _estimate(self, start: int, end: int, blocks: dict[Link, int], share: float) -> RecoveryEstimate:
        """The costs of loading ``blocks`` over each link, and of computing the blocks from ``start`` to ``end``."""
        costs, size = self._costs, self._kv.block_size
        link, queued = together(blocks, self._queued)
        after = max(costs.small_step, costs.compute_seconds(end * size, 1))
        recompute = costs.compute_seconds(start * size, (end - start) * size, share)
        return RecoveryEstimate(link.seconds(sum(blocks.values()), queued), recompute, inf, after)


def _nothing(start: int, stop: int) -> list[Location]:
    return []
