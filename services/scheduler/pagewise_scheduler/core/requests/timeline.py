"""How a request spends its time: facts that are noted at its turning points, from which its report is made."""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isnan, nan
from typing import TYPE_CHECKING, Literal, NamedTuple

from pagewise_shared.protocol import GroupKind

from pagewise_scheduler.core.memory.eviction_history import LostRun, RequestRef

if TYPE_CHECKING:
    from pagewise_scheduler.core.scheduling.step import Chunks

WaitCause = Literal[
    "rows", "memory", "prefill", "turn", "step", "prefix", "grammar", "adapter", "no executor", "restart", "storage"
]
"""The reason why a request does not run yet: it needs a row, blocks, tokens of the steps (other prompts take them), or
its turn in the queue; a step is in flight; another request computes its prefix; its grammar or adapter is not ready;
there is no executor; the executors of before a restart of the scheduler are not back; or storage has not answered."""

BLOCKS_CORRUPT = "blocks came corrupt, or not at all"
LENDER_GONE = "the executor that lent its blocks is gone"
"""Reasons of preemptions that are for no other request."""

_DEPARTURES = 8
_CHUNKS = 32
_STEPS_IN_FLIGHT = 2
_NAMED = 3

SHARED_CAUSES: tuple[WaitCause, ...] = ("rows", "memory", "prefill", "turn")
"""Causes for which all requests in a queue wait."""


class PrefillShare(NamedTuple):
    """So many tokens of a request's prompt."""

    request: RequestRef
    tokens: int


class Sums(NamedTuple):
    """The work of a scheduler up to a moment. The difference of two is its work in between.

    ``steps``, ``prefill_tokens``: planned. ``waited``: seconds for which its queue has waited, by ``SHARED_CAUSES``.
    """

    steps: int
    prefill_tokens: int
    waited: tuple[float, ...]


class Activity:
    """The work of a scheduler so far. A request notes the sums at its turning points, so a step costs one call here,
    however many requests wait or run."""

    def __init__(self) -> None:
        self.steps = self.prefill_tokens = 0
        self._waited = dict.fromkeys(SHARED_CAUSES, 0.0)
        self._cause: WaitCause | None = None
        self._since = 0.0
        # Of steps that may be in flight: the number of each, and the tokens of each prompt in it.
        self._chunks: deque[tuple[int, list[PrefillShare]]] = deque(maxlen=_STEPS_IN_FLIGHT)
        self._ahead: tuple[PrefillShare, ...] | None = None  # until the next step is planned

    def planned(self, num_decoding: int, chunks: "Chunks", cause: WaitCause | None, now: float) -> None:
        """A step computes ``chunks``, and a token of ``num_decoding`` sequences; there is no step if both are empty.

        ``cause``: why requests in the queue still wait, None if the queue is empty.
        """
        self._ahead = None
        if chunks:
            self.steps += 1
            for one, size in chunks:
                self.prefill_tokens += size
                one.request.owner.timeline.computes(size, now)
            self._chunks.append((self.steps, [PrefillShare(one.request.owner.ref, size) for one, size in chunks]))
        elif num_decoding:
            self.steps += 1
        self._note_wait(now)
        self._cause, self._since = cause, now

    def sums(self, now: float) -> Sums:
        """Return the work up to ``now``."""
        self._note_wait(now)
        return Sums(self.steps, self.prefill_tokens, tuple(self._waited.values()))

    def _note_wait(self, now: float) -> None:
        if self._cause is not None and now > self._since:
            self._waited[self._cause] += now - self._since
            self._since = now

    def ahead(self) -> tuple[PrefillShare, ...]:
        """Return the prompts that the last steps compute, the largest first, a few of them."""
        if self._ahead is None:
            tokens = Counter[RequestRef]()
            for step, shares in self._chunks:
                for share in shares if step > self.steps - _STEPS_IN_FLIGHT else ():
                    tokens[share.request] += share.tokens
            self._ahead = tuple(PrefillShare(*one) for one in tokens.most_common(_NAMED))
        return self._ahead


class Departure(NamedTuple):
    """The request left an executor at ``time``. ``ran``: it had begun to run there. ``next_token``: when its next token
    came, None if none has."""

    time: float
    executor_id: str
    reason: str
    ran: bool
    next_token: float | None = None


@dataclass(slots=True, eq=False)
class Reset:
    """An executor was reset at ``time``, after an error, and lost all KV; its requests share one object.

    ``ended``: when the first step after it had come back, NaN until then.
    """

    time: float
    executor_id: str
    ended: float = nan


class Chunk(NamedTuple):
    """A step that was planned at ``time`` computes so many tokens of the request, beside its decodes."""

    time: float
    tokens: int


class Interrupted(NamedTuple):
    """A reset of the executor that had the request. ``time``: when it interrupted the request, NaN if that waited."""

    reset: Reset
    time: float


class Steps(NamedTuple):
    """Steps between two moments of a request, and the tokens of other prompts in them."""

    steps: int
    others_tokens: int


class Divergence(NamedTuple):
    """Where a prompt leaves the cached prefix of another request.

    ``position``: the first token that differs. ``beyond``: tokens that are cached behind it there. ``compared``: how
    many of these were compared with the prompt's own at the same positions, and ``equal``: how many are the same.
    """

    position: int
    cached_by: RequestRef | None
    beyond: int
    compared: int
    equal: int


class OtherSalt(NamedTuple):
    """The same first ``tokens`` are cached under another cache salt, or for another adapter."""

    tokens: int
    kind: Literal["salt", "adapter"]
    cached_by: RequestRef | None


class NoSnapshot(NamedTuple):
    """A group of layers without a snapshot behind cached tokens. ``kind``: of its blocks.

    ``lost``: the last known one, behind the first ``position`` tokens.
    """

    kind: GroupKind
    position: int = 0
    lost: LostRun | None = None


class NoWindow(NamedTuple):
    """Cached ``tokens`` from ``position`` on behind which no sequence can begin: no tier has the windows or states of
    the groups in ``lacking`` there. ``cached_by``: the request that computed the last of them. ``due``: the number of
    tokens behind which this request is to take a snapshot of the cached blocks; 0: nowhere."""

    position: int
    tokens: int
    cached_by: RequestRef | None
    lacking: tuple[NoSnapshot, ...] = ()
    due: int = 0


@dataclass(slots=True)
class MissedPrefix:
    """Why nothing is cached of a prompt behind its first ``found`` tokens, when it first ran.

    ``no_window``: the last of them, if they could not be used.
    ``lost``: runs of blocks that had been cached there, as far as they are remembered, each with its number of tokens.
    ``not_asked``: the cache was not used, because log-probabilities of the prompt come from computing it.
    """

    found: int
    no_window: NoWindow | None = None
    lost: list[tuple[LostRun, int]] = field(default_factory=list)
    divergence: Divergence | None = None
    other_salt: OtherSalt | None = None
    not_asked: bool = False


class _Wait(NamedTuple):
    """A wait that has not ended. ``cause``: None in a queue where the scheduler's work determines the causes.

    ``queue``: the work of the scheduler in whose queue the request is, with ``before``: its sums at ``since``.
    """

    cause: WaitCause | None
    since: float
    queue: Activity | None = None
    before: Sums | None = None

    def until(self, now: float) -> Iterator[tuple[WaitCause, float]]:
        """Yield the causes of the wait, and the seconds of each."""
        left = now - self.since
        if self.cause is not None or self.queue is None or self.before is None:
            yield self.cause or "step", left
            return
        for cause, then, until in zip(SHARED_CAUSES, self.before.waited, self.queue.sums(now).waited, strict=True):
            seconds = max(0.0, min(until - then, left))
            yield cause, seconds
            left -= seconds
        yield "step", left


@dataclass(slots=True)
class Timeline:
    """The facts about one request; times are seconds of the scheduler's clock.

    Fields:
        resumed: when it came from another scheduler, None if it did not.
        waits: seconds by cause, before it ran. ahead: prompts that were being computed when it arrived;
            computes_prefix: the request that computed the prefix for which it waited.
        prefill, decode: steps between its start and its first token, and from there to its end.
        missed: why its prefix was not cached. departures: from executors, and interruptions: by resets of its
            executors; the last few.
        computed: tokens of it that steps have computed beside its decodes; recomputed tokens count again.
        chunks: the part of it in each of these steps; of many, neighbours are joined.
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
    _wait: _Wait | None = None
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

    def begin(self, cause: WaitCause, now: float) -> None:
        """It waits outside of a queue until ``end``, since ``now`` or since the end of its last wait."""
        self.end(now)
        self._wait = _Wait(cause, max(now, self._waited_until))

    def end(self, now: float) -> None:
        """The wait that was begun last has ended, if there was one."""
        if self._wait is not None and self._wait.queue is None:
            self._end_wait(now)
            self._waited_until = now

    def queued(self, work: Activity, now: float) -> None:
        """It waits in the queue of a scheduler, since ``now`` or since the end of its last wait. The first of its
        sequences that comes there counts."""
        if (self._wait is not None and self._wait.queue is work) or (
            self._running is not None and self._running[0] is work
        ):
            return
        self.end(now)
        now = max(now, self._waited_until)
        self._wait = _Wait(None, now, work, work.sums(now))
        if not self.ahead:
            self.ahead = work.ahead()

    def held(self, cause: WaitCause, computes: RequestRef | None, now: float) -> None:
        """It could start in the queue but for this, from ``now`` until ``released``; repeated calls change nothing.

        ``computes``: the request that computes the prefix for which it waits, if there is one.
        """
        if self._wait is None or self._wait.queue is None:
            return  # it waits because it was preempted
        self.computes_prefix = computes or self.computes_prefix
        self._wait_for(cause, now)

    def released(self, now: float) -> None:
        """It is not held in the queue any more."""
        self._wait_for(None, now)

    def _wait_for(self, cause: WaitCause | None, now: float) -> None:
        """Wait in the same queue for another cause."""
        wait = self._wait
        if wait is not None and wait.queue is not None and wait.cause != cause:
            self._end_wait(now)
            self._wait = _Wait(cause, now, wait.queue, wait.queue.sums(now))

    def started(self, now: float) -> None:
        """It runs, for the first time at this executor, or since that was reset."""
        if self._wait is not None and (work := self._wait.queue) is not None:
            self._end_wait(now)
            self._running = work, work.sums(now), self.computed

    def _end_wait(self, now: float) -> None:
        self.waits, self._wait = self.waits_until(now), None

    def waits_until(self, now: float) -> dict[WaitCause, float]:
        """Return the seconds that it has waited until ``now``, by cause."""
        waits = dict(self.waits)
        for cause, seconds in self._wait.until(now) if self._wait is not None else ():
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
        self._running = self._wait = None

    def left(self, executor_id: str, reason: str, now: float) -> None:
        """It leaves its executor, and continues on another one."""
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
        """It neither waits in a queue nor runs at its executor any more."""
        if self._wait is not None and self._wait.queue is not None:
            self._end_wait(now)
        self._count_steps(now)
        self._running = None

    def _end_phase(self, now: float) -> Steps | None:
        """Return the steps since the last phase ended, at all executors."""
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
