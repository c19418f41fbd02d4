"""Copies of blocks between tiers: what a plan asks for, and who carries it out.

Each tier below the device is one class with the methods of ``Tier``. Of the two tiers that a copy names, the lower one
does the work: it takes blocks over from the device and from any tier above it, and it brings blocks to the device.
Nothing is copied from one lower tier up to another one. Copies from peers are one more, whatever tier of theirs the
blocks lie in.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as ReadOnlyList
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from pagewise_shared.block_hash import BlockHash
from pagewise_shared.protocol import DEVICE, CancelCopies, Copied, RemoteTier, StepError, pack_int32s

Pairs = npt.NDArray[np.int32]
"""[n, 2]: source block and target block."""


@dataclass(slots=True)
class CopyJob:
    """One list of a step's copies, checked.

    ``pairs``: if a target is named more than once, the last of its sources counts. ``peer``: whose tier the source is,
    None: an own one. ``names`` [n], of copies to a lower tier: what the source blocks are called, None where that is
    not known.
    """

    epoch: int
    step: int
    source: int
    target: int
    pairs: Pairs
    peer: RemoteTier | None = None
    names: ReadOnlyList[BlockHash | None] = ()

    def confirmed(self, seconds: float, bad: Iterable[int] = (), error: StepError | None = None) -> Copied:
        """What tells the scheduler that it is done; ``bad``: target blocks that do not hold what they should."""
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
    """Carries out copies. ``report``: called on any thread when a job is done."""

    report: Callable[[Copied], None]

    def begin(self, job: CopyJob) -> None:
        """Begin a list of copies.

        What it reads of the device has been read when this returns, as far as the device's own order goes; what it
        writes there is written after all that the device was given before. What it reads of a tier above has been read
        when this returns, because the next list may write there.
        """
        ...


class Tier(Copier, Protocol):
    """A tier below the device, of ``num_blocks`` blocks, and the links between it and the tiers above.

    A tier that need not be fast reads whatever lies above it, and writes to the device, through a ``BlockStore``.
    """

    num_blocks: int

    def reset(self, epoch: int, *, keep: bool = False) -> None:
        """Whatever is asked for under an older epoch is void, and so is what lies here, unless ``keep``."""
        ...

    def names(self) -> dict[int, BlockHash]:
        """What all blocks here are called, as far as that is known, once all copies asked for before are done."""
        ...

    def names_of(self, blocks: list[int]) -> list[BlockHash | None]:
        """What some blocks are called, None where that is not known, once all copies asked for before are done."""
        ...

    def read(self, blocks: list[int]) -> npt.NDArray[np.uint8]:
        """The content of blocks [n, bytes_per_block], once all copies asked for before are done.

        Raises:
            OSError: a block is not what was stored there.
        """
        ...

    def close(self) -> None:
        """Nothing will be asked of it any more."""
        ...


class PeerCopier(Copier, Protocol):
    """Copies blocks from the tiers of other executors, and lends its own to them."""

    def begun(self, epoch: int, step: int) -> None:
        """All copies of the steps up to this one have been begun."""
        ...

    def cancel(self, epoch: int, step: int, peer: str) -> None:
        """What that step copies from there is not wanted any more; comes from any thread, and maybe before its step."""
        ...

    def reset(self, epoch: int) -> None:
        """Whatever was lent or asked for under an older epoch is void."""
        ...


class LocalCopies(Protocol):
    """The device's own memory, as far as copies inside it go."""

    def copy_blocks(self, pairs: Pairs) -> None:
        """Copy blocks to others, all sources read before any target is written."""
        ...


class BlockCopier:
    """Hands each list of copies to whoever carries it out, in the order of the plan.

    ``tiers``: those below the device, by number. ``peers``: copies from other executors, None: nobody does.
    ``names_of``: what blocks of the device are called.
    """

    def __init__(
        self,
        device: LocalCopies,
        tiers: Mapping[int, Tier],
        names_of: Callable[[Iterable[int]], list[BlockHash | None]],
    ) -> None:
        self.peers: PeerCopier | None = None
        self._device = device
        self._tiers = tiers
        self._names_of = names_of
        self._report: Callable[[Copied], None] = lambda message: None

    def begin(self, epoch: int, step: int, jobs: Iterable[CopyJob]) -> None:
        """Begin a step's copies. When this returns, nothing of the device is needed any more that a step may write."""
        for job in jobs:
            if job.peer is not None:
                if self.peers is not None:
                    self.peers.begin(job)
                else:  # nobody is there to fetch: it does not come
                    self._report(job.confirmed(0.0, job.pairs[:, 1].tolist()))
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
        """What a step copies from a peer is not wanted any more; comes from any thread."""
        if self.peers is not None:
            self.peers.cancel(cancelled.epoch, cancelled.step, cancelled.peer)

    def reset(self, epoch: int, *, keep: bool) -> None:
        """Whatever is asked for under an older epoch is void, and so is what lies in the tiers, unless ``keep``."""
        if self.peers is not None:
            self.peers.reset(epoch)
        for tier in self._tiers.values():
            tier.reset(epoch, keep=keep)

    def report_to(self, report: Callable[[Copied], None]) -> None:
        """Tell ``report`` of every list of copies that has been made, on any thread."""
        self._report = report
        for tier in self._tiers.values():
            tier.report = report
        if self.peers is not None:
            self.peers.report = report
