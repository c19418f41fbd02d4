"""The host pool of an executor, and the two links that copies take between it and the device.

Each direction has a thread of its own, so copies run beside the steps and beside one another. A step's stores are read
from the device before anything else of the step is issued; from there on they take their time. Its loads come after its
block copies, which may read what a load writes, and wait for the stores that were asked for before.
"""

import concurrent.futures
import logging
import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from pagewise_shared.protocol import Copied, StepError, StepPlan, pack_int32s

from pagewise_executor.kv_pool import KVPool, Raw
from pagewise_executor.rows import Int32s

log = logging.getLogger(__name__)

Direction = Literal["store", "load"]

_PINNED_PIECE = 2**30
"""Pinned memory is allocated in pieces of about this size; no block straddles two."""
_STAGING_PIECE, _STAGING_PIECES = 64 * 2**20, 8
"""Bytes of one piece of staging on a GPU, and how many there are for stores. A step waits when all are on their way."""
STAGING_BYTES = _STAGING_PIECE * (_STAGING_PIECES + 1)
"""What a host tier takes on a GPU: pieces for stores, and one for loads."""


@dataclass(slots=True)
class _Staging:
    """A piece of device memory that stores go through. ``copied``: when its content has left for the host."""

    memory: Raw
    copied: "torch.cuda.Event | None" = None


@dataclass(slots=True)
class _Job:
    """Copies of one step in one direction, or a part of them: only the ``last`` is told of.

    ``staged`` [n, block bytes]: what a store has read from the device. ``staging``: where, if it is to be given back.
    """

    plan_epoch: int
    step: int
    pairs: Int32s
    staged: Raw = None
    staging: _Staging | None = None
    last: bool = True
    after: "concurrent.futures.Future[None] | None" = None
    ready: "torch.cuda.Event | None" = None
    done: "concurrent.futures.Future[None]" = field(default_factory=concurrent.futures.Future)


class HostTier:
    """``num_blocks`` blocks on the host. ``report`` is called on a link's thread when a job is done.

    ``bandwidth``: bytes per second that each direction is held to, None for what the machine gives. ``verify``: keep a
    checksum of every block that is stored, and check what arrives on the device against it.

    Raises:
        RuntimeError: the memory cannot be had.
    """

    def __init__(self, pool: KVPool, num_blocks: int, *, bandwidth: float | None = None, verify: bool = False) -> None:
        self.num_blocks = num_blocks
        self.bytes_per_block = pool.bytes_per_block
        self.report: Callable[[Copied], None] = lambda message: None
        self._pool = pool
        self._bandwidth = bandwidth
        self._verify = verify
        self._checksums: dict[int, int] = {}
        self._cuda = pool.device.type == "cuda"
        per_piece = max(1, _PINNED_PIECE // pool.bytes_per_block)
        self._per_piece = per_piece
        pieces = [
            torch.empty(
                min(per_piece, num_blocks - start), pool.bytes_per_block, dtype=torch.uint8, pin_memory=self._cuda
            )
            for start in range(0, num_blocks, per_piece)
        ]
        self._pieces: list[Raw] = pieces if self._cuda else [piece.numpy() for piece in pieces]
        self._piece = max(1, _STAGING_PIECE // pool.bytes_per_block)
        self._stagings: queue.SimpleQueue[_Staging] = queue.SimpleQueue()
        for _ in range(_STAGING_PIECES if self._cuda else 0):
            self._stagings.put(_Staging(pool.staging(self._piece)))
        self._elapsed: dict[Direction, float] = {"store": 0.0, "load": 0.0}
        self._epoch = 0
        self._last_store: concurrent.futures.Future[None] | None = None
        self._inboxes: dict[Direction, queue.SimpleQueue[_Job]] = {
            "store": queue.SimpleQueue(),
            "load": queue.SimpleQueue(),
        }
        for direction, inbox in self._inboxes.items():
            threading.Thread(target=self._run, args=(direction, inbox), name=direction, daemon=True).start()

    def reset(self, epoch: int) -> None:
        """Whatever is asked for under an older epoch is void. Waits for copies that have begun."""
        self._epoch = epoch
        for inbox in self._inboxes.values():
            barrier = _Job(epoch, -1, np.zeros((0, 2), np.int32))
            inbox.put(barrier)
            barrier.done.result()
        self._checksums.clear()
        self._last_store = None

    def store(self, plan: StepPlan, pairs: Int32s) -> None:
        """Begin a step's copies to the host, ``pairs`` [n, 2] of device block and host block.

        When this returns, the device blocks have been read as far as the device's own order goes.
        """
        size = self._piece if self._cuda else max(1, len(pairs))  # on the CPU staging is host memory as well
        for start in range(0, len(pairs), size):
            part = pairs[start : start + size]
            job = _Job(plan.epoch, plan.step, part, last=start + size >= len(pairs))
            if self._cuda:
                job.staging = staging = self._stagings.get()
                if staging.copied is not None:
                    torch.cuda.current_stream().wait_event(staging.copied)
                job.staged = staging.memory[: len(part)]
                self._pool.gather_into(part[:, 0], job.staged)
            else:
                job.staged = self._pool.gather(part[:, 0])
            job.ready = self._event()
            self._last_store = job.done
            self._inboxes["store"].put(job)

    def load(self, plan: StepPlan, pairs: Int32s) -> None:
        """Begin a step's copies from the host, ``pairs`` [n, 2] of host block and device block.

        They come after whatever the device has been given so far.
        """
        if len(pairs):
            self._inboxes["load"].put(_Job(plan.epoch, plan.step, pairs, after=self._last_store, ready=self._event()))

    def read(self, slots: list[int]) -> npt.NDArray[np.uint8]:
        """The content of host blocks [n, bytes_per_block], once the stores that were asked for before are done."""
        if (last := self._last_store) is not None:
            last.result()
        rows = np.empty((len(slots), self.bytes_per_block), np.uint8)
        for row, slot in zip(rows, slots, strict=True):
            held = self._slot(slot)
            row[:] = held if isinstance(held, np.ndarray) else held.numpy()
        return rows

    def _event(self) -> "torch.cuda.Event | None":
        if not self._cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _run(self, direction: Direction, inbox: "queue.SimpleQueue[_Job]") -> None:
        if self._cuda:
            torch.cuda.set_device(self._pool.device)  # a thread begins on the first device
        stream = torch.cuda.Stream(self._pool.device) if self._cuda else None  # type: ignore[no-untyped-call]
        while True:
            job = inbox.get()
            try:
                if job.step >= 0 and job.plan_epoch == self._epoch:
                    with torch.inference_mode(), torch.cuda.stream(stream):
                        self._do(direction, job, stream)
            except Exception as error:
                log.exception("a %s of step %d failed", direction, job.step)
                self._elapsed[direction] = 0.0
                self._tell(direction, job, 0, error=StepError("internal", str(error)[:500]))
            finally:
                if job.staging is not None:
                    self._stagings.put(job.staging)
                job.done.set_result(None)

    def _do(self, direction: Direction, job: _Job, stream: "torch.cuda.Stream | None") -> None:
        if job.after is not None:
            job.after.result()
        if stream is not None and job.ready is not None:
            stream.wait_event(job.ready)
        began = time.perf_counter()
        bad: list[int] = []
        if direction == "store":
            assert job.staged is not None
            self._store(job.staged, job.pairs[:, 1].tolist(), stream)
            if job.staging is not None:
                job.staging.copied = self._event()
        else:
            for start in range(0, len(job.pairs), self._piece):
                part = job.pairs[start : start + self._piece]
                bad += self._load(part[:, 0].tolist(), part[:, 1], stream)
        if self._bandwidth:
            wanted = len(job.pairs) * self._pool.bytes_per_block / self._bandwidth
            time.sleep(max(0.0, wanted - (time.perf_counter() - began)))
        self._elapsed[direction] += time.perf_counter() - began
        if job.last:
            elapsed, self._elapsed[direction] = self._elapsed[direction], 0.0
            self._tell(direction, job, int(elapsed * 1e6), bad)

    def _tell(
        self, direction: Direction, job: _Job, elapsed_us: int, bad: Iterable[int] = (), error: StepError | None = None
    ) -> None:
        self.report(Copied(job.plan_epoch, job.step, direction, elapsed_us, pack_int32s(list(bad)), error))

    def _store(self, staged: Raw, slots: list[int], stream: "torch.cuda.Stream | None") -> None:
        for row, slot in zip(staged, slots, strict=True):
            _copy(self._slot(slot), row)
        if stream is not None:
            stream.synchronize()
        if self._verify:  # of what was read from the device: a copy that goes wrong on either way is found
            for row, slot in zip(staged, slots, strict=True):
                self._checksums[slot] = _checksum(row)

    def _load(self, slots: list[int], blocks: Int32s, stream: "torch.cuda.Stream | None") -> list[int]:
        staged = self._pool.staging(len(slots))
        for row, slot in zip(staged, slots, strict=True):
            _copy(row, self._slot(slot))
        self._pool.scatter(blocks, staged)
        if stream is not None:
            stream.synchronize()
        if not self._verify:
            return []
        arrived = self._pool.gather(blocks)
        return [slot for row, slot in zip(arrived, slots, strict=True) if _checksum(row) != self._checksums.get(slot)]

    def _slot(self, slot: int) -> Raw:
        return self._pieces[slot // self._per_piece][slot % self._per_piece]

    def spoil(self, slot: int) -> None:
        """Change one byte of a host block: for tests of the checksum mode."""
        self._slot(slot)[0] ^= 1


def _copy(target: Raw, source: Raw) -> None:
    if isinstance(target, np.ndarray):
        np.copyto(target, source)
    else:
        target.copy_(source, non_blocking=True)


def _checksum(row: Raw) -> int:
    content: bytes = row.tobytes() if isinstance(row, np.ndarray) else row.cpu().numpy().tobytes()
    return zlib.crc32(content)
