"""The interface of tiers: KV blocks, and copies with the tiers above; and the base class of asynchronous tiers."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from pagewise_shared.block_hash import BlockName
from pagewise_shared.protocol import (
    CancelCopies,
    Copied,
    DropStored,
    Found,
    LayerGroup,
    LookUp,
    StoredBudget,
    StoredDropped,
    StoredGone,
)

from pagewise_executor.block_copies import CopyJob

Blocks = npt.NDArray[np.int32]
"""Ids of blocks of one tier [n]."""
Rows = npt.NDArray[np.uint8]
"""The content of n blocks in host memory [n, bytes_per_block]."""


@dataclass(slots=True)
class CopiedBlocks:
    """How many blocks were written to a tier in each format. Copies that measure times do not count.

    ``small``: in fewer bits. ``exact``: to a tier whose copies are exact. ``above_bound``: exactly, to a tier of fewer
    bits, because they would have differed by more than the bound.
    """

    small: int = 0
    exact: int = 0
    above_bound: int = 0

    def add(self, others: "CopiedBlocks") -> None:
        """Add the blocks of another tier."""
        self.small += others.small
        self.exact += others.exact
        self.above_bound += others.above_bound


class Tier:
    """The base class of tiers. Its methods behave like a tier without blocks; subclasses override some of them.

    Fields:
        num_blocks: the ids of its blocks are below it; 0: its blocks have no ids, and are found by their names.
        identity: executors whose tiers have the same identity share the content; empty: the content is not shared.
        block_bytes: that a block takes here, if not as many as on the device; else 0.
        dtype: the type of the copies here, if they have fewer bits than the device; else empty.
        copied: the blocks that have been written here so far.
        num_errors: reads and writes that have failed so far.
        begun: epoch and number of the last step whose copies have all begun; only ``Peers`` keeps it up to date.
        report: is called, on any thread, with the answer to each list of copies, to each look-up and to each drop.
    """

    num_blocks = 0
    identity = ""
    block_bytes = 0
    dtype = ""
    num_errors = 0
    begun = (-1, -1)

    def __init__(self) -> None:
        self.report: Callable[[Copied | Found | StoredDropped | StoredGone], None] = lambda message: None
        self.copied = CopiedBlocks()

    def begin(self, job: CopyJob, upper: "Tier") -> None:
        """Begin a list of copies between this tier and ``upper``, the tier above it, and report it when it is done.

        Reads and writes of device memory are ordered with the work of the device: work that is issued after this
        returns may overwrite the source blocks, and targets are written after all work that was issued before. Source
        blocks of a tier above are read by its ``begin_read``, because the next list may overwrite them.
        """
        self.report(job.confirmed(0.0, job.pairs[:, 1].tolist()))

    def cancel(self, cancelled: CancelCopies) -> None:
        """Confirm copies soon, missing blocks as bad, if the copies may take long. Called on any thread."""

    def reset(self, epoch: int, *, keep: bool) -> None:
        """Void all jobs of older epochs, and forget all blocks with ids unless ``keep``.

        After this returns, no such job writes to a block.
        """

    def names(self) -> Mapping[int, bytes]:
        """Return the block hashes of this tier's blocks with ids, as far as known, once all earlier copies are done.

        The blocks of a model with several groups of layers are pages, and have labels instead (``page_labels``).
        """
        return {}

    def names_of(self, blocks: Blocks) -> Sequence[bytes | None]:
        """Return the hashes, or labels, of some blocks, None where unknown, once all earlier copies are done."""
        return [None] * len(blocks)

    def look_up(self, message: LookUp, block_size: int, groups: Sequence[LayerGroup] = ()) -> None:
        """Find out how many of a prefix's blocks, of ``block_size`` tokens, are here, and report it.

        ``groups``: of layers, if there are several. Then a sequence can begin behind these blocks (``resume_point``).
        """
        self.report(Found(message.epoch, message.number, 0))

    def drop(self, message: DropStored, groups: Sequence[LayerGroup] = ()) -> None:
        """Delete blocks that are found by their names, and report it. ``groups``: as in ``look_up``."""
        self.report(StoredDropped(message.epoch, message.number))

    def set_budgets(self, budgets: Sequence[StoredBudget]) -> None:
        """Evict by these budgets from now on, if the tier evicts by itself. Called on any thread."""

    def read(self, blocks: Blocks, rows: Rows) -> list[bool]:
        """Read blocks into ``rows``, once all earlier copies are done. Return for each whether it is sound. Called on
        any thread, for other executors and for tiers below, while no step writes to the blocks."""
        return [False] * len(blocks)

    def begin_read(self, blocks: Blocks, rows: Rows) -> "Future[list[bool]]":
        """Begin to read blocks into ``rows``, after all copies that have begun, and before copies that begin later.

        Called by the thread that issues steps, so a tier should read on another thread. The result is as of ``read``.
        """
        done: Future[list[bool]] = Future()
        done.set_result(self.read(blocks, rows))
        return done

    def write(self, blocks: Blocks, rows: Rows, after: Any = None) -> None:
        """Write ``rows`` into blocks, after all work before ``after``. Called on any thread."""
        raise NotImplementedError("only the device is written to by the tiers below it")

    def fence(self) -> Any:
        """Return the ``after`` for a ``write`` behind all work that this tier has so far; None if there is none."""
        return None

    def scratch(self, count: int) -> tuple[list[int], list[BlockName]]:
        """Return up to ``count`` blocks for measuring copies, and their names if they have no ids."""
        return [], []

    def close(self) -> None:
        """Release all resources. No method is called afterwards."""


@dataclass(slots=True, eq=False)
class FarJob:
    """A list of copies under way. ``missing``: the targets that do not have their block yet.

    ``after``: see ``Tier.write``. ``lock``: held while blocks of ``upper`` are written, and while the job is ended, so
    that nothing is written afterwards.
    """

    copies: CopyJob
    upper: Tier
    after: Any
    missing: set[int]
    ended: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class FarTier(Tier):
    """A tier behind a disk or a network, whose copies run beside steps, on threads of its own.

    Its copies may take long, and may be cancelled at any moment. A job ends once: when it is done, or before.
    """

    def __init__(self) -> None:
        super().__init__()
        self._jobs: dict[FarJob, None] = {}  # in their order, in which they are cancelled as well
        self._jobs_lock = threading.Lock()

    def track(self, copies: CopyJob, upper: Tier) -> FarJob:
        """Return the job of copies that begin now. It writes after all work that the device has so far."""
        job = FarJob(copies, upper, upper.fence(), set(copies.pairs[:, 1].tolist()))
        with self._jobs_lock:
            self._jobs[job] = None
        return job

    def deliver(self, job: FarJob, blocks: Blocks, rows: Rows) -> bool:
        """Write ``rows`` into blocks above; return False if the job has ended: other sequences may have the blocks."""
        with job.lock:
            if job.ended:
                return False
            job.upper.write(blocks, rows, job.after)
            job.missing.difference_update(blocks.tolist())
        return True

    def end(self, job: FarJob, seconds: float) -> None:
        """Confirm a job, unless it has ended. Missing blocks are reported as bad."""
        with job.lock:
            if job.ended:
                return
            job.ended = True
        # ``ended`` is set under the job's lock, so a thread in ``deliver`` has finished its write, and later ones write
        # nothing: after the report, the scheduler may give missing blocks to other sequences.
        with self._jobs_lock:
            self._jobs.pop(job, None)
        self.report(job.copies.confirmed(seconds, sorted(job.missing)))

    def cancel(self, cancelled: CancelCopies) -> None:
        """Confirm the copies of a step now, with missing blocks as bad, without waiting for their threads."""
        with self._jobs_lock:
            jobs = [job for job in self._jobs if job.copies.is_of(cancelled)]
        for job in jobs:
            self.end(job, 0.0)

    def reset(self, epoch: int, *, keep: bool) -> None:
        """Void all jobs. The blocks of this tier stay."""
        with self._jobs_lock:
            jobs, self._jobs = list(self._jobs), {}
        for job in jobs:
            with job.lock:
                job.ended = True
