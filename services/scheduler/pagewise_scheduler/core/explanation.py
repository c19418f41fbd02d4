"""Where a request's time went, and where its cached prefix was lost: the facts, as plain data of bounded size."""

from collections.abc import Iterable
from itertools import chain
from math import isnan, nan
from operator import attrgetter

from msgspec import Struct
from msgspec.structs import replace
from pagewise_shared.protocol import tier_name

from pagewise_scheduler.core.memory.eviction_history import LostRun, RequestRef
from pagewise_scheduler.core.requests.request import Preempted, Request
from pagewise_scheduler.core.requests.timeline import Departure, Interrupted, MissedPrefix, Steps, Timeline
from pagewise_scheduler.core.tiers.recovery_plan import Recovery

_MOST_EVENTS = 16


class Who(Struct, frozen=True):
    """A request, and the name of its API key."""

    request_id: str
    key: str


class Share(Struct):
    """Tokens of a prompt; ``request``: whose, None if that is not shown."""

    request: Who | None
    tokens: int


class LostPrefix(Struct):
    """Tokens of the prompt that had been cached, from ``position`` on.

    ``reason``: "evicted", "corrupt", "executor lost" or "executor reset", at ``time``. ``cached_by``: the request that
    had computed them, having started at ``cached_at``. ``taker``: whose allocation evicted them, the first of
    ``num_takers``. ``policy``: which policy chose them, ``price``: their worth to it.
    """

    position: int
    tokens: int
    reason: str
    time: float
    executor_id: str
    tier: str
    cached_by: Who | None
    cached_at: float | None
    taker: Who | None
    num_takers: int
    policy: str
    price: float | None


class LeftPrefix(Struct):
    """Where the prompt leaves the cached one of ``cached_by``: at token ``position``, the first that differs. There are
    ``beyond`` tokens behind it, of which ``compared`` were compared with the prompt's own, and ``equal`` are the same.
    """

    position: int
    beyond: int
    compared: int
    equal: int
    cached_by: Who | None


class OtherCache(Struct):
    """The first ``tokens`` are cached for another ``kind``: "salt" or "adapter", the one of the name ``adapter``."""

    tokens: int
    kind: str
    adapter: str
    cached_by: Who | None


class RecoveredPrefix(Struct):
    """How the KV came that was cached: see ``EventReport``. ``resumed``: it had run before, here or elsewhere.
    ``found_tokens``: in the sources, of which ``loaded_tokens`` were loaded and the others computed. ``predicted``:
    seconds by method. ``seconds``: it took."""

    time: float
    resumed: bool
    method: str
    source: str
    peer: str | None
    device_tokens: int
    loaded_tokens: int
    predicted: dict[str, float]
    seconds: float | None
    found_tokens: int = 0
    sources: list[str] = []


class Preemption(Struct):
    """It lost its blocks to ``by`` at ``time``, and went on ``seconds`` later. ``by`` is None if that was a request of
    another key, or none: blocks that were to be loaded for it had not come."""

    time: float
    reason: str
    by: Who | None
    blocks: int
    freed: int
    seconds: float | None


class Move(Struct):
    """It left an executor at ``time`` for ``to``, where it was placed ``seconds`` later. ``reason``: "decode" (its
    prompt was computed), "drain" (the executor was stopped), "rejoined" (it began a new session), "lost" (it could not
    be reached any more), "stalled" (a step or a copy did not return), "misbehaved" (its messages made no sense),
    "revoked" (its key was), or "failed" (the scheduler did, in its work for it). ``next_token_seconds``: how long after
    ``time`` its next token came, None if none did."""

    time: float
    executor_id: str
    reason: str
    to: str | None
    seconds: float | None
    next_token_seconds: float | None = None


class Interruption(Struct):
    """The executor was reset at ``time``, after an error; its first step after that came back ``seconds`` later.
    ``ran``: it had begun to run there, and did not only wait."""

    time: float
    executor_id: str
    seconds: float | None
    ran: bool


class Phase(Struct):
    """A part of its life: seconds, its own tokens, the steps meanwhile, and the tokens of others' prompts in them."""

    seconds: float
    tokens: int
    steps: int
    others_tokens: int


class Explanation(Struct, omit_defaults=True):
    """All that is known of where a request's time went. Times are seconds since 1970.

    ``state``: "waiting", "running" or "ended". ``waits``: seconds by cause, see ``WaitCause``. ``ahead``: whose prompts
    were being computed when it came. ``resumed``: when it came from another scheduler. ``sentences``: all of it in
    words.
    """

    request_id: str
    client_request_id: str
    key: str
    state: str
    arrived: float
    total_seconds: float
    prompt_tokens: int
    output_tokens: int
    queue_seconds: float | None
    first_token_seconds: float | None
    cached_tokens: dict[str, int]
    executors: list[str]
    waits: dict[str, float] = {}
    ahead: list[Share] = []
    computes_prefix: Who | None = None
    prefill: Phase | None = None
    decode: Phase | None = None
    lost: list[LostPrefix] = []
    left: LeftPrefix | None = None
    other_cache: OtherCache | None = None
    not_asked: bool = False
    recoveries: list[RecoveredPrefix] = []
    preemptions: list[Preemption] = []
    moves: list[Move] = []
    resets: list[Interruption] = []
    resumed: float | None = None
    finish_reason: str | None = None
    sentences: list[str] = []


def explain(request: Request, now: float, since_1970: float, *, ended: bool = False) -> Explanation:
    """The facts about a request. ``now``: of the scheduler's clock, which ``since_1970`` seconds are added to."""
    timeline, first, cached = request.timeline, request.first_token_time, request.num_cached_tokens
    history = sorted(chain.from_iterable(map(attrgetter("history"), request.sequences)), key=_time)[-_MOST_EVENTS:]
    output = request.num_output_tokens
    told = Explanation(
        request_id=request.request_id,
        client_request_id=request.params.client_request_id,
        key=request.params.key,
        state="ended" if ended else "waiting" if isnan(request.scheduled_time) else "running",
        arrived=request.arrival_time + since_1970,
        total_seconds=now - request.arrival_time,
        prompt_tokens=len(request.prompt_token_ids),
        output_tokens=output,
        queue_seconds=_after(request.arrival_time, request.scheduled_time),
        first_token_seconds=_after(request.arrival_time, first),
        cached_tokens=request.cached_tokens,
        executors=[executor_id for _, executor_id in request.executors],
        waits={str(cause): seconds for cause, seconds in timeline.waits_until(now).items()},
        ahead=[Share(_who(one.request), one.tokens) for one in timeline.ahead if one.request is not request.ref],
        computes_prefix=_who(timeline.computes_prefix),
        prefill=_phase(timeline.prefill, first - request.scheduled_time, len(request.prompt_token_ids) - cached),
        decode=_phase(timeline.decode, now - first, output) if ended else None,
        recoveries=_recoveries(history, timeline, since_1970),
        preemptions=_preemptions(history, since_1970),
        moves=_moves(timeline.departures, request.executors, since_1970),
        resets=_resets(timeline.interruptions, since_1970),
        resumed=_dated(timeline.resumed, since_1970),
        finish_reason=next((one.finish_reason for one in request.sequences if one.finish_reason), None),
    )
    if timeline.missed is not None:
        _explain_missed(told, timeline.missed, since_1970)
    return told


def _explain_missed(told: Explanation, missed: MissedPrefix, since_1970: float) -> None:
    """Say why a part of the prompt was not cached."""
    position = missed.found
    for run, tokens in missed.lost:
        lost = _lost(run, position, tokens, since_1970)
        position += tokens
        if told.lost and _together(told.lost[-1], lost):
            told.lost[-1].tokens += tokens
        else:
            told.lost.append(lost)
    if (left := missed.divergence) is not None:
        told.left = LeftPrefix(left.position, left.beyond, left.compared, left.equal, _who(left.cached_by))
    if (other := missed.other_salt) is not None:
        adapter = other.cached_by.adapter if other.cached_by is not None else ""
        told.other_cache = OtherCache(other.tokens, other.kind, adapter, _who(other.cached_by))
    told.not_asked = missed.not_asked


def seen_by(told: Explanation, key: str) -> Explanation:
    """What the holder of an API key gets to know of its own request: other keys' requests are not named, and nothing is
    told of what these have cached, or had."""

    def mine(who: Who | None) -> Who | None:
        return who if who is not None and who.key == key else None

    others = sum(one.tokens for one in told.ahead if mine(one.request) is None)
    ahead = [one for one in told.ahead if mine(one.request) is not None]
    return replace(
        told,
        ahead=[*ahead, Share(None, others)] if others else ahead,
        computes_prefix=mine(told.computes_prefix),
        lost=[replace(one, taker=mine(one.taker)) for one in told.lost if mine(one.cached_by) is not None],
        left=told.left if told.left is not None and mine(told.left.cached_by) is not None else None,
        other_cache=told.other_cache
        if told.other_cache is not None and mine(told.other_cache.cached_by) is not None
        else None,
        preemptions=[replace(one, by=mine(one.by)) for one in told.preemptions],
    )


def _who(request: RequestRef | None) -> Who | None:
    return None if request is None else Who(request.request_id, request.key)


def _after(start: float, end: float) -> float | None:
    return None if isnan(end) else max(0.0, end - start)


def _dated(time: float | None, since_1970: float) -> float | None:
    return None if time is None or isnan(time) else time + since_1970


def _time(event: object) -> float:
    return event.began if isinstance(event, Recovery) else event.time if isinstance(event, Preempted) else nan


def _phase(steps: Steps | None, seconds: float, tokens: int) -> Phase | None:
    if steps is None or isnan(seconds):
        return None
    return Phase(max(0.0, seconds), tokens, steps.steps, steps.others_tokens)


def _lost(run: LostRun, position: int, tokens: int, since_1970: float) -> LostPrefix:
    started = run.cached_by.started if run.cached_by is not None else nan
    return LostPrefix(
        position=position,
        tokens=tokens,
        reason=run.reason,
        time=run.time + since_1970,
        executor_id=run.executor_id,
        tier=tier_name(run.tier),
        cached_by=_who(run.cached_by),
        cached_at=_dated(started, since_1970),
        taker=_who(run.taker),
        num_takers=run.num_takers,
        policy=run.policy,
        price=None if isnan(run.price) else run.price,
    )


def _together(one: LostPrefix, other: LostPrefix) -> bool:
    """Whether two parts of a prompt, one behind the other, were cached by one request and lost for another one."""
    return _cause_of(one) == _cause_of(other)


_cause_of = attrgetter("reason", "executor_id", "cached_by", "taker")


def _resets(interruptions: Iterable[Interrupted], since_1970: float) -> list[Interruption]:
    return [
        Interruption(one.time + since_1970, one.executor_id, _after(one.time, one.ended), not isnan(time))
        for one, time in interruptions
    ]


def _recoveries(history: Iterable[object], timeline: Timeline, since_1970: float) -> list[RecoveredPrefix]:
    broken_off = [one.time for one in timeline.departures if one.ran] + [one.time for one in timeline.interruptions]
    return [_recovered(one, broken_off, since_1970) for one in history if isinstance(one, Recovery)]


def _recovered(event: Recovery, broken_off: list[float], since_1970: float) -> RecoveredPrefix:
    again = not event.first_start and any(time <= event.began for time in broken_off)
    return RecoveredPrefix(
        time=event.began + since_1970,
        resumed=event.resumed or again,
        method=event.method,
        source=event.origin,
        peer=event.plan.peer,
        device_tokens=event.device_tokens,
        loaded_tokens=event.loaded_tokens,
        predicted={} if event.estimate is None else event.estimate.by_method,
        seconds=_after(event.began, event.ended),
        found_tokens=event.plan.num_blocks * event.sequence.table.block_size,
        sources=event.plan.sources,
    )


def _preemptions(history: Iterable[object], since_1970: float) -> list[Preemption]:
    found: list[tuple[float, Preemption]] = []
    for event in history:
        if isinstance(event, Preempted):
            told = Preemption(event.time + since_1970, event.reason, _who(event.by), event.blocks, event.freed, None)
            found.append((event.time, told))
        elif isinstance(event, Recovery) and event.resumed and found and found[-1][1].seconds is None:
            found[-1][1].seconds = event.began - found[-1][0]
    return [told for _, told in found]


def _moves(departures: Iterable[Departure], executors: Iterable[tuple[float, str]], since_1970: float) -> list[Move]:
    moves = []
    for left in departures:
        then, to = next(((time, name) for time, name in executors if time >= left.time), (nan, None))
        back = None if left.next_token is None else left.next_token - left.time
        moves.append(Move(left.time + since_1970, left.executor_id, left.reason, to, _after(left.time, then), back))
    return moves
