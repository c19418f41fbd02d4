"""Requests as consoles show them, one line each."""

from itertools import islice

from pagewise_scheduler.core.console.reports import EndedReport, RequestLine
from pagewise_scheduler.core.inspection import seconds_between
from pagewise_scheduler.core.requests.request import Request, RequestSequence, SequenceStatus
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.device import BlockPool

_MOST_OUTPUTS = 64
"""Outputs of a request whose blocks are counted: it may have thousands."""


def request_lines(
    executor_id: str, scheduler: Scheduler, now: float, limit: int
) -> tuple[list[RequestLine], list[RequestLine], bool]:
    """The requests of one executor that run, those that wait, and whether there are more; at most ``limit`` of each."""
    requests = scheduler.requests
    running: list[RequestLine] = []
    waiting: list[RequestLine] = []
    for request in requests:
        lines = waiting if waits(request) else running
        if len(lines) < limit:
            lines.append(request_line(executor_id, request, scheduler.kv.pool, now))
        elif len(running) >= limit and len(waiting) >= limit:
            break
    return running, waiting, len(running) + len(waiting) < len(requests)


def waits(request: Request) -> bool:
    """Return whether no sequence of a request runs."""
    return all(
        sequence.status in (SequenceStatus.WAITING, SequenceStatus.FINISHED)
        for sequence in islice(request.sequences, _MOST_OUTPUTS)
    )


def request_line(executor_id: str, request: Request, pool: BlockPool | None, now: float) -> RequestLine:
    """Return the line of a request that has not ended. ``pool``: where its blocks are; None if it is on no executor.
    ``now``: seconds."""
    outputs = request.sequences[:_MOST_OUTPUTS]
    status = next((one.status for one in outputs if not one.finished), SequenceStatus.WAITING)
    return RequestLine(
        request.request_id,
        request.params.client_request_id,
        request.params.key,
        executor_id,
        status.name.lower() if pool is not None else "unplaced",
        len(request.prompt_token_ids),
        request.num_output_tokens,
        sum(one.num_with_kv for one in outputs if one.table.blocks),
        sum(len(one.table.blocks) for one in outputs),
        sum(_num_shared(one, pool) for one in outputs) if pool is not None else 0,
        request.num_cached_tokens,
        sum(one.num_preemptions for one in outputs),
        round(now - request.arrival_time, 3),
        seconds_between(request.arrival_time, request.scheduled_time),
        seconds_between(request.arrival_time, request.first_token_time),
        moved_from=_moved_from([name for _, name in request.executors], executor_id),
    )


def ended_line(ended: EndedReport) -> RequestLine:
    """Return the line of a request that has ended, from the record that is kept of it."""
    report = ended.report
    outputs = report.sequences
    executors = [one.executor_id for one in report.executors]
    return RequestLine(
        report.request_id,
        report.client_request_id,
        report.key,
        executors[-1] if executors else "",
        "finished",
        max((one.num_prompt_tokens for one in outputs), default=0),
        sum(one.num_output_tokens for one in outputs),
        0,
        0,
        0,
        sum(report.cached_tokens.values()),
        sum(one.preemptions for one in outputs),
        round(report.arrived_seconds_ago + ended.seconds_ago, 3),
        report.queue_seconds,
        report.first_token_seconds,
        next((one.finish_reason for one in outputs if one.finish_reason), None),
        _moved_from(executors, executors[-1]) if executors else None,
    )


def _moved_from(executors: list[str], here: str) -> str | None:
    """The last of ``executors``, where a request was placed in this order, that is not the one where it is: ``here``,
    "" for none."""
    return next((name for name in reversed(executors) if name != here), None)


def _num_shared(sequence: RequestSequence, pool: BlockPool) -> int:
    """Found by bisection: a sequence that holds a block of a prefix holds the blocks before it too."""
    blocks, references = sequence.table.blocks, pool.references
    low, high = 0, len(blocks)
    while low < high:
        middle = (low + high) // 2
        if references(blocks[middle]) > 1:
            low = middle + 1
        else:
            high = middle
    return low
