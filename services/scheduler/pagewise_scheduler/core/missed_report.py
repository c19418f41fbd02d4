"""Makes the part of a request's report about the reason why a part of its prompt was not cached."""

from math import isnan, nan

from pagewise_shared import reports
from pagewise_shared.protocol import tier_name
from pagewise_shared.reports import RequestName, RequestReport

from pagewise_scheduler.core.memory.eviction_history import LostRun, RequestRef
from pagewise_scheduler.core.requests.timeline import MissedPrefix, NoSnapshot, NoWindow


def name_of(request: RequestRef | None) -> RequestName | None:
    """Return the name of a request as reports have it."""
    return None if request is None else RequestName(request.request_id, request.key)


def dated(time: float | None, since_1970: float) -> float | None:
    """Return a time of the scheduler's clock, to which ``since_1970`` seconds are added; None for None and NaN."""
    return None if time is None or isnan(time) else time + since_1970


def add_missed(report: RequestReport, missed: MissedPrefix, since_1970: float) -> None:
    """Add to a report why a part of the prompt was not cached."""
    if missed.no_window is not None:
        report.no_window = _no_window(missed.no_window, since_1970)
    position = missed.found
    causes: list[tuple[object, ...]] = []
    for run, tokens in missed.lost:
        cause = run.reason, run.executor_id, run.cached_by, run.taker
        if causes and causes[-1] == cause:
            report.lost[-1].tokens += tokens
        else:
            report.lost.append(_lost(run, position, tokens, since_1970))
        causes.append(cause)
        position += tokens
    if (left := missed.divergence) is not None:
        report.left = reports.LeftPrefix(left.position, left.beyond, left.compared, left.equal, name_of(left.cached_by))
    if (other := missed.other_salt) is not None:
        adapter = other.cached_by.adapter if other.cached_by is not None else ""
        report.other_cache = reports.OtherCache(other.tokens, other.kind, adapter, name_of(other.cached_by))
    report.not_asked = missed.not_asked


def _no_window(lacks: NoWindow, since_1970: float) -> reports.NoWindow:
    lacking = [_no_snapshot(one, since_1970) for one in lacks.lacking]
    return reports.NoWindow(lacks.position, lacks.tokens, name_of(lacks.cached_by), lacking, lacks.due)


def _no_snapshot(lacks: NoSnapshot, since_1970: float) -> reports.NoSnapshot:
    if (run := lacks.lost) is None:
        return reports.NoSnapshot(lacks.kind)
    lost = _lost(run, lacks.position, 0, since_1970)
    return reports.NoSnapshot(lacks.kind, lost, dated(run.retaken, since_1970))


def _lost(run: LostRun, position: int, tokens: int, since_1970: float) -> reports.LostPrefix:
    return reports.LostPrefix(
        position=position,
        tokens=tokens,
        reason=run.reason,
        time=run.time + since_1970,
        executor_id=run.executor_id,
        tier=tier_name(run.tier),
        cached_by=name_of(run.cached_by),
        cached_at=dated(run.cached_by.started if run.cached_by is not None else nan, since_1970),
        taker=name_of(run.taker),
        num_takers=run.num_takers,
        policy=run.policy,
        price=None if isnan(run.price) else run.price,
    )
