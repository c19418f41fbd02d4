"""Where a request's time goes: what is noted of it at its turning points, from which an explanation is made."""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isnan, nan
from typing import TYPE_CHECKING, Literal, NamedTuple

from pagewise_scheduler.core.memory.eviction_history import LostRun, RequestRef

if TYPE_CHECKING:
    from pagewise_scheduler.core.scheduling.step import Chunks

WaitCause = Literal[
    "rows", "memory", "prefill", "turn", "step", "prefix", "grammar", "adapter", "no executor", "restart", "storage"
]
"""What a request waits for before it runs: a row, blocks, the steps' tokens that prompts of others take, others of its
window; a step in flight; the prefix that another one computes, its grammar, its adapter; an executor, those of before a
restart of the scheduler, or a look into storage."""

BLOCKS_CORRUPT = "blocks came corrupt, or not at all"
LENDER_GONE = "the executor that lent its blocks is gone"
"""Reasons of preemptions that are for no other request."""

_DEPARTURES = 8
_CHUNKS = 32
_STEPS_IN_FLIGHT = 2
_NAMED = 3

SHARED_CAUSES: tuple[WaitCause, ...] = ("rows", "memory", "prefill", "turn")
"""What all that wait in a queue wait for."""


class PrefillShare(NamedTuple):
    """So many tokens of a request's prompt."""

    request: RequestRef
    tokens: int


class Sums(NamedTuple):
    """What a scheduler has done up to a moment: steps, tokens of prompts in them, and the seconds for which its queue
    has waited for each of ``SHARED_CAUSES``. The difference of two is what it did in between."""

    steps: int
    prefill_tokens: int
    waited: tuple[float, ...]


class Activity:
    """What a scheduler has done so far, as ``Sums``: anybody's part of it is the difference between two moments.

    It is told once for each step that is planned, whatever its size.
    """

    def __init__(self) -> None:
        self.steps = self.prefill_tokens = 0
        self._waited = dict.fromkeys(SHARED_CAUSES, 0.0)
        self._cause: WaitCause | None = None
        self._since = 0.0
        # Of steps that may be in flight: the number of each, who, and how many tokens.
        self._chunks: deque[tuple[int, list[PrefillShare]]] = deque(maxlen=_STEPS_IN_FLIGHT)
        self._ahead: tuple[PrefillShare, ...] | None = None  # until the next step is planned

    def planned(self, num_decoding: int, chunks: "Chunks", cause: WaitCause | None, now: float) -> None:
        """A step computes ``chunks``, and a token of ``num_decoding`` sequences; there is none if it has neither.
        ``cause``: what those who still wait do so for; None: nobody does."""
        self._ahead = None
        if chunks:
            self.steps += 1
            for one, size in chunks:
                self.prefill_tokens += size
                one.request.owner.timeline.computes(size, now)
            self._chunks.append((self.steps, [PrefillShare(one.request.owner.ref, size) for one, size in chunks]))
        elif num_decoding:
            self.steps += 1
        if self._cause is not None and now > self._since:
            self._waited[self._cause] += now - self._since
        self._cause, self._since = cause, now

    def sums(self, now: float) -> Sums:
        """What was done up to ``now``."""
        if self._cause is not None and now > self._since:
            self._waited[self._cause] += now - self._since
            self._since = now
        return Sums(self.steps, self.prefill_tokens, tuple(self._waited.values()))

    def ahead(self) -> tuple[PrefillShare, ...]:
        """Whose prompts the last steps compute, the largest first, a few of them."""
        if self._ahead is None:
            tokens = Counter[RequestRef]()
            for step, shares in self._chunks:
                for share in shares if step > self.steps - _STEPS_IN_FLIGHT else ():
                    tokens[share.request] += share.tokens
            self._ahead = tuple(PrefillShare(*one) for one in tokens.most_common(_NAMED))
        return self._ahead


class Departure(NamedTuple):
    """It left an executor: at ``time``, because of ``reason``. ``ran``: it had begun to run there. ``next_token``: when
    its next token came, if one has."""

    time: float
    executor_id: str
    reason: str
    ran: bool
    next_token: float | None = None


@dataclass(slots=True, eq=False)
class Reset:
    """An executor was reset at ``time``, after an error, and lost all KV; one object for all whom that interrupted.

    ``ended``: when the first step after it had come back, NaN until then.
    """

    time: float
    executor_id: str
    ended: float = nan


class Chunk(NamedTuple):
    """A step that was planned at ``time`` computes so many of its tokens beside its decodes."""

    time: float
    tokens: int


class Interrupted(NamedTuple):
    """A reset of the executor that had the request. ``time``: when it interrupted the request, NaN if that waited."""

    reset: Reset
    time: float


class Steps(NamedTuple):
    """Steps at its executors between two moments of a request, and the tokens of prompts of others in them."""

    steps: int
    others_tokens: int


@dataclass(slots=True, frozen=True)
class Divergence:
    """Where a prompt leaves the cached prefix of another one.

    ``position``: the first token that differs. ``beyond``: tokens that are cached behind it there. ``compared``: of
    these, how many were compared with the prompt's own at the same positions, and ``equal``: how many are the same.
    """

    position: int
    cached_by: RequestRef | None
    beyond: int
    compared: int
    equal: int


@dataclass(slots=True, frozen=True)
class OtherSalt:
    """The same first ``tokens`` are cached under another cache salt, or for another adapter."""

    tokens: int
    kind: Literal["salt", "adapter"]
    cached_by: RequestRef | None


@dataclass(slots=True)
class MissedPrefix:
    """Why nothing is cached of a prompt behind its first ``found`` tokens, when it first ran.

    ``lost``: what had been cached there, as far as that is remembered, with how many tokens of the prompt it was.
    ``not_asked``: the cache was not asked, because log-probabilities of the prompt come from computing it.
    """

    found: int
    lost: list[tuple[LostRun, int]] = field(default_factory=list)
    divergence: Divergence | None = None
    other_salt: OtherSalt | None = None
    not_asked: bool = False


@dataclass(slots=True)
class Timeline:
    """What is known of one request; times are seconds of the scheduler's clock.

    Fields:
        resumed: when it came from another scheduler, None if it did not.
        waits: seconds by cause, before it ran. ahead: whose prompts were being computed when it came, and how much of
            them; computes_prefix: who computed the prefix that it waited for.
        prefill, decode: steps between its start and its first token, and from there to its end.
        missed: why its prefix was not cached. departures: from executors, and interruptions: by resets of those it was
            at; the last few.
        computed: tokens that steps have computed of it beside its decodes, those that they computed again included.
        chunks: what each of these steps computed; of many, neighbours are told as one.
    """

    resumed: float | None = None
    waits: dict[WaitCause, float] = field(default_factory=dict)
    ahead: tuple[PrefillShare, ...] = ()
    computes_prefix: RequestRef | None = None
    prefill: Steps | None = None
    decode: Steps | None = None
    missed: MissedPrefix | None = None
    departures: tuple[Departure, ...] = ()
    interruptions: tuple[Interrupted, ...] = ()
    computed: int = 0
    chunks: tuple[Chunk, ...] = ()
    _waits_since: tuple[WaitCause, float] | None = None
    _queued: tuple[Activity, float, Sums] | None = None  # since what it waits for there was noted last
    _held: WaitCause | None = None
    _running: tuple[Activity, Sums, int] | None = None
    _steps: Steps | None = None
    _waited_until: float = float("-inf")

    def computes(self, tokens: int, now: float) -> None:
        """A step that is planned now computes so many of its tokens."""
        self.computed += tokens
        known = self.chunks
        if len(known) == _CHUNKS:
            known = tuple(
                Chunk(one.time, one.tokens + next_.tokens) for one, next_ in zip(known[::2], known[1::2], strict=True)
            )
        self.chunks = (*known, Chunk(now, tokens))

    def add(self, cause: WaitCause, seconds: float) -> None:
        """It has waited so long for this."""
        if seconds > 0.0:
            self.waits[cause] = self.waits.get(cause, 0.0) + seconds

    def begin(self, cause: WaitCause, now: float) -> None:
        """It waits for something whose end ``end`` tells, since ``now`` or since the end of its last wait."""
        self.end(now)
        self._waits_since = cause, max(now, self._waited_until)

    def end(self, now: float) -> None:
        """The wait that was begun last has ended, if there was one."""
        if self._waits_since is not None:
            cause, since = self._waits_since
            self.add(cause, now - since)
            self._waits_since, self._waited_until = None, now

    def queued(self, work: Activity, now: float) -> None:
        """It waits in the queue of a scheduler, since ``now`` or since the end of its last wait; told for each of its
        sequences that comes there, of which the first tells."""
        if any(one is not None and one[0] is work for one in (self._queued, self._running)):
            return
        self.end(now)
        now = max(now, self._waited_until)
        self._queued, self._held = (work, now, work.sums(now)), None
        if not self.ahead:
            self.ahead = work.ahead()

    def held(self, cause: WaitCause, computes: RequestRef | None, now: float) -> None:
        """It could start in the queue but for this, from ``now`` until ``released``; it may be told again meanwhile.

        ``computes``: who computes the prefix that it waits for, if anybody.
        """
        if self._queued is None:
            return  # it waits because it was preempted
        self.computes_prefix = computes or self.computes_prefix
        if cause != self._held:
            self._note_wait(now)
            self._held = cause

    def released(self, now: float) -> None:
        """What held it in the queue does so no more."""
        if self._held is not None:
            self._note_wait(now)
            self._held = None

    def started(self, now: float) -> None:
        """It runs, for the first time at this executor, or since that was reset."""
        work = self._leave_queue(now)
        if work is not None:
            self._running = work, work.sums(now), self.computed

    def _leave_queue(self, now: float) -> Activity | None:
        """Note for what it has waited in a queue; returns whose queue that is, None if it is in none."""
        if self._queued is None:
            return None
        work = self._queued[0]
        self._note_wait(now)
        self._queued = self._held = None
        return work

    def _note_wait(self, now: float) -> None:
        """Add what it has waited for in the queue since this was noted last."""
        if self._queued is not None:
            for cause, seconds in self._wait_until(now):
                self.add(cause, seconds)
            work = self._queued[0]
            self._queued = work, now, work.sums(now)

    def _wait_until(self, now: float) -> Iterator[tuple[WaitCause, float]]:
        """What it has waited for, and how long, since that was noted last."""
        if self._waits_since is not None:
            cause, since = self._waits_since
            yield cause, now - since
        elif self._queued is not None:
            work, since, before = self._queued
            left = now - since
            if self._held is not None:
                yield self._held, left
                return
            for cause, then, until in zip(SHARED_CAUSES, before.waited, work.sums(now).waited, strict=True):
                seconds = max(0.0, min(until - then, left))
                yield cause, seconds
                left -= seconds
            yield "step", left

    def waits_until(self, now: float) -> dict[WaitCause, float]:
        """Seconds by cause, with what it waits for at ``now``."""
        waits = dict(self.waits)
        for cause, seconds in self._wait_until(now):
            if seconds > 0.0:
                waits[cause] = waits.get(cause, 0.0) + seconds
        return waits

    def answered(self, now: float) -> None:
        """Its first token is there."""
        self.prefill = self._end_phase(now)

    def ended(self, now: float) -> None:
        """Nothing of it runs any more."""
        self.end(now)
        if self.prefill is not None and self.decode is None:
            self.decode = self._end_phase(now)
        self._running = self._queued = None

    def left(self, executor_id: str, reason: str, now: float) -> None:
        """It goes on elsewhere."""
        departure = Departure(now, executor_id, reason, ran=self._running is not None)
        self.departures = (*self.departures[1 - _DEPARTURES :], departure)
        self._leave(now)

    def interrupted(self, reset: Reset, now: float) -> None:
        """Its executor starts over: it is queued there again, and waits from ``now`` on."""
        known, time = self.interruptions, nan if self._running is None else now
        if known and known[-1].reset is reset:  # a further error before a step has come back
            time = time if isnan(known[-1].time) else known[-1].time
            known = known[:-1]
        self.interruptions = (*known[1 - _DEPARTURES :], Interrupted(reset, time))
        self._leave(now)
        self._waited_until = now

    def goes_on(self, now: float) -> None:
        """All its known tokens are computed where it is, and the next one has come."""
        if self.departures and self.departures[-1].next_token is None:
            self.departures = tuple(
                one._replace(next_token=now) if one.next_token is None else one for one in self.departures
            )

    def _leave(self, now: float) -> None:
        """It neither waits nor runs at its executor any more."""
        self._leave_queue(now)
        self._count_steps(now)
        self._running = None

    def _end_phase(self, now: float) -> Steps | None:
        """The steps since the last phase ended, at all executors."""
        self._count_steps(now)
        steps, self._steps = self._steps, None
        return steps

    def _count_steps(self, now: float) -> None:
        """Add the steps that its executor has planned for this phase up to now."""
        if self._running is None:
            return
        work, before, computed = self._running
        after, past = work.sums(now), self._steps or Steps(0, 0)
        others = after.prefill_tokens - before.prefill_tokens - (self.computed - computed)
        self._steps = Steps(past.steps + after.steps - before.steps, past.others_tokens + max(0, others))
        self._running = work, after, self.computed
