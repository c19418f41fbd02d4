"""The copies between tiers that an executor was asked for, until it confirms them."""

from collections import deque
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pagewise_shared.block_hash import BlockName, pack_names
from pagewise_shared.protocol import DEVICE, BlockCopies, Copied, pack_int32s, unpack_int32s

from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.tiers.cost_model import CostModel, Link
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager
from pagewise_scheduler.core.tiers.tier import Location

_LATE = 4.0
"""A list of copies is late after this multiple of the predicted seconds, which only a lost list exceeds by much."""
_MOST_RECENT = 64
"""Lists of copies that are remembered for consoles."""
_FAR_GRACE = 5.0
"""Further seconds for copies with a far tier or a peer: there may be a connection to be made first."""


class TransferKey(NamedTuple):
    """Which list of copies: of which step, between which tiers, from which peer (its endpoint), "" for own tiers, and
    of which group of layers."""

    step: int
    source: int
    target: int
    peer: str
    group: int = 0


class Cancelled(NamedTuple):
    """Copies of a step to be confirmed at once: from a peer (its endpoint), or from and to the own ``tier``."""

    step: int
    peer: str
    tier: int


class Receiver(Protocol):
    """The recovery or prefetch to which blocks come."""

    @property
    def request(self) -> Request | None:
        """The request for which the blocks come; None: they come ahead of any."""
        ...

    @property
    def waits(self) -> bool:
        """Whether the blocks are still of use to it."""
        ...

    def came(self, locations: Sequence[Location], bad: Sequence[Location], seconds: float) -> None:
        """The blocks at ``locations`` have been copied, in a list that took ``seconds``; the content of ``bad`` is
        wrong."""
        ...


@dataclass(slots=True)
class Load:
    """One list of copies to the device: the blocks that one step brings from one tier.

    ``parts``: for each receiver, the places of its blocks and the device blocks into which they are copied. ``epoch``:
    of the peer whose blocks are held. ``num_blocks``: blocks of the full layers that have as many bytes. ``predicted``:
    seconds for which the blocks occupy the link.
    """

    link: Link
    epoch: int = 0
    parts: list[tuple[Receiver, list[Location], list[int]]] = field(default_factory=list)
    num_blocks: int = 0
    predicted: float = 0.0

    def is_missed(self, bad: Set[int]) -> bool:
        """Whether a receiver waits for one of the blocks ``bad``; if none does, the copy may have been cancelled."""
        return any(receiver.waits and not bad.isdisjoint(blocks) for receiver, _, blocks in self.parts)

    def copies(self, key: TransferKey) -> BlockCopies:
        """How a plan asks for it."""
        pairs: list[int] = []
        names: list[BlockName] = []
        for _, locations, blocks in self.parts:
            for location, block in zip(locations, blocks, strict=True):
                if location.name is None:
                    pairs += (location.block, block)
                else:
                    pairs += (len(names), block)
                    names.append(location.name)
        remote = self.parts[0][1][0].source.remote(key.source)
        return BlockCopies(key.source, key.target, pack_int32s(pairs), remote, pack_names(names), key.group)


Loads = dict[TransferKey, Load]
"""All lists of copies to the device that one step asks for."""


class _UnderWay(NamedTuple):
    """A list of copies. ``due``: when it should have been confirmed. ``load``: set if its target is the device."""

    due: float
    copies: BlockCopies
    load: Load | None


class Transfers:
    """All copies of one executor that are under way. ``num_loading``: blocks on their way to the device. ``now``: the
    time at which the current step is planned, in seconds."""

    def __init__(self, kv: KVCacheManager, costs: CostModel) -> None:
        self.num_loading, self.now = 0, 0.0
        self._kv = kv
        self._costs = costs
        # Several lists of one step between the same tiers are confirmed in their order.
        self._under_way: dict[TransferKey, deque[_UnderWay]] = {}
        self._cancelled: dict[Cancelled, None] = {}
        self._recent: deque[tuple[float, BlockCopies]] = deque(maxlen=_MOST_RECENT)

    def requested(self, step: int, copies: Iterable[BlockCopies], loads: dict[TransferKey, Load]) -> None:
        """A plan asks for ``copies``; ``loads`` are the copies to the device."""
        now = self.now
        for one in copies:
            peer = one.peer.endpoint if one.peer is not None else ""
            self._recent.append((now, one))
            if one.source == one.target and not peer:
                continue  # inside the device: done with the step, and not confirmed
            key = TransferKey(step, one.source, one.target, peer, one.group)
            due = now + _LATE * self._predicted(key) + (_FAR_GRACE if self._cancellable(key) else 0.0)
            self._under_way.setdefault(key, deque()).append(_UnderWay(due, one, loads.get(key)))

    def _predicted(self, key: TransferKey) -> float:
        """Seconds until a list of copies that was just asked for is done, after the lists before it."""
        if key.target != DEVICE:
            tier = self._kv.lower_tier(key.target)
            return tier.costs.store.predict(1, tier.num_arriving)
        link = self._costs.link(key.peer) if key.peer else self._costs.tiers[key.source].load
        return link.seconds(link.num_loading)

    def _cancellable(self, key: TransferKey) -> Cancelled | None:
        """How a list of copies is cancelled; None: it is sure to be made."""
        if key.peer:
            return Cancelled(key.step, key.peer, DEVICE)
        tier = max(key.source, key.target)
        return Cancelled(key.step, "", tier) if self._kv.lower_tier(tier).is_far else None

    def ask(
        self, step: int, requested: Loads, receiver: Receiver, locations: list[Location], blocks: list[int]
    ) -> None:
        """Let the plan of ``step`` bring the blocks held at ``locations`` of one tier to these blocks of the device."""
        source, group = locations[0].source, locations[0].group
        count = self._kv.num_full_blocks(len(locations), group)
        key = TransferKey(step, locations[0].tier, DEVICE, source.peer, group)
        load = requested.setdefault(key, Load(source.link, source.epoch))
        # Pinned, so that no other sequence gets a block before its content has arrived, even if the receiver ends.
        self._kv.pin(blocks, group)
        load.parts.append((receiver, locations, blocks))
        load.num_blocks += count
        load.predicted += load.link.asked(count, self.now)
        self.num_loading += count

    def confirmed(self, message: Copied, bad: Collection[int]) -> Load | None:
        """The executor has made a list of copies, except to the targets ``bad``. Returns the load, if the list's target
        is the device. Unknown lists are ignored."""
        key = TransferKey(message.step, message.source, message.target, message.peer, message.group)
        entries = self._under_way.get(key)
        if not entries:
            return None
        entry = entries.popleft()
        if not entries:
            del self._under_way[key]
        seconds = message.elapsed_us * 1e-6
        if entry.load is not None:
            self._end(entry.load, seconds)
        elif key.target != DEVICE:
            self._kv.lower_tier(key.target).arrived(entry.copies, bad, seconds)
        return entry.load

    def _end(self, load: Load, seconds: float = 0.0) -> None:
        """Release the source and target blocks of a load. ``seconds``: the time that its link took; 0: unknown."""
        self.num_loading -= load.num_blocks
        load.link.done(load.num_blocks, load.predicted, seconds)
        for _, locations, blocks in load.parts:
            locations[0].source.unhold(reversed(locations))
            self._kv.unpin(blocks, locations[0].group)

    def clear(self) -> None:
        """The executor is gone or reset: nothing is under way any more."""
        for entries in self._under_way.values():
            for entry in entries:
                if entry.load is not None:
                    self._end(entry.load)
        self._under_way.clear()
        self._cancelled.clear()

    def blocks(self, tier: int, since: float, most: int) -> set[int]:
        """The blocks of a tier that copies read or write which are under way, or were asked for since a time, as far as
        they were remembered; not many more than ``most``."""
        found: set[int] = set()
        under_way = (entry.copies for entries in self._under_way.values() for entry in entries)
        for one in (*under_way, *(copies for time, copies in self._recent if time >= since)):
            own_source = one.source if one.peer is None else None
            for number, first in ((one.target, 1), (own_source, 0)) if not one.group else ():
                if number == tier and len(found) < most:
                    found.update(unpack_int32s(one.pairs[: 8 * most])[first::2])
        return found

    # ---- copies that take too long -------------------------------------------------------------------

    @property
    def oldest_due(self) -> float | None:
        """When the first of the copies that have not been confirmed should have been; None: there are none."""
        return min((entry.due for entries in self._under_way.values() for entry in entries), default=None)

    def from_afar(self) -> dict[Cancelled, list[Load]]:
        """The loads from peers and from far tiers, by how they are cancelled."""
        found: dict[Cancelled, list[Load]] = {}
        for key, entries in self._under_way.items():
            if key.target == DEVICE and (one := self._cancellable(key)) is not None:
                found.setdefault(one, []).extend(entry.load for entry in entries if entry.load is not None)
        return found

    def cancel_unneeded(self) -> None:
        """Cancel the loads from peers and far tiers whose receivers do not wait for them any more."""
        for one, loads in self.from_afar().items():
            if not any(receiver.waits for load in loads for receiver, _, _ in load.parts):
                self._cancelled[one] = None

    def take_cancelled(self) -> list[Cancelled]:
        """Copies to be cancelled, each returned once."""
        if not self._cancelled:
            return []
        cancelled, self._cancelled = list(self._cancelled), {}
        return cancelled

    def late(self, now: float) -> list[Cancelled]:
        """Copies that may be cancelled and should have been confirmed before ``now``."""
        late = {
            one
            for key, entries in self._under_way.items()
            if any(entry.due < now for entry in entries) and (one := self._cancellable(key)) is not None
        }
        return sorted(late)
