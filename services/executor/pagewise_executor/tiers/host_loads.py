"""Loads from the host: a thread that issues the copies of a list all at once, and waits for the last of them."""

import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from pagewise_executor.block_copies import CopyJob, Pairs
from pagewise_executor.kv.kv_pool import Raw
from pagewise_executor.tiers.host_copies import URGENT, HostCopies, Job, checksum_of, record

_PIECE, _PIECES = 32 * 2**20, 4
"""The bytes of one staging buffer on a GPU, and the number of buffers. The device waits by itself for a buffer that is
in use, so that copies into it can be issued before it is free."""
LOADING_BYTES = _PIECE * _PIECES
"""The device memory that loads take."""


@dataclass(slots=True)
class _Staging:
    """A staging buffer in device memory. ``free``: the event after which it may be written again."""

    memory: Raw
    free: "torch.cuda.Event | None" = None


@dataclass(slots=True)
class _Loading:
    """A list that is being issued. ``began``: seconds of the clock. ``bad``: device blocks whose source is not sound.

    ``slots``: the host blocks, of which the first ``issued`` have been issued; ``blocks``: the ids of the device
    blocks, on the device if it is a GPU. ``arrived``: the event after the last copy; None on the CPU, where copies are
    made at once.
    """

    job: Job
    asked: CopyJob
    began: float
    bad: list[int]
    slots: list[int]
    blocks: Any
    issued: int = 0
    arrived: "torch.cuda.Event | None" = None


class HostLoads:
    """The thread that loads, one list after the other.

    On a GPU the copy engine brings blocks into staging buffers on one stream, and small kernels write them into the
    pool on another one, beside the steps: neither takes the multiprocessors from a step for long. The first pieces of a
    list are issued before the step that asks for it, so that the link works while that step is issued.
    """

    def __init__(self, copies: HostCopies) -> None:
        self._inbox: queue.SimpleQueue[Job | _Loading] = queue.SimpleQueue()
        self._copies = copies
        self._link, self._scatters = copies.stream(), copies.stream(URGENT)
        # An even number, because kernels take lists of block ids that begin at a multiple of 16 bytes.
        self._piece = max(2, _PIECE // copies.pool.bytes_per_block // 2 * 2)
        self._stagings = deque[_Staging]()
        if copies.cuda:
            self._stagings.extend(_Staging(copies.pool.staging(self._piece)) for _ in range(_PIECES))
        self._num_waiting = 0  # lists that have not been issued whole
        self._issued = deque[_Loading]()
        self._link_free = 0.0
        threading.Thread(target=self._run, name="load", daemon=True).start()

    def begin(self, job: Job) -> None:
        """Begin a list of loads, or a barrier."""
        # The checksums of blocks of an earlier process are computed before use. A step would wait here for that.
        inherited = any(map(self._copies.memory.is_inherited, job.pairs[:, 0].tolist()))
        if self._copies.cuda and job.copies is not None and not self._num_waiting and not job.waits and not inherited:
            with torch.inference_mode(), torch.cuda.stream(self._scatters), self._copies.issuing.copies():
                loading = self._start(job, job.copies, [True] * len(job.pairs))
                for _ in range(_PIECES):
                    self._issue_piece(loading)
            self._num_waiting += 1
            self._inbox.put(loading)
        else:
            self._num_waiting += 1
            self._inbox.put(job)

    def _run(self) -> None:
        """Issue each list before the one before it is waited for, so that the link does not rest between the two."""
        copies = self._copies
        if copies.cuda:
            torch.cuda.set_device(copies.pool.device)  # every thread begins on the first device
        with torch.inference_mode(), torch.cuda.stream(self._scatters):
            while True:
                given = self._inbox.get()
                job = given.job if isinstance(given, _Loading) else given
                if job.copies is None or job.waits:
                    self._finish(0)
                if job.copies is None:
                    job.done.set_result(None)
                elif job.copies.epoch == copies.epoch:
                    self._issue(given, job.copies)
                self._num_waiting -= 1
                self._finish(1 if copies.cuda and not self._inbox.empty() else 0)

    def _issue(self, given: "Job | _Loading", asked: CopyJob) -> None:
        try:
            loading = given if isinstance(given, _Loading) else self._start_when_stored(given, asked)
            while loading.issued < len(loading.slots):
                with self._copies.issuing.copies():
                    self._issue_piece(loading)
            self._issued.append(loading)
        except Exception as error:
            self._copies.failed("load", given.job if isinstance(given, _Loading) else given, error)

    def _start_when_stored(self, job: Job, asked: CopyJob) -> _Loading:
        """Prepare a list, once the store that it waits for is done."""
        if job.after is not None:
            job.after.result()
        sound = [self._copies.is_sound(slot) for slot in job.pairs[:, 0].tolist()]
        with self._copies.issuing.copies():
            return self._start(job, asked, sound)

    def _start(self, job: Job, asked: CopyJob, sound: list[bool]) -> _Loading:
        """Prepare a list. ``sound``: of each block, whether its content in the host is sound."""
        slots, blocks = job.pairs[:, 0].tolist(), job.pairs[:, 1]
        bad = [block for block, is_sound in zip(blocks.tolist(), sound, strict=True) if not is_sound]
        loading = _Loading(job, asked, time.perf_counter(), bad, slots, blocks)
        if self._scatters is not None:
            for event in job.ready:
                self._scatters.wait_event(event)
            loading.blocks = self._copies.pool.on_device(blocks)
        return loading

    def _issue_piece(self, loading: _Loading) -> None:
        """Issue the next copies of a list, as many as a staging buffer holds; on the CPU make all of them."""
        pool, start = self._copies.pool, loading.issued
        if self._link is None or self._scatters is None:
            staged = pool.staging(len(loading.slots))
            self._copy_slots(loading.slots, staged)
            pool.scatter(loading.blocks, staged)
            loading.issued = len(loading.slots)
            return
        if not (part := loading.slots[start : start + self._piece]):
            return
        staging = self._stagings.popleft()
        self._stagings.append(staging)
        with torch.cuda.stream(self._link):
            if staging.free is not None:
                self._link.wait_event(staging.free)
            self._copy_slots(part, staging.memory)
            brought = record()
        self._scatters.wait_event(brought)
        loading.issued += len(part)
        pool.scatter(loading.blocks[start : loading.issued], staging.memory[: len(part)])
        staging.free = loading.arrived = record()

    def _copy_slots(self, slots: list[int], staged: Raw) -> None:
        """Copy blocks [n] of the host into the first n rows of ``staged``."""
        for start, stop in self._copies.runs(slots):
            self._copies.take(slots[start], staged[start:stop])

    def _finish(self, keep: int) -> None:
        """Wait until the lists that have been issued, but for the last ``keep``, have arrived, and report them."""
        copies = self._copies
        while len(self._issued) > keep:
            issued = self._issued.popleft()
            pairs = issued.job.pairs
            # The link has begun with a list when it was done with the list before.
            began = max(issued.began, self._link_free)
            try:
                if issued.arrived is not None:
                    issued.arrived.synchronize()
                copies.throttle(len(pairs), began)
                self._link_free = time.perf_counter()
                bad = self._wrong(pairs) if copies.verify else issued.bad
                copies.tier.report(issued.asked.confirmed(self._link_free - began, bad))
            except Exception as error:
                copies.failed("load", issued.job, error)

    def _wrong(self, pairs: Pairs) -> list[int]:
        """Return the device blocks whose content does not match the checksum of the store."""
        checked = zip(self._copies.pool.gather(pairs[:, 1]), pairs.tolist(), strict=True)
        expected = self._copies.expected
        return [block for row, (slot, block) in checked if checksum_of(row) != expected(slot)]
