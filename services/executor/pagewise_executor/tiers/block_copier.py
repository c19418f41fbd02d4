"""Passes the copies of a plan, look-ups and drops to the tiers of the executor."""

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from pagewise_shared.protocol import (
    DEVICE,
    CancelCopies,
    Copied,
    DropStored,
    Found,
    Inventory,
    LayerGroup,
    LookUp,
    NamedBlocks,
    SetStoredBudgets,
    StoredDropped,
    StoredGone,
    pack_int32s,
)

from pagewise_executor.block_copies import CopyJob
from pagewise_executor.page_labels import KeptBlocks
from pagewise_executor.tiers.device import DeviceTier
from pagewise_executor.tiers.tier import CopiedBlocks, Tier

_MOST_HASHES = 1_000_000
"""The most hashes that an inventory carries, because it travels in one frame, the Hello."""
_MOST_UNWANTED = 1024


class BlockCopier:
    """Passes each list of copies, in the order of the plan, to the tier that makes them.

    The lower of the two tiers of a list makes the copies: it takes blocks from any tier above, and loads blocks to the
    device. Blocks never go up from one tier below the device to another. ``peers`` fetches blocks of other executors
    from any of their tiers.

    ``tiers``: by number, the nearest first; tiers below the device may be added before the first copy. ``groups``: of
    layers, if there are several.
    """

    def __init__(self, device: DeviceTier, groups: Sequence[LayerGroup] = ()) -> None:
        self._groups = groups
        self.tiers: dict[int, Tier] = {DEVICE: device}
        self.peers = Tier()
        self._block_size = device.block_size
        self._lock = threading.Lock()
        self._begun = (-1, -1)  # epoch and step
        self._unwanted: set[CancelCopies] = set()
        self._drops: list[DropStored] = []

    def begin(self, epoch: int, step: int, jobs: Iterable[CopyJob]) -> None:
        """Begin a step's copies. When this returns, the step may be issued: see ``Tier.begin``."""
        for job in jobs:
            lower = self.peers if job.peer is not None else self.tiers[max(job.source, job.target)]
            lower.begin(job, self.tiers[min(job.source, job.target)])
        self.peers.begun = epoch, step
        # A cancellation may overtake its step, and is kept until the step has begun. Because of the lock, ``cancel``
        # either sees the new ``_begun`` and finds the jobs itself, or has added to ``_unwanted`` before the read here.
        with self._lock:
            self._begun = epoch, step
            unwanted = {one for one in self._unwanted if (one.epoch, one.step) <= self._begun}
            self._unwanted -= unwanted
        for one in unwanted:
            self._cancel(one)
        self._drop_due()

    def cancel(self, cancelled: CancelCopies) -> None:
        """Confirm copies of a step soon. May be called on any thread, and before ``begin``: the step may still wait
        for earlier steps."""
        with self._lock:
            if (cancelled.epoch, cancelled.step) > self._begun and len(self._unwanted) < _MOST_UNWANTED:
                self._unwanted.add(cancelled)
        self._cancel(cancelled)

    def _cancel(self, cancelled: CancelCopies) -> None:
        tier = self.peers if cancelled.peer else self.tiers.get(cancelled.tier)
        if tier is not None:
            tier.cancel(cancelled)

    def look_up(self, message: LookUp) -> None:
        """Find out how much of a prefix is in a tier. May be called on any thread."""
        if (tier := self.tiers.get(message.tier)) is not None:
            tier.look_up(message, self._block_size, self._groups)

    def drop(self, message: DropStored) -> None:
        """Delete blocks of a tier once the message's step has begun. May be called on any thread."""
        with self._lock:
            self._drops.append(message)
        self._drop_due()

    def set_budgets(self, message: SetStoredBudgets) -> None:
        """Set the budgets of a tier. May be called on any thread."""
        if (tier := self.tiers.get(message.tier)) is not None:
            tier.set_budgets(message.budgets)

    def _drop_due(self) -> None:
        with self._lock:
            due = [one for one in self._drops if (one.epoch, one.step) <= self._begun]
            self._drops = [one for one in self._drops if (one.epoch, one.step) > self._begun]
        for one in due:
            if (tier := self.tiers.get(one.tier)) is not None:
                tier.drop(one, self._groups)

    def reset(self, epoch: int, *, keep: bool) -> None:
        """Void all jobs of older epochs, and forget all blocks with ids unless ``keep``."""
        for tier in (self.peers, *self.tiers.values()):
            tier.reset(epoch, keep=keep)
        with self._lock:
            self._begun = epoch, 0
        self._drop_due()

    def report_to(self, report: Callable[[Copied | Found | StoredDropped | StoredGone], None]) -> None:
        """Call ``report``, on any thread, for every list of copies that is done, every look-up and every drop."""
        for tier in (self.peers, *self.tiers.values()):
            tier.report = report

    def inventory(self, kept: KeptBlocks | None = None) -> Inventory | None:
        """Return the hashes of all blocks with ids, as many as an inventory carries; None if none is known.

        ``kept``: makes the inventory if there are several groups of layers.
        """
        if kept is not None:
            return kept.offer({number: tier.names() for number, tier in self.tiers.items()}, _MOST_HASHES)
        found: list[NamedBlocks] = []
        left = _MOST_HASHES
        for number, tier in self.tiers.items():
            if named := dict(islice(tier.names().items(), left)):
                found.append(NamedBlocks(number, pack_int32s(named), b"".join(named.values())))
                left -= len(named)
        return Inventory(tuple(found)) if found else None

    @property
    def num_errors(self) -> int:
        """The number of reads and writes that have failed."""
        return sum(tier.num_errors for tier in self.tiers.values())

    @property
    def copied(self) -> CopiedBlocks:
        """The blocks that were written to the tiers below the device."""
        total = CopiedBlocks()
        for number, tier in self.tiers.items():
            if number != DEVICE:
                total.add(tier.copied)
        return total

    def close(self) -> None:
        """End all copies, and release all tiers: a tier that reads or writes another tier comes before it."""
        for tier in (self.peers, *reversed(self.tiers.values())):
            tier.close()
