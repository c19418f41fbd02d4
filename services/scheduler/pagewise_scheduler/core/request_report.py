"""Makes the report of a request: where its time went, its blocks, and where its cached prefix was lost."""

from collections.abc import Mapping, Sequence
from itertools import islice
from math import isnan, nan
from typing import TypeVar

from msgspec.structs import asdict, replace
from pagewise_shared import reports
from pagewise_shared.protocol import tier_name
from pagewise_shared.reports import Event, RequestLine, RequestName, RequestReport

from pagewise_scheduler.core.group_report import table_reports
from pagewise_scheduler.core.memory.prefix_tree import hash_of
from pagewise_scheduler.core.missed_report import add_missed, dated, name_of
from pagewise_scheduler.core.requests.request import Preempted, Request, RequestSequence, SequenceStatus
from pagewise_scheduler.core.requests.timeline import BLOCKS_CORRUPT, LENDER_GONE, Steps
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.device import BlockPool
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager
from pagewise_scheduler.core.tiers.recovery_plan import Recovery

CachedT = TypeVar("CachedT", reports.NoWindow, reports.LeftPrefix, reports.OtherCache)

_MOST_OUTPUTS = 64
"""Outputs of a request whose blocks are counted for its line: it may have thousands."""


class Room:
    """How much a report may still list: so many sequences, blocks and events each."""

    def __init__(self, limit: int) -> None:
        self.sequences = self.blocks = self.events = limit
        self.cut = False


def request_line(
    request: Request, executor_id: str, pool: BlockPool | None, now: float, *, ended: bool = False
) -> RequestLine:
    """Return the line of a request. ``pool``: where its blocks are; None if it is on no executor. ``now``: seconds."""
    outputs = request.sequences[:_MOST_OUTPUTS]
    status, computed, blocks, shared = ("finished", 0, 0, 0) if ended else _held(outputs, pool)
    places = [name for _, name in request.executors]
    here = places[-1] if ended and places else executor_id
    return RequestLine(
        request.request_id,
        request.params.client_request_id,
        request.params.key,
        here,
        status,
        len(request.prompt_token_ids),
        request.num_output_tokens,
        computed,
        blocks,
        shared,
        request.num_cached_tokens,
        sum(one.num_preemptions for one in outputs),
        round(now - request.arrival_time, 6),
        _seconds(request.arrival_time, request.scheduled_time),
        _seconds(request.arrival_time, request.first_token_time),
        next((one.finish_reason for one in request.sequences if one.finish_reason), None) if ended else None,
        next((name for name in reversed(places) if name != here), None),
    )


def _held(outputs: Sequence[RequestSequence], pool: BlockPool | None) -> tuple[str, int, int, int]:
    """The status of a request, its tokens that are computed, its blocks, and how many of these are shared."""
    status = next((one.status for one in outputs if not one.finished), SequenceStatus.WAITING)
    tables = [one for one in outputs if one.table.blocks]
    return (
        "unplaced" if pool is None else status.name.lower(),
        sum(one.num_with_kv for one in tables),
        sum(len(one.table.blocks) for one in tables),
        sum(_num_shared(one, pool) for one in tables) if pool is not None else 0,
    )


def is_waiting(request: Request) -> bool:
    """Return whether no sequence of a request runs."""
    return all(
        sequence.status in (SequenceStatus.WAITING, SequenceStatus.FINISHED)
        for sequence in islice(request.sequences, _MOST_OUTPUTS)
    )


def request_report(
    request: Request,
    scheduler: Scheduler | None,
    now: float,
    room: Room | int,
    since_1970: float = 0.0,
    *,
    ended: bool = False,
) -> RequestReport:
    """Return the report of a request.

    ``scheduler``: of the executor that has it, None if it is on none. ``now``: of the scheduler's clock, to which
    ``since_1970`` seconds are added. ``room``: how many sequences, blocks and events it may list. ``ended``: it ends
    at ``now``.
    """
    room = Room(room) if isinstance(room, int) else room
    timeline, start, first = request.timeline, request.arrival_time, request.first_token_time
    kv = scheduler.kv if scheduler is not None else None
    pool = kv.pool if kv is not None else None
    executor_id = request.executors[-1][1] if request.executors and pool is not None else ""
    line = request_line(request, executor_id, pool, now, ended=ended)
    sequences = _sequences(request, kv, room)
    every_event = request_events(request)
    events = every_event[max(0, len(every_event) - room.events) :]
    room.events -= len(events)
    truncated = len(events) < len(every_event) or _is_cut(request, sequences, pool)
    room.cut |= truncated
    report = RequestReport(
        **asdict(line),
        priority=request.params.priority,
        arrived=start + since_1970,
        state=_state(request, ended),
        total_seconds=line.arrived_seconds_ago,
        ended_seconds_ago=0.0 if ended else None,
        executors=_placements(request),
        cached_tokens=request.cached_tokens,
        sequences=sequences,
        events=events,
        chunks=_chunks(request),
        truncated=truncated,
        waits={str(cause): seconds for cause, seconds in timeline.waits_until(now).items()},
        ahead=_ahead(request),
        computes_prefix=name_of(timeline.computes_prefix),
        prefill=_phase(timeline.prefill, first - request.scheduled_time, line.prompt_tokens - line.num_cached_tokens),
        decode=_phase(timeline.decode, now - first, line.output_tokens) if ended else None,
        moves=_moves(request),
        resets=_resets(request),
        resumed=dated(timeline.resumed, since_1970),
    )
    if timeline.missed is not None:
        add_missed(report, timeline.missed, since_1970)
    return report


def later(report: RequestReport, seconds: float) -> RequestReport:
    """Return the report of a request that has ended, asked for so many seconds after it was made."""
    return replace(
        report,
        arrived_seconds_ago=round(report.arrived_seconds_ago + seconds, 6),
        ended_seconds_ago=round((report.ended_seconds_ago or 0.0) + seconds, 6),
    )


def seen_by(report: RequestReport, key: str, names: Mapping[str, str]) -> RequestReport:
    """Return a report as the holder of an API key gets it; ``key``: its name, "" for an operator.

    Other keys' requests, their caches and block hashes are left out. ``names``: of executors, by their block endpoints;
    other peers are left out for all readers.
    """
    events = [replace(one, peer=names.get(one.peer or "")) for one in report.events]
    if not key:
        return replace(report, events=events)
    return replace(
        report,
        sequences=[_without_hashes(one) for one in report.sequences],
        events=[replace(one, by=_own(one.by, key)) for one in events],
        ahead=_own_ahead(report.ahead, key),
        computes_prefix=_own(report.computes_prefix, key),
        lost=[own for one in report.lost if (own := _own_lost(one, key))],
        no_window=_own_snapshots(_if_own(report.no_window, key), key),
        left=_if_own(report.left, key),
        other_cache=_if_own(report.other_cache, key),
    )


def _without_hashes(sequence: reports.SequenceReport) -> reports.SequenceReport:
    return replace(sequence, blocks=[replace(block, hash="") for block in sequence.blocks])


def _own(name: RequestName | None, key: str) -> RequestName | None:
    return name if name is not None and name.key == key else None


def _if_own(cached: CachedT | None, key: str) -> CachedT | None:
    return cached if cached is not None and _own(cached.cached_by, key) else None


def _own_lost(lost: reports.LostPrefix | None, key: str) -> reports.LostPrefix | None:
    return replace(lost, taker=_own(lost.taker, key)) if lost is not None and _own(lost.cached_by, key) else None


def _own_snapshots(lacks: reports.NoWindow | None, key: str) -> reports.NoWindow | None:
    if lacks is None:
        return None
    return replace(lacks, lacking=[replace(one, lost=_own_lost(one.lost, key)) for one in lacks.lacking])


def _own_ahead(ahead: list[reports.Share], key: str) -> list[reports.Share]:
    """The shares of the key's own requests, and the sum of the others without a name."""
    own = [one for one in ahead if _own(one.request, key)]
    others = sum(one.tokens for one in ahead) - sum(one.tokens for one in own)
    return [*own, reports.Share(None, others)] if others else own


def _seconds(start: float, end: float) -> float | None:
    return None if isnan(end) else round(max(0.0, end - start), 6)


def _phase(steps: Steps | None, seconds: float, tokens: int) -> reports.Phase | None:
    if steps is None or isnan(seconds):
        return None
    return reports.Phase(max(0.0, seconds), tokens, steps.steps, steps.others_tokens)


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


def _sequences(request: Request, kv: KVCacheManager | None, room: Room) -> list[reports.SequenceReport]:
    """The outputs of a request on an executor, as many as there is room for."""
    sequences = request.sequences[: room.sequences] if kv is not None else []
    room.sequences -= len(sequences)
    return [_sequence_report(one, kv, room) for one in sequences if kv is not None]


def _is_cut(request: Request, shown: list[reports.SequenceReport], pool: BlockPool | None) -> bool:
    return pool is not None and (len(shown) < len(request.sequences) or any(one.truncated for one in shown))


def _sequence_report(sequence: RequestSequence, kv: KVCacheManager, room: Room) -> reports.SequenceReport:
    table, pool = sequence.table, kv.pool
    blocks = table.blocks[: room.blocks]
    room.blocks -= len(blocks)
    return reports.SequenceReport(
        index=sequence.index,
        status=sequence.status.name.lower(),
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_output_tokens=len(sequence.output_token_ids),
        num_computed_tokens=sequence.num_with_kv if table.blocks else 0,
        num_blocks=len(table.blocks),
        shared=sum(1 for block in table.blocks if pool.references(block) > 1),
        preemptions=sequence.num_preemptions,
        finish_reason=sequence.finish_reason,
        blocks=[_block_report(index, block, pool) for index, block in enumerate(blocks)],
        truncated=len(blocks) < len(table.blocks),
        groups=table_reports(kv, table),
    )


def _block_report(index: int, block: int, pool: BlockPool) -> reports.BlockReport:
    report = reports.BlockReport(index, block, pool.references(block))
    if (node := pool.node(block)) is not None:
        report.copies = {
            tier_name(tier.number): copy for tier in pool.lower if (copy := node.block_id(tier.number)) >= 0
        }
        report.cached, report.hash = True, hash_of(node).hex()
    return report


def request_events(request: Request) -> list[Event]:
    """Return the changes of the memory of all outputs, in order. A loss lasts until the same output resumes."""
    timeline = request.timeline
    broken_off = [one.time for one in timeline.departures if one.ran] + [one.time for one in timeline.interruptions]
    events = []
    for sequence in request.sequences:
        loss: Event | None = None
        for fact in sequence.history:
            if isinstance(fact, Preempted):
                loss = _loss(fact, sequence)
                events.append(loss)
            elif isinstance(fact, Recovery):
                events.append(_recovery(fact, broken_off))
                if fact.resumed and loss is not None:
                    loss.seconds, loss = round(fact.began - loss.at, 6), None
    for event in events:
        event.at = round(event.at - request.arrival_time, 6)
    return sorted(events, key=_at)


def _at(event: Event) -> float:
    return event.at


def _loss(loss: Preempted, sequence: RequestSequence) -> Event:
    kind = "started over" if loss.reason in (BLOCKS_CORRUPT, LENDER_GONE) else "preempted"
    return Event(
        loss.time,
        kind,
        sequence.index,
        reason=loss.reason,
        blocks=loss.blocks,
        freed=loss.freed,
        by=name_of(loss.by),
    )


def _recovery(recovery: Recovery, broken_off: list[float]) -> Event:
    again = not recovery.first_start and any(time <= recovery.began for time in broken_off)
    return Event(
        recovery.began,
        "resumed" if recovery.resumed or again else "started",
        recovery.sequence.index,
        seconds=_seconds(recovery.began, recovery.ended),
        method=recovery.method,
        device_tokens=recovery.device_tokens,
        found_tokens=recovery.plan.num_blocks * recovery.sequence.table.block_size,
        loaded_tokens=recovery.loaded_tokens,
        source=recovery.origin,
        sources=recovery.plan.sources,
        dtypes=recovery.plan.dtypes,
        peer=recovery.plan.peer,
        predicted_seconds={} if recovery.estimate is None else recovery.estimate.by_method,
    )


def _state(request: Request, ended: bool) -> str:
    return "ended" if ended else "waiting" if isnan(request.scheduled_time) else "running"


def _placements(request: Request) -> list[reports.Placement]:
    start = request.arrival_time
    return [reports.Placement(name, round(time - start, 6)) for time, name in request.executors]


def _chunks(request: Request) -> list[reports.Chunk]:
    start = request.arrival_time
    return [reports.Chunk(round(one.time - start, 6), one.tokens) for one in request.timeline.chunks]


def _ahead(request: Request) -> list[reports.Share]:
    shares = request.timeline.ahead
    return [reports.Share(name_of(one.request), one.tokens) for one in shares if one.request is not request.ref]


def _resets(request: Request) -> list[reports.Interruption]:
    return [
        reports.Interruption(
            one.time - request.arrival_time, one.executor_id, _seconds(one.time, one.ended), not isnan(time)
        )
        for one, time in request.timeline.interruptions
    ]


def _moves(request: Request) -> list[reports.Move]:
    moves = []
    for left in request.timeline.departures:
        then, to = next(((time, name) for time, name in request.executors if time >= left.time), (nan, None))
        token = None if left.next_token is None else left.next_token - left.time
        at = left.time - request.arrival_time
        moves.append(reports.Move(at, left.executor_id, left.reason, to, _seconds(left.time, then), token))
    return moves
