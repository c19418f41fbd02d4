"""The host tier of an executor, and the copies between it and the device.

Each direction has a thread of its own, so copies run while steps and copies of the other direction run. What a step
stores is read from the device before anything else of the step is issued; the rest of a store may take its time. What a
step loads is written after its copies inside the device, which may read the same blocks, and after earlier stores.
"""

import concurrent.futures
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from pagewise_shared.block_hash import BlockHash
from pagewise_shared.config import ExecutorConfig, parse_size
from pagewise_shared.errors import ModelError
from pagewise_shared.logs import about
from pagewise_shared.protocol import HOST, Copied, StepError

from pagewise_executor.block_copies import CopyJob, Pairs
from pagewise_executor.collectives import Ranks
from pagewise_executor.kv.checksum import checksum
from pagewise_executor.kv.host_memory import AnonymousMemory, HostMemory, NamedMemory
from pagewise_executor.kv.kv_pool import KVPool, Raw, free_memory

log = logging.getLogger(__name__)

Direction = Literal["store", "load"]

_STAGING_PIECE, _STAGING_PIECES = 64 * 2**20, 8
"""The bytes of one staging buffer on a GPU, and the number of buffers for stores. A step waits if all are in use."""
STAGING_BYTES = _STAGING_PIECE * (_STAGING_PIECES + 1)
"""The device memory that a host tier takes: the buffers for stores, and one for loads."""


@dataclass(slots=True)
class _Staging:
    """A staging buffer in device memory for stores. ``copied``: the event after which its content is on the host."""

    memory: Raw
    copied: "torch.cuda.Event | None" = None


@dataclass(slots=True)
class _Job:
    """A list of copies, or a part of it (``pairs``), of which only the ``last`` is reported.

    ``copies``: None for a barrier. ``staged`` [n, block bytes]: what a store has read from the device. ``names`` [n]:
    the block hashes, as far as they are known. ``staging``: the buffer to be given back afterwards.
    """

    copies: CopyJob | None
    pairs: Pairs
    staged: Raw = None
    staging: _Staging | None = None
    names: list[BlockHash | None] = field(default_factory=list)
    last: bool = True
    after: "concurrent.futures.Future[None] | None" = None
    ready: "torch.cuda.Event | None" = None
    done: "concurrent.futures.Future[None]" = field(default_factory=concurrent.futures.Future)


class HostTier:
    """The host tier, whose blocks are those of ``memory``. Its threads call ``report`` when a job is done.

    ``bandwidth``: bytes per second that each direction is held to, None for what the machine gives. ``verify``: keep a
    checksum of every block that is stored, and check what arrives on the device against it. What another process has
    left in the memory is checked in any case. ``keep_memory``: leave it to the next process, if it outlives this one.
    """

    def __init__(
        self,
        pool: KVPool,
        memory: HostMemory,
        *,
        bandwidth: float | None = None,
        verify: bool = False,
        keep_memory: bool = True,
    ) -> None:
        self.memory = memory
        self.num_blocks = memory.num_blocks
        self.bytes_per_block = pool.bytes_per_block
        self.report: Callable[[Copied], None] = lambda message: None
        self._pool = pool
        self._bandwidth = bandwidth
        self._verify = verify
        self._keep_memory = keep_memory
        self._cuda = pool.device.type == "cuda"
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

    def reset(self, epoch: int, *, keep: bool = False) -> None:
        """Whatever is asked for under an older epoch is void, and so is what was stored, unless ``keep``. Waits for
        copies that have begun."""
        self._epoch = epoch
        for inbox in self._inboxes.values():
            barrier = _Job(None, np.zeros((0, 2), np.int32))
            inbox.put(barrier)
            barrier.done.result()
        if not keep:
            self.memory.clear()
        self._last_store = None

    def begin(self, job: CopyJob) -> None:
        """Begin copies between the host and the device."""
        if job.target == HOST:
            self._begin_store(job)
        else:
            self._inboxes["load"].put(_Job(job, job.pairs, after=self._last_store, ready=self._event()))

    def _begin_store(self, copies: CopyJob) -> None:
        """When this returns, the device blocks have been read as far as the device's own order goes."""
        pairs, names = _without_overwritten(copies.pairs, list(copies.names))
        size = self._piece if self._cuda else max(1, len(pairs))  # on the CPU staging is host memory as well
        for start in range(0, len(pairs), size):
            part = pairs[start : start + size]
            job = _Job(copies, part, names=names[start : start + size], last=start + size >= len(pairs))
            if self._cuda:
                job.staging = staging = self._stagings.get()
                try:
                    if staging.copied is not None:
                        torch.cuda.current_stream().wait_event(staging.copied)
                    job.staged = staging.memory[: len(part)]
                    self._pool.gather_into(part[:, 0], job.staged)
                except BaseException:
                    self._stagings.put(staging)
                    raise
            else:
                job.staged = self._pool.gather(part[:, 0])
            job.ready = self._event()
            self._last_store = job.done
            self._inboxes["store"].put(job)

    def names(self) -> dict[int, BlockHash]:
        """See ``Tier``."""
        self._wait_for_stores()
        return self.memory.names()

    def names_of(self, slots: list[int]) -> list[BlockHash | None]:
        """See ``Tier``."""
        self._wait_for_stores()
        return [self.memory.name(slot) for slot in slots]

    def read(self, slots: list[int]) -> npt.NDArray[np.uint8]:
        """See ``Tier``."""
        self._wait_for_stores()
        rows = np.empty((len(slots), self.bytes_per_block), np.uint8)
        for row, slot in zip(rows, slots, strict=True):
            held = self.memory.slot(slot)
            row[:] = held if isinstance(held, np.ndarray) else held.numpy()
            if self.memory.checksum(slot) is None or not self._is_sound(slot):
                raise OSError(f"block {slot} of the host is not what was stored there")
        return rows

    def _wait_for_stores(self) -> None:
        if (last := self._last_store) is not None:
            last.result()

    def close(self) -> None:
        """See ``Tier``."""
        if not self._keep_memory:
            self.memory.close()

    def _is_sound(self, slot: int) -> bool:
        """Whether a block is sound: one that another process wrote must match its checksum."""
        memory = self.memory
        return not memory.is_inherited(slot) or memory.checksum(slot) == _checksum(memory.slot(slot))

    def _event(self) -> "torch.cuda.Event | None":
        if not self._cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _run(self, direction: Direction, inbox: "queue.SimpleQueue[_Job]") -> None:
        if self._cuda:
            torch.cuda.set_device(self._pool.device)  # every thread begins on the first device
        stream = torch.cuda.Stream(self._pool.device) if self._cuda else None  # type: ignore[no-untyped-call]
        while True:
            job = inbox.get()
            try:
                if job.copies is not None and job.copies.epoch == self._epoch:
                    with torch.inference_mode(), torch.cuda.stream(stream):
                        self._do(direction, job.copies, job, stream)
            except Exception as error:
                assert job.copies is not None
                epoch, step = job.copies.epoch, job.copies.step
                where = about(epoch=epoch, step=step)
                log.exception("a %s of step %d of epoch %d failed", direction, step, epoch, extra=where)
                self._elapsed[direction] = 0.0
                self.report(job.copies.confirmed(0.0, error=StepError("internal", str(error)[:500])))
            finally:
                if job.staging is not None:
                    self._stagings.put(job.staging)
                job.done.set_result(None)

    def _do(self, direction: Direction, copies: CopyJob, job: _Job, stream: "torch.cuda.Stream | None") -> None:
        if job.after is not None:
            job.after.result()
        if stream is not None and job.ready is not None:
            stream.wait_event(job.ready)
        began = time.perf_counter()
        bad: list[int] = []
        if direction == "store":
            assert job.staged is not None
            self._store(job, stream)
            if job.staging is not None:
                job.staging.copied = self._event()
        else:
            for start in range(0, len(job.pairs), self._piece):
                part = job.pairs[start : start + self._piece]
                bad += self._load(part, stream)
        if self._bandwidth:
            wanted = len(job.pairs) * self._pool.bytes_per_block / self._bandwidth
            time.sleep(max(0.0, wanted - (time.perf_counter() - began)))
        self._elapsed[direction] += time.perf_counter() - began
        if job.last:
            elapsed, self._elapsed[direction] = self._elapsed[direction], 0.0
            self.report(copies.confirmed(elapsed, bad))

    def _store(self, job: _Job, stream: "torch.cuda.Stream | None") -> None:
        memory, slots = self.memory, job.pairs[:, 1].tolist()
        for row, slot in zip(job.staged, slots, strict=True):
            memory.void(slot)
            _copy(memory.slot(slot), row)
        if stream is not None:
            stream.synchronize()
        summed = self._verify or memory.outlives
        for row, slot, name in zip(job.staged, slots, job.names, strict=True):
            # With --verify-copies, the checksum is that of the content read from the device: an error in either copy is
            # found.
            checksum = _checksum(row if self._verify else memory.slot(slot)) if summed else 0
            memory.keep(slot, name, checksum)

    def _load(self, pairs: Pairs, stream: "torch.cuda.Stream | None") -> list[int]:
        """Copy blocks to the device; return the device blocks whose content is wrong."""
        slots, blocks = pairs[:, 0].tolist(), pairs[:, 1]
        staged = self._pool.staging(len(slots))
        sound = [self._is_sound(slot) for slot in slots]
        for row, slot in zip(staged, slots, strict=True):
            _copy(row, self.memory.slot(slot))
        self._pool.scatter(blocks, staged)
        if stream is not None:
            stream.synchronize()
        if self._verify:
            arrived = self._pool.gather(blocks)
            memory = self.memory
            sound = [_checksum(row) == memory.checksum(slot) for row, slot in zip(arrived, slots, strict=True)]
        return [block for block, is_sound in zip(blocks.tolist(), sound, strict=True) if not is_sound]


def make_host_tier(
    config: ExecutorConfig, pool: KVPool, folder: Path | None, content: str, ranks: Ranks
) -> HostTier | None:
    """The host pool that ``--host-memory`` asks for, in named memory if there is a ``folder`` for it.

    Of an executor with several ranks, those on one host take equal parts of it, and of ``--host-bandwidth``. All have
    as many blocks as the one with the smallest part, in files of one number: those of the same executor before, whose
    blocks are only of use together.

    ``content``: what tells its blocks from those of other models and formats.

    Raises:
        ModelError: there is less memory, or not one block fits.
    """
    if config.host_memory is None:
        return None
    whole, free = parse_size(config.host_memory), free_memory(torch.device("cpu"))
    # All look before any of them takes its part: later on, parts would be missing from what is free.
    num_blocks = ranks.least(whole // ranks.on_host // pool.bytes_per_block if whole <= free else 0)
    if not num_blocks:
        raise ModelError(
            f"--host-memory {config.host_memory}: one KV block takes {ranks.on_host * pool.bytes_per_block} bytes, "
            f"{free / 2**30:.2f} GiB are free on this host"
        )
    cuda = pool.device.type == "cuda"
    memory: HostMemory | None = None
    number = 0 if ranks.first else ranks.of_first(0)
    if folder is not None:
        try:
            memory = named = NamedMemory(folder, content, num_blocks, pool.bytes_per_block, cuda, number)
            number = named.number
        except OSError as error:
            log.warning("no named host memory (%s): what it holds will be gone with this process", error)
    if ranks.first:
        ranks.of_first(number)
    if memory is None:
        memory = AnonymousMemory(num_blocks, pool.bytes_per_block, cuda)
    bandwidth = parse_size(config.host_bandwidth) / ranks.on_host if config.host_bandwidth else None
    tier = HostTier(pool, memory, bandwidth=bandwidth, verify=config.verify_copies, keep_memory=config.keep_host_memory)
    log.info("host pool: %d blocks, %.2f GiB", tier.num_blocks, num_blocks * pool.bytes_per_block / 2**30)
    return tier


def _without_overwritten(pairs: Pairs, names: list[BlockHash | None]) -> tuple[Pairs, list[BlockHash | None]]:
    """Leave out copies into blocks that a later copy of the list is written over.

    This is more than thrift. A process that was killed in the middle of such a list could leave the content of the
    later copy under the name of the earlier one, with a checksum that fits: wrong KV that nothing would ever notice.
    """
    targets, first = np.unique(pairs[::-1, 1], return_index=True)
    if len(targets) == len(pairs):
        return pairs, names
    kept = np.sort(len(pairs) - 1 - first)
    return pairs[kept], [names[index] for index in kept] if names else names


def _copy(target: Raw, source: Raw) -> None:
    if isinstance(target, np.ndarray):
        np.copyto(target, source)
    else:
        target.copy_(source, non_blocking=True)


def _checksum(row: Raw) -> int:
    return checksum(np.ascontiguousarray(row if isinstance(row, np.ndarray) else row.cpu().numpy()))
