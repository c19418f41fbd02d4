"""The copies between an executor and storage, which run beside its steps."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pagewise_shared.block_hash import BlockHash
from pagewise_shared.protocol import DEVICE, Copied, Found, LookUp

from pagewise_executor.block_copies import CopyJob
from pagewise_executor.kv.block_store import BlockStore
from pagewise_executor.storage.storage import Rows, Storage, chain, num_leading

log = logging.getLogger(__name__)

_PIECE_BYTES = 32 * 2**20
"""About how much is read before it is written to the device."""


@dataclass(slots=True, eq=False)
class _Job:
    """A list of copies. ``missing``: the targets that do not have their block yet.

    ``rows`` [n, bytes_per_block]: what a store has read. ``after``: the device's event that a load comes after.
    ``lock``: held while targets are written, and while the job is ended, so that nothing is written afterwards.
    """

    copies: CopyJob
    missing: set[int]
    rows: Rows | None = None
    after: Any = None
    ended: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class StorageLink:
    """Copies blocks between one storage and the tiers of this executor, and looks up what is there.

    Loads, stores and look-ups have a thread each. ``report``: called on any thread when a list of copies is done.
    ``answer``: the same for look-ups.
    """

    def __init__(self, storage: Storage, store: BlockStore, block_size: int) -> None:
        self.report: Callable[[Copied], None] = lambda message: None
        self.answer: Callable[[Found], None] = lambda message: None
        self.storage = storage
        self._store = store
        self._block_size = block_size
        self._per_piece = max(1, _PIECE_BYTES // store.bytes_per_block)
        self._jobs: set[_Job] = set()
        self._jobs_lock = threading.Lock()
        self._inboxes: dict[str, queue.SimpleQueue[Callable[[], None] | None]] = {}
        for name in ("load", "store", "look up"):
            inbox = self._inboxes[name] = queue.SimpleQueue()
            threading.Thread(target=_run, args=(inbox,), name=f"{name} {storage.name}", daemon=True).start()

    def begin(self, copies: CopyJob) -> None:
        """Begin a list of copies. What is stored has been read from its tier when this returns."""
        job = _Job(copies, set(copies.pairs[:, 1].tolist()))
        with self._jobs_lock:
            self._jobs.add(job)
        if copies.target == DEVICE:
            job.after = self._store.event()
            self._inboxes["load"].put(lambda: self._do(job, self._load))
        else:
            job.rows = self._store.read_tier(copies.source, copies.pairs[:, 0])
            self._inboxes["store"].put(lambda: self._do(job, self._keep))

    def _do(self, job: _Job, work: Callable[[_Job], None]) -> None:
        began = time.perf_counter()
        try:
            if not job.ended:
                work(job)
        except Exception:  # of any kind: the scheduler must be told that the blocks did not come
            log.exception("copies to or from %s failed", self.storage.name)
        self._end(job, time.perf_counter() - began)

    def _load(self, job: _Job) -> None:
        names, blocks = job.copies.stored_as, job.copies.pairs[:, 1]
        rows = np.empty((min(len(blocks), self._per_piece), self._store.bytes_per_block), np.uint8)
        for start in range(0, len(blocks), self._per_piece):
            part = slice(start, start + self._per_piece)
            there = np.array(self.storage.read(names[part], rows[: len(blocks[part])]))
            arrived = blocks[part][there]
            with job.lock:
                if job.ended:  # the blocks may be given to others now
                    return
                self._store.write(arrived, rows[: len(there)][there], job.after)
                job.missing.difference_update(arrived.tolist())

    def _keep(self, job: _Job) -> None:
        assert job.rows is not None
        stored = self.storage.write(job.copies.stored_as, job.rows)
        job.missing -= {
            target for target, is_there in zip(job.copies.pairs[:, 1].tolist(), stored, strict=True) if is_there
        }

    def _end(self, job: _Job, seconds: float) -> None:
        with job.lock:
            if job.ended:
                return
            job.ended = True
        with self._jobs_lock:
            self._jobs.discard(job)
        self.report(job.copies.confirmed(seconds, sorted(job.missing)))

    def cancel(self, epoch: int, step: int) -> None:
        """Confirm the copies of a step now, what is missing as bad, even if the storage does not return from a call."""
        with self._jobs_lock:
            jobs = [job for job in self._jobs if (job.copies.epoch, job.copies.step) == (epoch, step)]
        for job in jobs:
            self._end(job, 0.0)

    def reset(self) -> None:
        """Void all jobs. After this returns, none of them writes to a block."""
        with self._jobs_lock:
            jobs, self._jobs = list(self._jobs), set()
        for job in jobs:
            with job.lock:
                job.ended = True

    def look_up(self, message: LookUp) -> None:
        """Find out how much of a prefix is there, and answer."""

        def find() -> None:
            found = 0
            try:
                names = chain(BlockHash(message.root), message.tokens, self._block_size)
                found = num_leading(names, self.storage.contains)
            except Exception:  # of any kind: a request waits for the answer
                log.exception("nothing could be looked up in %s", self.storage.name)
            self.answer(Found(message.epoch, message.number, found))

        self._inboxes["look up"].put(find)

    def close(self) -> None:
        """Void all jobs and end all threads, once they return."""
        self.reset()
        for inbox in self._inboxes.values():
            inbox.put(None)
        self.storage.close()


def _run(inbox: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (work := inbox.get()) is not None:
        work()
