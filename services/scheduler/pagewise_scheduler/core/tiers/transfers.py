"""The copies between tiers that an executor was asked for, until it confirms them."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pagewise_shared.protocol import DEVICE, HASH_TIERS, BlockCopies, Copied, pack_int32s, unpack_int32s

from pagewise_scheduler.core.tiers.copy_costs import Link
from pagewise_scheduler.core.tiers.cost_model import CostModel
from pagewise_scheduler.core.tiers.hashed import MAX_WRITING, Storage
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager
from pagewise_scheduler.core.tiers.peer import BlockPlace, RecoverySource

_LATE = 4.0
"""A list of copies is late once it takes so many times what was predicted: only one that is lost is late by much."""
_MOST_RECENT = 64
"""Lists of copies that are remembered for those who watch."""
_PEER_GRACE = 5.0
"""Seconds that copies from a peer may take beside that: there may be a connection to be made first."""


class TransferKey(NamedTuple):
    """Which list of copies: of which step, between which tiers, and from which peer (its endpoint), "" for own
    tiers."""

    step: int
    source: int
    target: int
    peer: str


class Receiver(Protocol):
    """Whom blocks come to that are pinned in ``source``."""

    @property
    def source(self) -> RecoverySource:
        """Where they come from."""
        ...


@dataclass(slots=True)
class Load:
    """Blocks of one step that come to the device from one tier: whose they are, their places, and the device blocks
    they go to.

    ``epoch``: of the peer whose blocks were pinned. ``predicted``: seconds for which the blocks occupy the link.
    """

    link: Link
    epoch: int = 0
    parts: list[tuple[Receiver, list[BlockPlace], list[int]]] = field(default_factory=list)
    num_blocks: int = 0
    predicted: float = 0.0

    def pairs(self) -> bytes:
        """Source block and target block of each copy (int32 bytes)."""
        pairs: list[int] = []
        for _, places, blocks in self.parts:
            for place, block in zip(places, blocks, strict=True):
                pairs += (len(pairs) // 2 if place.tier in HASH_TIERS else place.block, block)
        return pack_int32s(pairs)


Loads = dict[TransferKey, Load]
"""What one step brings to the device."""


class _UnderWay(NamedTuple):
    """``due``: when it should have been confirmed. ``load``: what it brings to the device, if it does."""

    due: float
    num_blocks: int
    load: Load | None
    pairs: bytes


class _Recent(NamedTuple):
    """A list of copies, and when it was asked for. ``peer``: as in ``TransferKey``."""

    time: float
    source: int
    target: int
    peer: str
    pairs: bytes


class Transfers:
    """All copies under way of one executor. ``num_loading``: blocks that are to come to the device. ``now``: when the
    step is planned that asks for copies next, in seconds."""

    def __init__(self, kv: KVCacheManager, costs: CostModel, storages: Mapping[int, Storage]) -> None:
        """``storages``: that the executor has, by number."""
        self.num_loading, self.now = 0, 0.0
        self._storages = storages
        self._kv = kv
        self._costs = costs
        # Several lists of one step between the same tiers are confirmed in their order.
        self._under_way: dict[TransferKey, deque[_UnderWay]] = {}
        self._cancelled: dict[tuple[int, str, int], None] = {}
        self._recent: deque[_Recent] = deque(maxlen=_MOST_RECENT)

    def requested(self, step: int, copies: Iterable[BlockCopies], loads: dict[TransferKey, Load]) -> None:
        """A plan asks for ``copies``; those to the device are ``loads``."""
        now = self.now
        for one in copies:
            peer = one.peer.endpoint if one.peer is not None else ""
            self._recent.append(_Recent(now, one.source, one.target, peer, one.pairs))
            if one.source == one.target and not peer:
                continue  # inside the device: done with the step, and not confirmed
            key = TransferKey(step, one.source, one.target, peer)
            due = now + _LATE * self._predicted(key) + (_PEER_GRACE if _cancellable(key) else 0.0)
            entry = _UnderWay(due, len(one.pairs) // 8, loads.get(key), one.pairs)
            self._under_way.setdefault(key, deque()).append(entry)

    def _predicted(self, key: TransferKey) -> float:
        """Seconds until a list of copies is done that was just asked for, with those before it."""
        if key.target in HASH_TIERS:
            return self._storages[key.target].costs.store.predict(1, MAX_WRITING)
        if key.peer:
            link = self._costs.link(key.peer)
        elif key.source in HASH_TIERS:
            link = self._storages[key.source].costs.load
        elif key.target == DEVICE:
            link = self._costs.tiers[key.source].load
        else:
            tier = self._kv.cache_tier(key.target)
            assert tier is not None
            return tier.costs.store.predict(1, tier.num_arriving)
        return link.seconds(link.num_loading)

    def begin(self, load: Load, count: int) -> None:
        """So many blocks more are to come to the device by a load; a plan that asks for it follows."""
        load.num_blocks += count
        load.predicted += load.link.asked(count, self.now)
        self.num_loading += count

    def confirmed(self, message: Copied) -> Load | None:
        """A list of copies has been made; returns what it has brought to the device, if it did. Unknown ones are
        ignored."""
        key = TransferKey(message.step, message.source, message.target, message.peer)
        entries = self._under_way.get(key)
        if not entries:
            return None
        entry = entries.popleft()
        if not entries:
            del self._under_way[key]
        if entry.load is not None:
            self._end(entry.load, message.elapsed_us * 1e-6)
        elif key.target in HASH_TIERS:
            if not message.bad:
                self._storages[key.target].costs.store.observe(message.elapsed_us * 1e-6, 1, entry.num_blocks)
        elif (tier := self._kv.cache_tier(key.target)) is not None:
            tier.arrived(entry.num_blocks)
            tier.costs.store.observe(message.elapsed_us * 1e-6, 1, entry.num_blocks)
        return entry.load

    def _end(self, load: Load, seconds: float = 0.0) -> None:
        """What was held for a load is let go of. ``seconds``: that its link took; 0: nobody knows."""
        self.num_loading -= load.num_blocks
        load.link.done(load.num_blocks, load.predicted, seconds)
        for owner, places, blocks in load.parts:
            owner.source.release(reversed(places))
            self._kv.drop(blocks, None)

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
        under_way = ((*key[1:], one.pairs) for key, entries in self._under_way.items() for one in entries)
        recent = (one[1:] for one in self._recent if one.time >= since)
        for source, target, peer, pairs in (*under_way, *recent):
            if len(found) >= most:
                break
            blocks = unpack_int32s(pairs[: 8 * most]) if tier in (source, target) else None
            if blocks is not None and target == tier:
                found.update(blocks[1::2])
            if blocks is not None and source == tier and not peer:  # else they are a peer's
                found.update(blocks[::2])
        return found

    # ---- copies that take too long -------------------------------------------------------------------

    @property
    def oldest_due(self) -> float | None:
        """When the first of the copies that have not been confirmed should have been; None: there are none."""
        return min((entry.due for entries in self._under_way.values() for entry in entries), default=None)

    def from_peers(self) -> dict[tuple[int, str, int], list[Load]]:
        """What comes from peers and storage, by step, endpoint and tier."""
        found: dict[tuple[int, str, int], list[Load]] = {}
        for key, entries in self._under_way.items():
            if key.target == DEVICE and (name := _cancellable(key)) is not None:
                found.setdefault(name, []).extend(one.load for one in entries if one.load is not None)
        return found

    def cancel_unless(self, is_waited_for: Callable[[Receiver], bool]) -> None:
        """Cancel what comes from peers and nobody waits for."""
        for key, loads in self.from_peers().items():
            if not any(is_waited_for(part[0]) for load in loads for part in load.parts):
                self._cancelled[key] = None

    def take_cancelled(self) -> list[tuple[int, str, int]]:
        """Copies from peers that nobody waits for any more, as (step, endpoint, tier), each told once."""
        if not self._cancelled:
            return []
        cancelled, self._cancelled = list(self._cancelled), {}
        return cancelled

    def late_peers(self, now: float) -> list[tuple[int, str, int]]:
        """Copies from peers and storage that should have been confirmed before ``now``, by step, endpoint and tier."""
        late = {
            name
            for key, entries in self._under_way.items()
            if (name := _cancellable(key)) is not None and any(entry.due < now for entry in entries)
        }
        return sorted(late)


def _cancellable(key: TransferKey) -> tuple[int, str, int] | None:
    """The step, the endpoint and the tier by which a list of copies is cancelled; None: it cannot be."""
    if key.peer:
        return key.step, key.peer, DEVICE
    return next(((key.step, "", tier) for tier in (key.source, key.target) if tier in HASH_TIERS), None)
