"""The two interfaces of tiers: a ``Source`` brings blocks to the device, and a ``Tier`` also takes blocks over.

A block's location is a tier and a reference there: an id, or the block's name where the tier has no ids. Sequences
compute on the device, which has a separate class (``BlockPool``) and neither of the two interfaces. The other tiers
form a chain; a block that one tier evicts may go to a lower tier.

- ``HostTier``, for host memory, is *exact*: the prefix tree knows which blocks it has, and pinned blocks stay.
- ``HashedTier``, for the disk cache and the store: the scheduler looks its blocks up by way of an executor, and the
  tier may forget any block. Several executors may share it.
- ``PeerTiers``, for the tiers of another executor, are exact, and only read: they are a ``Source`` and no ``Tier``.

A new kind of tier is a class with the methods of ``Tier``; ``KVCacheManager`` makes one for each tier that an executor
has.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

from pagewise_shared.block_hash import BlockName
from pagewise_shared.protocol import BlockCopies, RemoteTier, tier_name

from pagewise_scheduler.core.memory.eviction import EvictionPolicy
from pagewise_scheduler.core.memory.prefix_tree import NOWHERE, CachedBlock
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.tiers.cost_model import Link, TierCosts

BlockCopy = tuple[int, int, int, int | CachedBlock, int]
"""Source tier, source block, target tier, target block, group of layers: the content has to be copied before a step
writes into either block. The target block is a node of the prefix tree where the target tier has no ids. A plain tuple,
because memory under pressure makes one for every block."""

Copies = Sequence[BlockCopy]
"""Copies in an order in which each of them reads the right content."""


class Location(NamedTuple):
    """The location of a block that is held for a recovery: the number of the tier, and the id or the name there.

    ``node``: the block in the prefix tree of the executor that holds it, if it is in one; of a snapshot, its end.
    ``group``: the group of layers.
    """

    source: "Source"
    tier: int
    block: int = NOWHERE
    node: CachedBlock | None = None
    name: BlockName | None = None
    group: int = 0


class Source:
    """A tier from which blocks come to the device. The kinds of tiers override its methods.

    ``link``: the costs of copies to the device. ``peer``, ``epoch``: block endpoint and epoch of the executor that owns
    the tier; an empty ``peer`` means this executor. ``is_far``: copies may fail or take long, so they can be cancelled,
    and few blocks are requested at a time.
    """

    name: str
    link: Link
    peer: str = ""
    epoch: int = 0
    is_far: bool = False

    def unhold(self, locations: Iterable[Location]) -> None:
        """Release blocks that were held, the last one of a sequence first."""

    def remote(self, tier: int) -> RemoteTier | None:
        """How a copy from there names the executor that has the tier; None: it is this executor."""
        return None

    def came(
        self, locations: Sequence[Location], bad: Sequence[Location], request: Request | None
    ) -> Iterable[CachedBlock]:
        """Count the blocks that have come for a request, or ahead of any (None), of which ``bad`` do not have the right
        content. Returns the nodes of this executor's tree whose content is corrupt."""
        raise NotImplementedError

    def has_failed(self, num_bad: int, num_blocks: int) -> bool:
        """Whether the tier is to be left alone for a while, after ``num_bad`` of ``num_blocks`` blocks were bad."""
        return False


class Tier(Source):
    """A tier below the device.

    ``below``: the next tier down. ``costs``: of copies between it and the device. ``policy``: predicts the next use of
    a block. ``num_arriving``: blocks whose copies to it are under way; at ``max_arriving`` it begins no more prefixes.
    """

    number: int
    below: "Tier | None"
    costs: TierCosts
    policy: EvictionPolicy
    num_arriving: int
    max_arriving: int
    demotion: "DemotionPolicy | None"

    @property
    def name(self) -> str:  # type: ignore[override]
        """For people and metrics."""
        return tier_name(self.number)

    @property
    def link(self) -> Link:  # type: ignore[override]
        """The cost of copies from it to the device."""
        return self.costs.load

    def wants(self, node: CachedBlock) -> bool:
        """Whether the tier should take the prefix that ends with ``node``, block by block."""
        if self.num_arriving >= self.max_arriving:
            return False
        return self.demotion is None or self.demotion.is_worth_copying(node, self)

    def holds(self, node: CachedBlock) -> bool:
        """Whether the tier has the block, as far as the scheduler knows."""
        raise NotImplementedError

    def take_over(self, node: CachedBlock, source: int, copies: list[BlockCopy]) -> bool:
        """Keep the content of ``node``, whose block the tier ``source`` is about to evict; False: the tier does not.

        ``copies``: the list to which the copies are added.
        """
        raise NotImplementedError

    def arrived(self, copies: BlockCopies, bad: Collection[int], seconds: float) -> None:
        """The executor has made ``copies`` to the tier, except to the targets ``bad``."""
        raise NotImplementedError


class DemotionPolicy(Protocol):
    """Decides which prefixes a tier takes over from the tiers above."""

    def is_worth_copying(self, node: CachedBlock, tier: Tier) -> bool:
        """Whether the prefix that ends with ``node`` is worth copying to ``tier``, block by block from its end on."""
        ...
