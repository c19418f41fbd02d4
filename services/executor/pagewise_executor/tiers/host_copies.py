"""The shared part of both directions of the host tier: the memory on both sides, and how its blocks are copied."""

import concurrent.futures
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from pagewise_shared.logs import about
from pagewise_shared.protocol import StepError

from pagewise_executor.block_copies import CopyJob, Pairs
from pagewise_executor.kv.issuing import Issuing
from pagewise_executor.kv.kv_pool import KVPool, Raw
from pagewise_executor.tiers.block_names import checksum
from pagewise_executor.tiers.host_memory import HostMemory
from pagewise_executor.tiers.small_copies import SmallCopies
from pagewise_executor.tiers.tier import Rows, Tier

log = logging.getLogger(__name__)

EXACT_SHARE = 64
"""Of so many blocks in fewer bits, one may have to stay exact: there is room for it beside them."""
_LARGEST_COPY = 8 * 2**20
"""The bytes of the largest single copy: the uploads of a step may have to wait for one copy."""
URGENT = -1
"""The priority of streams whose small kernels go before the large kernels of steps."""

Done = concurrent.futures.Future[None]


@dataclass(slots=True)
class Job:
    """A list of copies, or a part of it (``pairs``, in the order of their host blocks), of which only the ``last`` is
    reported.

    ``copies``: None for a barrier. ``staged`` [n, block bytes]: blocks that a store has read from the device, in the
    buffer ``staging`` on a GPU. ``names`` [n]: the block hashes, as far as they are known. ``after``: the store that a
    load waits for. ``ready``: events that its copies wait for.
    """

    copies: CopyJob | None
    pairs: Pairs
    staged: Raw = None
    staging: Raw = None
    names: list[bytes | None] = field(default_factory=list)
    last: bool = True
    after: Done | None = None
    ready: "list[torch.cuda.Event]" = field(default_factory=list)
    done: Done = field(default_factory=Done)

    @property
    def waits(self) -> bool:
        """Whether the job still waits for a store."""
        return self.after is not None and not self.after.done()


def barrier() -> Job:
    """Return a job that is done when all jobs before it are."""
    return Job(None, np.zeros((0, 2), np.int32))


@dataclass
class HostCopies:
    """The device's pool and the host's memory. ``tier``: reports the lists of copies that are done.

    ``issuing``: when copies may be issued to the device. ``bandwidth``, ``verify`` and ``small``: see ``HostTier``.
    ``epoch``: jobs of other epochs are void. ``exact``: with ``small``, the blocks that are not made smaller, by slot,
    with their names; the memory is void there.
    """

    tier: Tier
    pool: KVPool
    memory: HostMemory
    issuing: Issuing
    bandwidth: float | None
    verify: bool
    small: SmallCopies | None = None
    epoch: int = 0
    exact: dict[int, tuple[bytes | None, Rows]] = field(default_factory=dict)

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.pool.device.type == "cuda"

    def stream(self, priority: int = 0) -> "torch.cuda.Stream | None":
        """Return a new stream for the calling thread; None on the CPU."""
        if not self.cuda:
            return None
        torch.cuda.set_device(self.pool.device)  # every thread begins on the first device
        return torch.cuda.Stream(self.pool.device, priority=priority)  # type: ignore[no-untyped-call]

    @property
    def keeps_checksums(self) -> bool:
        """Whether a checksum is kept with each block that is stored."""
        return self.verify or self.memory.outlives

    def is_there(self, slot: int) -> bool:
        """Whether a block of the host has content."""
        return slot in self.exact or self.memory.checksum(slot) is not None

    def is_sound(self, slot: int) -> bool:
        """Whether a block of the host is sound: a block that another process wrote must match its checksum, and a block
        for whose exact copy there was no room is not there."""
        if self.small is not None and not self.is_there(slot):
            return False
        return not self.memory.is_inherited(slot) or self._is_whole(slot)

    def _is_whole(self, slot: int) -> bool:
        memory = self.memory
        return slot in self.exact or memory.checksum(slot) == checksum_of(memory.slot(slot))

    def expected(self, slot: int) -> int | None:
        """Return the checksum of the content that a load of a block is to bring, with --verify-copies; None if the
        block is not there, or has changed."""
        if self.small is None:
            return self.memory.checksum(slot)
        return checksum_of(self.content(slot)) if self._is_whole(slot) else None

    def void(self, slot: int) -> None:
        """Mark a block of the host as void, before it is written."""
        self.memory.void(slot)
        self.exact.pop(slot, None)

    def forget(self, *, keep_named: bool) -> None:
        """Forget the exact copies beside the memory, unless they have names and these are to be kept."""
        for slot, (name, _) in list(self.exact.items()):
            if name is None or not keep_named:
                del self.exact[slot]

    def put(self, first: int, rows: Raw, names: list[bytes | None]) -> list[int]:
        """Write blocks [n, block bytes] of the device into the slots from ``first`` on, which are void.

        Returns the slots whose blocks stay exact, and which stay void: such blocks are kept beside the memory, if there
        is room for them.
        """
        target, counts = self.memory.rows(first, len(rows)), self.tier.copied
        num_named = len(names) - names.count(None)
        if self.small is None:
            copy_rows(target, rows)
            counts.exact += num_named
            return []
        above = self.small.shrink(rows, target)
        for index in above:
            if len(self.exact) <= self.memory.num_blocks // EXACT_SHARE:
                self.exact[first + index] = names[index], rows[index].copy()
        num_above = sum(names[index] is not None for index in above)
        counts.above_bound += num_above
        counts.small += num_named - num_above
        return [first + index for index in above]

    def take(self, first: int, rows: Raw) -> None:
        """Read the slots from ``first`` on into ``rows`` [n, block bytes], as the device had, or will have, them."""
        source = self.memory.rows(first, len(rows))
        if self.small is None:
            copy_rows(rows, source)
            return
        self.small.widen(source, rows)
        for index in range(len(rows)):
            if (exact := self.exact.get(first + index)) is not None:
                rows[index] = exact[1]

    def content(self, slot: int) -> Raw:
        """Return the content of a block of the host as the device gets it: uint8 [block bytes]."""
        if self.small is None:
            return self.memory.slot(slot)
        rows = np.empty((1, self.small.exact_bytes), np.uint8)
        self.take(slot, rows)
        return rows[0]

    def runs(self, slots: list[int]) -> Iterator[tuple[int, int]]:
        """Divide blocks of the host, in ascending order, into runs (start, stop) that one copy moves: neighbours in one
        piece of memory."""
        most = max(1, _LARGEST_COPY // self.pool.bytes_per_block) if self.cuda else len(slots)
        start, per_piece = 0, self.memory.blocks_per_piece
        for index in range(1, len(slots) + 1):
            if (
                index == len(slots)
                or slots[index] != slots[index - 1] + 1
                or slots[index] % per_piece == 0
                or index - start == most
            ):
                yield start, index
                start = index

    def throttle(self, num_blocks: int, began: float) -> None:
        """Wait until so many blocks would have been copied at the bandwidth that the direction is held to.

        ``began``: when their copies began, in seconds of ``time.perf_counter``.
        """
        if self.bandwidth:
            size = self.pool.bytes_per_block if self.small is None else self.small.num_bytes
            wanted = num_blocks * size / self.bandwidth
            time.sleep(max(0.0, wanted - (time.perf_counter() - began)))

    def failed(self, kind: str, job: Job, error: Exception) -> None:
        """Log and report that a job has failed. ``kind``: "load" or "store"."""
        assert job.copies is not None
        epoch, step = job.copies.epoch, job.copies.step
        where = about(epoch=epoch, step=step)
        log.exception("a %s of step %d of epoch %d failed", kind, step, epoch, extra=where)
        self.tier.report(job.copies.confirmed(0.0, error=StepError("internal", str(error)[:500])))


def record() -> "torch.cuda.Event":
    """Record an event on the current stream."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def copy_rows(target: Raw, source: Raw) -> None:
    """Copy blocks [n, block bytes]; on a GPU the copy is issued to the current stream."""
    if isinstance(target, np.ndarray):
        np.copyto(target, source)
    else:
        target.copy_(source, non_blocking=True)


def checksum_of(row: Raw) -> int:
    """Return the checksum of the content of a block [block bytes]."""
    return checksum(np.ascontiguousarray(row if isinstance(row, np.ndarray) else row.cpu().numpy()))
