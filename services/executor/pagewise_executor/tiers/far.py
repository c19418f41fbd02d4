"""Tiers behind a disk or a network, whose copies may take long, and may be given up at any moment."""

import threading
from dataclasses import dataclass, field
from typing import Any

from pagewise_shared.protocol import CancelCopies

from pagewise_executor.block_copies import CopyJob
from pagewise_executor.tiers.tier import Blocks, Rows, Tier


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
    """A tier whose copies run beside steps, on threads of its own. A job ends once: when it is done, or before."""

    def __init__(self) -> None:
        super().__init__()
        self._jobs: dict[FarJob, None] = {}  # in their order, in which they are cancelled as well
        self._jobs_lock = threading.Lock()

    def note(self, copies: CopyJob, upper: Tier) -> FarJob:
        """Return the job of copies that begin now. It writes after all work that the device has so far."""
        job = FarJob(copies, upper, upper.fence(), set(copies.pairs[:, 1].tolist()))
        with self._jobs_lock:
            self._jobs[job] = None
        return job

    def bring(self, job: FarJob, blocks: Blocks, rows: Rows) -> bool:
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
