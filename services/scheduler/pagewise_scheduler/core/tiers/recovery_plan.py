"""How a sequence gets its KV back, how far it has come, and which KV is worth keeping for that in a tier below."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.requests.request import Request, RequestSequence
from pagewise_scheduler.core.tiers.cost_model import CostModel, Link, RecoveryEstimate, together
from pagewise_scheduler.core.tiers.tier import Location, Source, Tier

Method = Literal["device", "load", "recompute", "both"]
RecoveryMode = Literal["auto", "swap", "recompute", "both"]

_WORTH_BOTH = 0.975


HoldWindows = Callable[[Sequence[int]], list[list[Location]]]
"""Holds the windows of these groups of layers at some place; returns where the blocks of each group are."""


def _no_windows(groups: Sequence[int]) -> list[list[Location]]:
    return []


class Offer(NamedTuple):
    """The blocks ``start`` to ``stop`` of a prompt, which lie in one tier.

    ``hold``: of two indices in the prompt, holds the blocks between them in the tier, and returns their places.
    ``windows``: holds the windows at ``stop``, if the model has windowed layers.
    """

    source: Source
    start: int
    stop: int
    hold: Callable[[int, int], list[Location]]
    windows: HoldWindows = _no_windows

    def part(self, start: int, stop: int) -> "Offer":
        """The part of these blocks from ``start`` to ``stop``."""
        return Offer(self.source, start, stop, self.hold)


def compose(offers: Sequence[Offer]) -> list[Offer]:
    """The longest run of offered blocks, from the first one on. Each comes from the first of ``offers`` that has it."""
    parts: list[Offer] = []
    at = min(offer.start for offer in offers)
    while (rank := next((rank for rank, one in enumerate(offers) if one.start <= at < one.stop), -1)) >= 0:
        stop = min([offers[rank].stop, *(better.start for better in offers[:rank] if better.start > at)])
        parts.append(offers[rank].part(at, stop))
        at = stop
    return parts


@dataclass(slots=True)
class RecoveryPlan:
    """How blocks are to come back: ``parts`` of tiers, one after the other.

    ``start``: blocks on the device. No tier has the blocks between them and ``first``, which have to be computed.
    ``windows``: of a model with windowed layers: holds the windows at the end of the plan.
    """

    method: Method
    parts: list[Offer] = field(default_factory=list)
    start: int = 0
    estimate: RecoveryEstimate | None = None
    windows: HoldWindows | None = None

    @property
    def first(self) -> int:
        """Index in the table of the first block that comes from a tier."""
        return self.parts[0].start if self.parts else self.start

    @property
    def end(self) -> int:
        """Blocks that the sequence has afterwards."""
        return self.parts[-1].stop if self.parts else self.start

    @property
    def num_blocks(self) -> int:
        """Blocks that the tiers have."""
        return self.end - self.first

    @property
    def sources(self) -> list[str]:
        """The names of the tiers, each once."""
        return list(dict.fromkeys(part.source.name for part in self.parts))

    @property
    def dtypes(self) -> dict[str, str]:
        """The types of copies in fewer bits, by the names of the tiers that hold them."""
        return {part.source.name: part.source.link.dtype for part in self.parts if part.source.link.dtype}

    def blocks_of(self, end: int) -> dict[Link, int]:
        """How many of the blocks before ``end`` each link is to bring."""
        blocks = dict[Link, int]()
        for part in self.parts:
            if part.start < end:
                blocks[part.source.link] = blocks.get(part.source.link, 0) + min(part.stop, end) - part.start
        return blocks

    @property
    def peer(self) -> str | None:
        """The endpoint of the executor that blocks are fetched from, if some are."""
        return next((part.source.peer for part in self.parts if part.source.peer), None)

    @property
    def seconds(self) -> float:
        """The predicted time."""
        if self.estimate is None or self.method == "device":
            return 0.0
        return self.estimate.by_method[self.method]

    @property
    def seconds_with_step(self) -> float:
        """The same, with the step that follows a load."""
        after = self.estimate.after if self.estimate is not None and self.method in ("load", "both") else 0.0
        return self.seconds + after


@dataclass(slots=True, eq=False)
class Recovery:
    """One sequence that gets its KV back: a ``Receiver`` of the blocks that are loaded for it.

    Fields:
        plan: how. method "device": everything that is cached is still there.
        places: where its blocks are held, if any of them are loaded.
        back: places from here on are loaded or asked for. loading: blocks asked for that have not arrived.
        device_tokens: tokens found on the device. resumed: it had run before. first_start: nothing of its request
            had run before, so that others have computed the blocks that are found.
        began, ended: when it was admitted, and when everything that the tiers have was there, loaded or
            computed; NaN until then, for good if it was preempted or aborted before.
        loaded: tokens that came, by the name of the tier. link_seconds: the times of the transfers.
        behind_demotions: copies to lower tiers were under way when it began, which loads wait for.
        active: it has blocks to load or to compute before they are loaded. corrupt: a block came with wrong content, or
            not at all, so that the sequence has to start over.
        windows: where the blocks of windowed layers are held that are still to be asked for, by group.
    """

    sequence: RequestSequence
    plan: RecoveryPlan
    locations: list[Location]
    back: int
    device_tokens: int
    resumed: bool
    began: float
    loading: int = 0
    ended: float = float("nan")
    loaded: dict[str, int] = field(default_factory=dict)
    link_seconds: float = 0.0
    behind_demotions: bool = False
    first_start: bool = False
    active: bool = False
    corrupt: bool = False
    windows: list[list[Location]] = field(default_factory=list)

    @property
    def request(self) -> Request:
        """The request of the sequence."""
        return self.sequence.request

    @property
    def waits(self) -> bool:
        """Whether the blocks are still of use to it."""
        return self.active

    def came(self, locations: Sequence[Location], bad: Sequence[Location], seconds: float) -> None:
        """Blocks of the recovery have been copied."""
        self.loading -= len(locations)
        if bad:
            self.corrupt = True
        elif self.active:
            name, is_window = locations[0].source.name, locations[0].group
            num_tokens = 0 if is_window else len(locations) * self.sequence.table.block_size
            self.loaded[name] = self.loaded.get(name, 0) + num_tokens
            self.link_seconds += seconds

    @property
    def method(self) -> Method:
        """The method of the plan."""
        return self.plan.method

    @property
    def loaded_tokens(self) -> int:
        """Tokens that came from tiers."""
        return sum(self.loaded.values())

    @property
    def origin(self) -> str:
        """Where most of the KV lay that the sequence was to get back, whether it was brought from there or computed
        again: one of ``SOURCES``.

        "device": nothing of it was known to lie elsewhere.
        """
        parts = self.plan.parts
        return max(parts, key=lambda part: part.stop - part.start).source.name if parts else "device"

    @property
    def estimate(self) -> RecoveryEstimate | None:
        """The predicted cost of each method; None if there was nothing to recover."""
        return self.plan.estimate

    @property
    def predicted(self) -> float:
        """Seconds the chosen method was predicted to take."""
        return self.plan.seconds

    @property
    def first(self) -> int:
        """Index in the table of the first block that comes from a tier."""
        return self.plan.first

    @property
    def last_part(self) -> Offer:
        """The part of the block that is asked for next, or of the first one when all are."""
        at = self.first + max(0, self.back - 1)
        return next(part for part in self.plan.parts if at < part.stop)

    @property
    def link(self) -> Link:
        """The link over which the rest comes, or one equivalent to several."""
        return together(self.plan.blocks_of(self.first + max(1, self.back)))[0]


class RecoveryPolicy:
    """Decides by the costs, unless ``mode`` names a method."""

    def __init__(self, costs: CostModel, mode: RecoveryMode = "auto") -> None:
        self.mode: RecoveryMode = mode
        self._costs = costs

    def method(self, estimate: RecoveryEstimate) -> Method:
        """The method to get blocks back at these costs."""
        if self.mode == "swap":
            return "load"
        if self.mode != "auto" and estimate.by_method[self.mode] < inf:
            return self.mode
        load, both = estimate.load + estimate.after, estimate.both + estimate.after
        # Both at once keeps the executor and the link busy: it has to win by more than the noise of the estimate.
        if both < _WORTH_BOTH * min(load, estimate.recompute):
            return "both"
        return "load" if load <= estimate.recompute else "recompute"

    def note(self, plans: Iterable[RecoveryPlan]) -> None:
        """Note the methods and links that plans pass over, from which nothing is learned."""
        links = dict[Link, None]()  # each counts once, however many of the plans name it
        for plan in plans if self.mode == "auto" else ():
            if plan.method != "both":
                self._costs.both_passed_over()
            if plan.method == "recompute":
                links |= dict.fromkeys(plan.blocks_of(plan.end))
        for link in links:
            link.passed_over()

    def is_worth_copying(self, node: CachedBlock, tier: Tier) -> bool:
        """Whether copying the prefix that ends with ``node`` to ``tier`` is worth it, block by block on average.

        The copies save, if the prefix is used again, the time that recovering from both ends saves over computing
        alone. They cost their time on the link, by how busy the link is: an idle one costs nothing.
        """
        if self.mode != "auto":
            return self.mode != "recompute"
        extends = node.parent is not None and tier.holds(node.parent)
        depth = node.depth if extends else (node.depth + 1) // 2
        busy = tier.num_arriving / max(1, tier.max_arriving)
        recompute, load = self._costs.block_seconds(depth, tier.costs.load)
        saved = recompute * recompute / (recompute + load) if recompute > 0 else 0.0
        return tier.policy.probability(node) * saved >= busy * tier.costs.store.predict(0, 1)
