"""Copies of blocks between tiers: the jobs that a plan asks for, and the interfaces of what carries them out.

Each tier below the device is one class with the methods of ``Tier``. Of the two tiers that a copy names, the lower one
does the work: it takes blocks over from the device and from any tier above it, and it brings blocks to the device.
Nothing is copied from one lower tier up to another one. Copies from other executors (peers) are the work of one more
class, whatever tier of the peer the blocks lie in.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as ReadOnlyList
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from pagewise_shared.block_hash import BlockHash, BlockName
from pagewise_shared.protocol import DEVICE, CancelCopies, Copied, RemoteTier, StepError, pack_int32s

Pairs = npt.NDArray[np.int32]
"""Source block and target block of each copy [n, 2]."""


@dataclass(slots=True)
class CopyJob:
    """One list of a step's copies, which has been checked.

    ``pairs``: if a target is named more than once, the last of its sources counts. ``peer``: the executor whose tier
    ``source`` is; None for a tier of this executor. ``names`` [n], of copies to a lower tier: the block hashes of the
    source blocks, None where unknown. ``stored_as`` [n], of copies from and to storage: what the blocks are called
    there.
    """

    epoch: int
    step: int
    source: int
    target: int
    pairs: Pairs
    peer: RemoteTier | None = None
    names: ReadOnlyList[BlockHash | None] = ()
    stored_as: ReadOnlyList[BlockName] = ()

    def confirmed(self, seconds: float, bad: Iterable[int] = (), error: StepError | None = None) -> Copied:
        """Return the message that confirms the job. ``bad``: target blocks that do not hold what they should."""
        return Copied(
            self.epoch,
            self.step,
            self.source,
            self.target,
            peer=self.peer.endpoint if self.peer is not None else "",
            elapsed_us=int(seconds * 1e6),
            bad=pack_int32s(bad),
            error=error,
        )


class Copier(Protocol):
    """Carries out copies. ``report`` is called, on any thread, when a job is done."""

    report: Callable[[Copied], None]

    def begin(self, job: CopyJob) -> None:
        """Begin a list of copies.

        Reads and writes of device memory are ordered with the work of the device: what is issued to it after this
        returns may overwrite the source blocks, and targets are written after all that was issued before. What is read
        of a tier above has been read when this returns, because the next list may write there.
        """
        ...


class Tier(Copier, Protocol):
    """A tier below the device, of ``num_blocks`` blocks, and the links between it and the tiers above.

    A tier that need not be fast reads whatever lies above it, and writes to the device, through a ``BlockStore``.
    """

    num_blocks: int

    def reset(self, epoch: int, *, keep: bool = False) -> None:
        """Void all jobs of older epochs, and forget the content of this tier unless ``keep``."""
        ...

    def names(self) -> dict[int, BlockHash]:
        """Return the block hashes of this tier's blocks, as far as known, once all earlier copies are done."""
        ...

    def names_of(self, blocks: list[int]) -> list[BlockHash | None]:
        """Return the block hashes of some blocks, None where unknown, once all earlier copies are done."""
        ...

    def read(self, blocks: list[int]) -> npt.NDArray[np.uint8]:
        """Return the content of blocks [n, bytes_per_block], once all earlier copies are done.

        Raises:
            OSError: a block does not hold what was stored in it.
        """
        ...

    def close(self) -> None:
        """Release all resources. Nothing is called afterwards."""
        ...


class PeerCopier(Copier, Protocol):
    """Copies blocks from the tiers of other executors, and lets them read the blocks of this one."""

    def begun(self, epoch: int, step: int) -> None:
        """Note that all copies of the steps up to this one have begun."""
        ...

    def cancel(self, epoch: int, step: int, peer: str) -> None:
        """Stop the copies of a step from this peer. Called on any thread, possibly before the step itself arrives."""
        ...

    def reset(self, epoch: int) -> None:
        """Void all jobs of older epochs, and what peers read under them."""
        ...


class StorageCopier(Copier, Protocol):
    """Copies blocks from and to storage that several executors share, where they have names."""

    def cancel(self, epoch: int, step: int) -> None:
        """Confirm the copies of a step at once, what is missing as bad. Called on any thread."""
        ...

    def reset(self) -> None:
        """Void all jobs."""
        ...


class LocalCopies(Protocol):
    """Copies inside the memory of the device."""

    def copy_blocks(self, pairs: Pairs) -> None:
        """Copy blocks to others. All sources are read before any target is written."""
        ...


class BlockCopier:
    """Passes each list of copies to the tier or the peer copier that carries it out, in the order of the plan.

    ``tiers``: the tiers below the device, by number. ``storages``: those without ids, by number. ``peers``: copies from
    other executors; None if this executor exchanges no blocks. ``names_of``: returns the block hashes of blocks of the
    device.
    """

    def __init__(
        self,
        device: LocalCopies,
        tiers: Mapping[int, Tier],
        names_of: Callable[[Iterable[int]], list[BlockHash | None]],
    ) -> None:
        self.peers: PeerCopier | None = None
        self.storages: Mapping[int, StorageCopier] = {}
        self._device = device
        self._tiers = tiers
        self._names_of = names_of
        self._report: Callable[[Copied], None] = lambda message: None

    def begin(self, epoch: int, step: int, jobs: Iterable[CopyJob]) -> None:
        """Begin a step's copies. When this returns, the step may be issued: see ``Copier.begin``."""
        for job in jobs:
            if job.peer is not None:
                if self.peers is not None:
                    self.peers.begin(job)
                else:  # no blocks are exchanged with peers: the copies have failed
                    self._report(job.confirmed(0.0, job.pairs[:, 1].tolist()))
            elif (storage := self.storages.get(max(job.source, job.target))) is not None:
                storage.begin(job)
            elif job.source == job.target:
                self._device.copy_blocks(job.pairs)
            else:
                if job.target != DEVICE:
                    names_of = self._names_of if job.source == DEVICE else self._tiers[job.source].names_of
                    job.names = names_of(job.pairs[:, 0].tolist())
                self._tiers[max(job.source, job.target)].begin(job)
        if self.peers is not None:
            self.peers.begun(epoch, step)

    def cancel(self, cancelled: CancelCopies) -> None:
        """Stop copies of a step. May be called on any thread."""
        if not cancelled.peer:
            if (storage := self.storages.get(cancelled.tier)) is not None:
                storage.cancel(cancelled.epoch, cancelled.step)
        elif self.peers is not None:
            self.peers.cancel(cancelled.epoch, cancelled.step, cancelled.peer)

    def reset(self, epoch: int, *, keep: bool) -> None:
        """Void all jobs of older epochs, and forget the content of all tiers unless ``keep``."""
        if self.peers is not None:
            self.peers.reset(epoch)
        for storage in self.storages.values():
            storage.reset()
        for tier in self._tiers.values():
            tier.reset(epoch, keep=keep)

    def report_to(self, report: Callable[[Copied], None]) -> None:
        """Call ``report``, on any thread, for every list of copies that is done."""
        self._report = report
        for tier in self._tiers.values():
            tier.report = report
        for storage in self.storages.values():
            storage.report = report
        if self.peers is not None:
            self.peers.report = report
