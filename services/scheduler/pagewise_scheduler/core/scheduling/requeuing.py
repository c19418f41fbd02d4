"""How a running sequence loses its blocks: it keeps its tokens, and waits until all of these are computed again.

Preemption takes the blocks for others. A sequence that outgrows the short factors of LongRoPE loses them because its
keys were rotated by these, so that none of its KV is of use any more.
"""

from typing import TYPE_CHECKING

from pagewise_scheduler.core.memory.losses import RequestRef
from pagewise_scheduler.core.requests.request import Preempted, Sequence, SequenceStatus
from pagewise_scheduler.core.scheduling.step import StepInFlight

if TYPE_CHECKING:
    from pagewise_scheduler.core.scheduling.scheduler import Scheduler


def requeue(scheduler: "Scheduler", sequence: Sequence, reason: str, by: RequestRef | None = None) -> None:
    """Drop the blocks of a running sequence, for ``by`` if for anybody, and let it wait."""
    kv, blocks = scheduler.kv, sequence.table.blocks
    freed = sum(1 for block in blocks if kv.pool.references(block) == 1)
    sequence.note(Preempted(kv.losses.now, reason, len(blocks), freed, by))
    scheduler.vacate(sequence, ends=False)
    scheduler.waiting.push(sequence)


def requeue_outgrown(scheduler: "Scheduler", step: StepInFlight) -> None:
    """Requeue the sequences that ``step`` has brought to ``Sequence.run_until`` and that have not finished."""
    for sequence in step.ending:
        leaves = sequence.status is SequenceStatus.DRAINING and not sequence.table.blocks  # for another executor
        if sequence.finished or leaves:
            continue
        if sequence.status is not SequenceStatus.WAITING:  # else it was preempted meanwhile
            requeue(scheduler, sequence, "it has outgrown the short factors of LongRoPE")
        sequence.path = []
        scheduler.kv.restore(sequence.cache_salt, sequence.token_bytes)
