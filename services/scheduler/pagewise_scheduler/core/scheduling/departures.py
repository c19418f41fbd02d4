"""How a request leaves a scheduler for another executor, while the other requests go on.

A move drops the references to blocks at the one executor, and begins a recovery at the other: the tokens go along, and
the blocks stay behind as a cache from which the other executor fetches them.
"""

from pagewise_scheduler.core.requests.request import Request, SequenceStatus
from pagewise_scheduler.core.scheduling.scheduler import Scheduler


def begin_leaving(scheduler: Scheduler, request: Request) -> None:
    """Plan nothing more for a request. Tokens of it that are in flight still come."""
    assert request.params.beam is None, "what it goes on with is decided where all its sequences are"
    scheduler.waiting.withdraw(request)
    for sequence in request.sequences:
        for feature in request.features:
            feature.release(sequence, scheduler.last_step if scheduler.steps_in_flight else None)
        if sequence.status in (SequenceStatus.PREFILL, SequenceStatus.DECODE):
            scheduler.vacate(sequence, ends=False)
        if not sequence.finished:
            sequence.status = SequenceStatus.DRAINING


def leaves(scheduler: Scheduler, request: Request) -> bool:
    """Take a request out after ``begin_leaving``, to be added elsewhere; False: a token of it is in flight, or it has
    begun again because the executor was reset."""
    oldest = scheduler.steps_in_flight[0].step if scheduler.steps_in_flight else None
    for sequence in request.sequences:
        if not sequence.finished and sequence.status is not SequenceStatus.DRAINING:
            return False
        if not sequence.finished and oldest is not None and sequence.last_step >= oldest:
            return False
    scheduler.forget(request)
    return True
