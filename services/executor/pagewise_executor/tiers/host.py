"""The host tier: memory of this machine, and the copies between it and the device.

Each direction has a thread of its own, and on a GPU streams of its own, so copies run while steps and copies of the
other direction run. No copy waits for a step in flight, and no step waits for the link:

- Stores read blocks of steps that have come back. Small kernels on a stream of their own read them into staging memory
  at once, and the next step, which may overwrite the blocks, waits for these kernels alone.
- Loads write blocks that no step in flight uses: the scheduler hands out no others. They wait for earlier readers of
  these blocks, which are stores and copies inside the device, and for stores of their own source blocks. The copies of
  a list are issued to the device ahead, so the thread needs the interpreter no more until the last of them has arrived;
  and while a step is issued, no thread that copies takes the interpreter from it.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch
from pagewise_shared.block_hash import HASH_BYTES, BlockName
from pagewise_shared.config import ExecutorConfig, parse_size
from pagewise_shared.errors import ModelError
from pagewise_shared.protocol import HOST

from pagewise_executor.block_copies import CopyJob, Pairs
from pagewise_executor.collectives import Ranks
from pagewise_executor.kv.issuing import Issuing
from pagewise_executor.kv.kv_pool import KVPool, Raw, free_memory
from pagewise_executor.tiers.host_copies import (
    EXACT_SHARE,
    URGENT,
    Done,
    HostCopies,
    Job,
    barrier,
    checksum_of,
    record,
)
from pagewise_executor.tiers.host_loads import LOADING_BYTES, HostLoads
from pagewise_executor.tiers.host_memory import HostMemory, NamedMemory
from pagewise_executor.tiers.small_copies import SmallCopies
from pagewise_executor.tiers.tier import Blocks, Rows, Tier

log = logging.getLogger(__name__)

_STAGING_PIECE, _STAGING_PIECES = 64 * 2**20, 8
"""The bytes of one staging buffer on a GPU, and the number of buffers for stores. A step waits if all are in use."""
STAGING_BYTES = _STAGING_PIECE * _STAGING_PIECES + LOADING_BYTES
"""The device memory that a host tier takes."""


class HostTier(Tier):
    """The tier of the blocks in ``memory``. A thread for each direction calls ``report`` when a job is done.

    ``issuing``: shared with the thread that issues steps; None: no other thread issues work to the device.
    ``bandwidth``: bytes per second that each direction is limited to; None: no limit. ``verify``: keep a checksum of
    every block that is stored, and check blocks that arrive on the device against it. Blocks of an earlier process are
    checked in any case. ``keep_memory``: leave the memory to the next process, if it outlives this one. ``small``:
    makes the copies in ``memory`` smaller, on the CPU.
    """

    def __init__(
        self, pool: KVPool, memory: HostMemory, *, issuing: Issuing | None = None, bandwidth: float | None = None,
        verify: bool = False, keep_memory: bool = True, small: SmallCopies | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.memory = memory
        self.num_blocks = memory.num_blocks
        if small is not None:
            self.block_bytes, self.dtype = small.num_bytes + small.exact_bytes // EXACT_SHARE, small.dtype
        self._pool = pool
        self._keep_memory = keep_memory
        if issuing is None or pool.device.type == "cpu":  # which computes a step where it is issued
            issuing = Issuing(exclusive=pool.device.type != "cpu")
        self._copies = copies = HostCopies(self, pool, memory, issuing, bandwidth, verify, small)
        self._piece = max(1, _STAGING_PIECE // pool.bytes_per_block)
        self._stagings: queue.SimpleQueue[Raw] = queue.SimpleQueue()
        for _ in range(_STAGING_PIECES if copies.cuda else 0):
            self._stagings.put(pool.staging(self._piece))
        self._gathers = copies.stream(URGENT)
        self._gathered: torch.cuda.Event | None = None
        self._elapsed, self._lost = 0.0, list[int]()
        self._stores: dict[int, Done] = {}
        self._num_stores = 0
        # The number of the store that writes each block of the host, the last of several; 0: none has.
        self._stored_by = np.zeros(memory.num_blocks, np.int64)
        self._inbox: queue.SimpleQueue[Job | Callable[[], None]] = queue.SimpleQueue()
        self._loads = HostLoads(copies)
        threading.Thread(target=self._run, name="store", daemon=True).start()

    def reset(self, epoch: int, *, keep: bool) -> None:
        """Void all jobs of older epochs, and all blocks unless ``keep``. This waits for copies that have begun, and for
        the device: copies of the new epoch do not wait for steps of an older one."""
        self._copies.epoch = epoch
        # Jobs of the old epoch that a thread has not begun see the new epoch and do nothing. The barriers behind them
        # return once the threads have left the jobs that they had begun.
        for begin in (self._inbox.put, self._loads.begin):
            last = barrier()
            begin(last)
            last.done.result()
        if self._copies.cuda:
            torch.cuda.synchronize(self._pool.device)
        if not keep:
            self.memory.clear()
        # Without a name, no scheduler of a later epoch knows the block.
        self._copies.forget(keep_named=keep)
        self._stores.clear()

    def begin(self, job: CopyJob, upper: Tier) -> None:
        """Begin copies between the host and the device."""
        if job.target == HOST:
            self._begin_store(job, upper.names_of(job.pairs[:, 0]))
            return
        pairs = job.pairs[np.argsort(job.pairs[:, 0], kind="stable")]
        after = self._stores.get(self._last_store(pairs[:, 0]))
        ready = [event for event in (self._gathered, self._pool.copied) if event is not None]
        self._loads.begin(Job(job, pairs, after=after, ready=ready))

    def _begin_store(self, asked: CopyJob, names: Sequence[bytes | None]) -> None:
        """Issue the reads of the device blocks, before which no later work of the device begins."""
        pairs, names = _by_target(asked.pairs, names)
        size = self._piece if self._copies.cuda else max(1, len(pairs))  # on the CPU, staging needs no limit
        for start in range(0, len(pairs), size):
            part = pairs[start : start + size]
            job = Job(asked, part, names=names[start : start + size], last=start + size >= len(pairs))
            if self._copies.cuda:
                self._gather(job)
            else:
                job.staged = self._pool.gather(part[:, 0])
            self._note_store(job)
            self._inbox.put(job)
        if self._gathered is not None:
            torch.cuda.current_stream(self._pool.device).wait_event(self._gathered)

    def _gather(self, job: Job) -> None:
        """Read the blocks that a job stores into staging memory, beside the steps in flight."""
        with self._copies.issuing.waiting():
            job.staging = self._stagings.get()
        try:
            with torch.cuda.stream(self._gathers), self._copies.issuing.copies():
                job.staged = job.staging[: len(job.pairs)]
                self._pool.gather_into(job.pairs[:, 0], job.staged)
                self._gathered = record()
        except BaseException:
            self._stagings.put(job.staging)
            raise
        job.ready = [self._gathered]

    def _note_store(self, job: Job) -> None:
        for number in [number for number, done in self._stores.items() if done.done()]:
            del self._stores[number]
        self._num_stores += 1
        self._stores[self._num_stores] = job.done
        self._stored_by[job.pairs[:, 1]] = self._num_stores

    def names(self) -> dict[int, bytes]:
        """Return the hashes of all blocks, or the labels of all pages, once all stores are done."""
        self._wait_for(max(self._stores, default=0))
        apart = {slot: name for slot, (name, _) in list(self._copies.exact.items()) if name is not None}
        return self.memory.names() | apart

    def names_of(self, blocks: Blocks) -> list[bytes | None]:
        """Return the hashes of some blocks, or the labels of some pages, once their stores are done."""
        self._wait_for(self._last_store(blocks))
        exact = self._copies.exact
        return [exact[slot][0] if slot in exact else self.memory.name(slot) for slot in blocks.tolist()]

    def read(self, blocks: Blocks, rows: Rows) -> list[bool]:
        """Read blocks into ``rows``, once their stores are done; return for each whether it is sound."""
        self._wait_for(self._last_store(blocks))
        return list(map(self._read, blocks.tolist(), rows))

    def begin_read(self, blocks: Blocks, rows: Rows) -> "Future[list[bool]]":
        """Read blocks on the thread that stores, so that a later store into one of them comes after the read."""
        done: Future[list[bool]] = Future()

        def read() -> None:
            try:
                done.set_result(list(map(self._read, blocks.tolist(), rows)))
            except Exception as error:  # of any kind: the waiting thread gets it
                done.set_exception(error)

        self._inbox.put(read)
        return done

    def _read(self, slot: int, row: Rows) -> bool:
        held = self._copies.content(slot)
        row[:] = held if isinstance(held, np.ndarray) else held.numpy()
        return self._copies.is_there(slot) and self._copies.is_sound(slot)

    def scratch(self, count: int) -> tuple[list[int], list[BlockName]]:
        """Return blocks without a name: a named block may come from an earlier process."""
        named = self.names()
        return [block for block in range(self.num_blocks) if block not in named][:count], []

    def _last_store(self, blocks: Blocks) -> int:
        """Return the number of the last store that writes one of ``blocks``. Stores are done in order."""
        return int(self._stored_by[blocks].max(initial=0))

    def _wait_for(self, store: int) -> None:
        if (done := self._stores.get(store)) is not None:
            with self._copies.issuing.waiting():
                done.result()

    def close(self) -> None:
        """Release the memory, unless the next process is to find its blocks."""
        if not self._keep_memory:
            self.memory.close()

    def _run(self) -> None:
        stream = self._copies.stream()
        with torch.inference_mode(), torch.cuda.stream(stream):
            while True:
                work = self._inbox.get()
                if isinstance(work, Job):
                    self._do(work, stream)
                else:
                    work()

    def _do(self, job: Job, stream: "torch.cuda.Stream | None") -> None:
        try:
            if job.copies is not None and job.copies.epoch == self._copies.epoch:
                self._store(job, job.copies, stream)
        except Exception as error:
            self._copies.failed("store", job, error)
            self._elapsed, self._lost = 0.0, []
        finally:
            if job.staging is not None:
                self._stagings.put(job.staging)
            job.done.set_result(None)

    def _store(self, job: Job, asked: CopyJob, stream: "torch.cuda.Stream | None") -> None:
        began = time.perf_counter()
        memory, copies, slots = self.memory, self._copies, job.pairs[:, 1].tolist()
        apart = set[int]()
        for slot in slots:
            copies.void(slot)
        with copies.issuing.copies():
            for event in job.ready:
                assert stream is not None
                stream.wait_event(event)
            for start, stop in copies.runs(slots):
                apart.update(copies.put(slots[start], job.staged[start:stop], job.names[start:stop]))
            copied = record() if stream is not None else None
        if copied is not None:
            copied.synchronize()
        for row, slot, name in zip(job.staged, slots, job.names, strict=True):
            if slot in apart:
                if slot not in copies.exact:
                    self._lost.append(slot)
                continue
            checked = 0
            if copies.keeps_checksums:
                # With --verify-copies, the checksum is that of the content read from the device: an error in either
                # copy is found. A smaller copy has other content.
                checked = checksum_of(row if copies.verify and copies.small is None else memory.slot(slot))
            memory.keep(slot, name, checked)
        copies.throttle(len(slots), began)
        self._elapsed += time.perf_counter() - began
        if job.last:
            elapsed, self._elapsed, lost, self._lost = self._elapsed, 0.0, self._lost, []
            self.report(asked.confirmed(elapsed, lost))


def bandwidth_of(config: ExecutorConfig, ranks: Ranks) -> float | None:
    """Return the bytes per second that ``--host-bandwidth`` leaves for this rank in each direction; None: no limit."""
    return parse_size(config.host_bandwidth) / ranks.on_host if config.host_bandwidth else None


def make_host_tier(
    config: ExecutorConfig,
    pool: KVPool,
    folder: Path | None,
    content: str,
    ranks: Ranks,
    issuing: Issuing | None = None,
    name_bytes: int = HASH_BYTES,
    small: SmallCopies | None = None,
) -> HostTier:
    """Make the host pool that ``--host-memory`` asks for, in named memory if there is a ``folder`` for it.

    The ranks on one host take equal parts of it, and of ``--host-bandwidth``. All ranks have as many blocks as the rank
    with the smallest part. Their files have one number: ranks can use blocks of an earlier executor only together.

    ``content``: names the model and the block format. ``name_bytes``: see ``HostMemory``. ``small``: see ``HostTier``.

    Raises:
        ModelError: there is less memory, or not one block fits.
    """
    assert config.host_memory is not None
    whole, free = parse_size(config.host_memory), free_memory(torch.device("cpu"))
    block_bytes = pool.bytes_per_block if small is None else small.num_bytes
    taken = block_bytes + (small.exact_bytes // EXACT_SHARE if small is not None else 0)
    # All ranks read the free memory before any of them takes its part, which would reduce it for the others.
    num_blocks = ranks.least(whole // ranks.on_host // taken if whole <= free else 0)
    if not num_blocks:
        raise ModelError(
            f"--host-memory {config.host_memory}: one KV block takes {ranks.on_host * taken} bytes, "
            f"{free / 2**30:.2f} GiB are free on this host"
        )
    cuda = pool.device.type == "cuda"
    memory: HostMemory | None = None
    number = 0 if ranks.first else ranks.of_first(0)
    if folder is not None:
        try:
            memory = named = NamedMemory(folder, content, num_blocks, block_bytes, cuda, number, name_bytes)
            number = named.number
        except OSError as error:
            log.warning("no named host memory (%s): its blocks will be gone with this process", error)
    if ranks.first:
        ranks.of_first(number)
    if memory is None:
        memory = HostMemory(num_blocks, block_bytes, cuda, name_bytes)
    tier = HostTier(
        pool, memory, issuing=issuing, bandwidth=bandwidth_of(config, ranks), verify=config.verify_copies,
        keep_memory=config.keep_host_memory, small=small,
    )  # fmt: skip
    log.info("host pool: %d blocks, %.2f GiB", tier.num_blocks, num_blocks * taken / 2**30)
    return tier


def _by_target(pairs: Pairs, names: Sequence[bytes | None]) -> tuple[Pairs, list[bytes | None]]:
    """Order copies by their targets, and leave out a copy if a later copy of the list has the same target.

    Leaving them out is needed for correctness. A process that is killed in the middle of such a list could leave the
    content of the later copy under the name of the earlier one, with a checksum that fits: wrong KV that no check would
    find.
    """
    last = len(pairs) - 1 - np.unique(pairs[::-1, 1], return_index=True)[1]
    return pairs[last], [names[index] for index in last.tolist()]
