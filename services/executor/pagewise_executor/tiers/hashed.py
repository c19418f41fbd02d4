"""Tiers whose blocks have no ids: hashes name them, and they outlive the executor.

Any number of executors share such a tier, of one machine or of several, without knowing of each other. That works
because a name identifies the content: all executors that write a block write the same bytes, and a block that is found
holds the content that was looked for. The tier evicts by itself to stay within its bound, so a block that was there may
be gone when it is read; then it is computed again.
"""

import hashlib
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType

import numpy as np
from pagewise_shared.block_hash import BlockHash, BlockName, unpack_names
from pagewise_shared.logs import BoundedLog
from pagewise_shared.protocol import DEVICE, DropStored, Found, LayerGroup, LookUp, StoredDropped, StoredGone

from pagewise_executor.block_copies import CopyJob
from pagewise_executor.grouped_batch import page_name
from pagewise_executor.tiers.block_names import SCRATCH, chain, num_leading
from pagewise_executor.tiers.resume_points import resume_point
from pagewise_executor.tiers.small_copies import SmallCopies
from pagewise_executor.tiers.tier import FarJob, FarTier, Rows, Tier

log = logging.getLogger(__name__)

_PIECE_BYTES = 32 * 2**20
"""About how much is read before it is written to the device."""
_SCRATCH_BLOCKS = 8
_MOST_HASHES = 16_384
"""The most hashes in one report."""
_END_SECONDS = 3.0
"""The most that ``close`` waits for work that has begun: longer than a store takes to answer, or is given up."""
NO_SALTS: Mapping[BlockHash, bytes] = MappingProxyType({})


class HashedTier(FarTier, ABC):
    """A tier of named blocks. Loads, stores and look-ups have a thread each, so that no step waits for any of them.

    Subclasses store the blocks. Failures of reads and writes are logged and counted, and not raised.

    ``name``: for the log. ``identity``: see ``Tier``. ``small``: makes copies smaller that are stored; with it, copies
    of both sizes are read.
    """

    def __init__(self, name: str, bytes_per_block: int, identity: str, small: SmallCopies | None = None) -> None:
        super().__init__()
        self.small = small
        self.write_as(small)
        self.name, self.bytes_per_block, self.identity = name, bytes_per_block, identity
        self._complaints = BoundedLog(log)
        self._inboxes: dict[str, queue.SimpleQueue[Callable[[], None] | None]] = {}
        self._inboxes_lock = threading.Lock()
        self._epoch = -1
        self._threads: list[threading.Thread] = []

    @abstractmethod
    def contains(self, names: Sequence[BlockName]) -> list[bool]:
        """Return for each block whether it is there, which counts as a use of it."""

    @abstractmethod
    def load(self, names: Sequence[BlockName], rows: Rows) -> list[bool]:
        """Read blocks into ``rows``. Return for each whether it was there and is sound."""

    @abstractmethod
    def store(self, names: Sequence[BlockName], rows: Rows, salts: Mapping[BlockHash, bytes] = NO_SALTS) -> list[bool]:
        """Write blocks that are not there. Return for each whether it is there now.

        ``salts``: the ``salt_tags`` of first blocks of prefixes, by their hashes, which are stored with them.
        """

    @abstractmethod
    def delete(self, names: Iterable[BlockName]) -> int:
        """Delete blocks. Return how many were there. Unlike the other methods, this and ``delete_salt`` raise the
        errors of the storage."""

    @abstractmethod
    def delete_salt(self, tag: bytes) -> int:
        """Delete the blocks of a ``salt_tag``, or all blocks (empty). Return how many there were."""

    def write_as(self, small: SmallCopies | None) -> None:
        """Store copies that ``small`` makes from now on; None: exact ones."""
        self._written = small
        self.block_bytes, self.dtype = (small.num_bytes, small.dtype) if small is not None else (0, "")

    def stored(self, name: BlockName, row: Rows) -> Rows:
        """Return the content of a block [bytes_per_block] as it is to be stored now."""
        small, counts = self._written, name.parent != SCRATCH
        if small is None:
            self.copied.exact += counts
            return row
        stored = np.empty(small.num_bytes, np.uint8)
        if small.shrink(row[None], stored[None]):
            self.copied.above_bound += counts
            return row
        self.copied.small += counts
        return stored

    def restore(self, stored: Rows, row: Rows) -> bool:
        """Write stored content into ``row`` [bytes_per_block]; return False if it does not have the size of a block."""
        if len(stored) == len(row):
            row[:] = stored
        elif self.small is not None and len(stored) == self.small.num_bytes:
            self.small.widen(stored[None], row[None])
        else:
            return False
        return True

    def begin(self, job: CopyJob, upper: Tier) -> None:
        """Begin copies on the thread for loads, or for stores. A store reads the upper tier now: see ``Tier``."""
        copies = self.track(job, upper)
        if job.target == DEVICE:
            self._enqueue("load", lambda: self._do(copies, lambda: self._load(copies)))
            return
        rows = np.empty((len(job.pairs), self.bytes_per_block), np.uint8)
        read = upper.begin_read(job.pairs[:, 0], rows)
        self._enqueue("store", lambda: self._do(copies, lambda: self._store(copies, read, rows)))

    def _enqueue(self, kind: str, work: Callable[[], None]) -> None:
        with self._inboxes_lock:
            if kind not in self._inboxes:
                inbox = self._inboxes[kind] = queue.SimpleQueue()
                thread = threading.Thread(target=_run, args=(inbox,), name=f"{kind} {self.name}", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._inboxes[kind].put(work)

    def _do(self, job: FarJob, work: Callable[[], None]) -> None:
        began = time.perf_counter()
        try:
            if not job.ended:
                work()
        except Exception:  # of any kind: the scheduler has to learn that the blocks are missing
            log.exception("copies to or from %s failed", self.name)
        self.end(job, time.perf_counter() - began)

    def _load(self, job: FarJob) -> None:
        sources, blocks = job.copies.pairs.T
        names = [job.copies.names[index] for index in sources.tolist()]
        per_piece = max(1, _PIECE_BYTES // self.bytes_per_block)
        rows = np.empty((min(len(blocks), per_piece), self.bytes_per_block), np.uint8)
        for start in range(0, len(blocks), per_piece):
            part = slice(start, start + per_piece)
            there = np.array(self.load(names[part], rows[: len(blocks[part])]))
            if not self.deliver(job, blocks[part][there], rows[: len(there)][there]):
                return

    def _store(self, job: FarJob, read: "Future[list[bool]]", rows: Rows) -> None:
        sound = np.array(read.result(), bool)
        targets = job.copies.pairs[sound, 1]  # the others are confirmed as bad
        names = [job.copies.names[index] for index in targets.tolist()]
        stored = self.store(names, rows if sound.all() else rows[sound], job.copies.salts)
        job.missing.difference_update(targets[np.array(stored, bool)].tolist())

    def look_up(self, message: LookUp, block_size: int, groups: Sequence[LayerGroup] = ()) -> None:
        """Count the leading blocks of a prefix that are here, on a thread of its own, and report the number."""

        def find() -> None:
            found = 0
            try:
                names = chain(BlockHash(message.root), message.tokens, block_size)
                if groups:
                    found = resume_point(names, groups, block_size, self.contains)
                else:
                    found = num_leading(names, self.contains)
            except Exception:  # of any kind: a request waits for the answer
                log.exception("nothing could be looked up in %s", self.name)
            self.report(Found(message.epoch, message.number, found))

        self._enqueue("look up", find)

    def drop(self, message: DropStored, groups: Sequence[LayerGroup] = ()) -> None:
        """Delete the blocks of a message, after all stores that have begun, and report it. May be called on any
        thread. ``groups``: of layers, if there are several."""
        names = unpack_names(message.names)

        def delete() -> None:
            deleted, error = 0, ""
            try:
                deleted = self.delete(_pages_of(names, groups)) if names else self.delete_salt(message.tag)
            except Exception as failure:  # of any kind: an operator waits for the answer
                self.failed("blocks cannot be deleted: %s", failure)
                error = str(failure)
            epoch = max(message.epoch, self._epoch)  # a later one has begun: the scheduler waits for the answer
            self.report(StoredDropped(epoch, message.number, deleted, error))

        self._enqueue("store", delete)

    def scratch(self, count: int) -> tuple[list[int], list[BlockName]]:
        """Return blocks that no prefix has; the same in every process, so that their number stays small."""
        numbers = range(min(count, _SCRATCH_BLOCKS))
        return list(numbers), [
            BlockName(BlockHash(hashlib.sha256(f"scratch {number}".encode()).digest()), SCRATCH) for number in numbers
        ]

    def reset(self, epoch: int, *, keep: bool) -> None:
        """Void all jobs of older epochs. The blocks stay."""
        super().reset(epoch, keep=keep)
        self._epoch = epoch

    def gone(self, tier: int, hashes: Sequence[bytes]) -> None:
        """Report that blocks were deleted."""
        for start in range(0, len(hashes) if self._epoch >= 0 else 0, _MOST_HASHES):
            self.report(StoredGone(self._epoch, tier, b"".join(hashes[start : start + _MOST_HASHES])))

    def close(self) -> None:
        """Void all jobs and end all threads.

        Work that has begun is finished, because subclasses then release what it uses. But a disk may hang: threads that
        take longer end by themselves.
        """
        super().reset(0, keep=True)
        for inbox in self._inboxes.values():
            inbox.put(None)
        until = time.monotonic() + _END_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def failed(self, text: str, *values: object) -> None:
        """Log and count a read or a write that has failed."""
        self.num_errors += 1
        self._complaints.warning(text, *values)


def _pages_of(names: Iterable[BlockName], groups: Sequence[LayerGroup]) -> Iterator[BlockName]:
    """Return the names of all pages of blocks, of each group."""
    for name in names:
        yield name
        for number, group in enumerate(groups):
            for index in range(group.pages_per_block):
                if number or index:
                    yield page_name(name, number, index)


def _run(inbox: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (work := inbox.get()) is not None:
        work()
