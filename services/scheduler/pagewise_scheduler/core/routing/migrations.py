"""Migrations of requests from the executor that computed their prompt to another one that decodes.

A migration drops references at the source and is a recovery at the decoder. The blocks stay cached at the source, and
the decoder fetches them: the blocks of each chunk as soon as it is computed, so that few are left at the end. If no
decoder has room for a request, it stays and decodes at the source until one has.
"""

from collections.abc import Callable, Collection
from typing import NamedTuple

from pagewise_scheduler.core.requests.request import Request, RequestSequence, SequenceStatus
from pagewise_scheduler.core.routing.executor_view import ExecutorView, Placement
from pagewise_scheduler.core.routing.policies import AfterPrompt, Roles, may_move
from pagewise_scheduler.core.routing.prompts import PrefixQuery
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.scheduling.step import StepOutput


class Migration(NamedTuple):
    """A request that has left its executor, and the executor to which it migrates; None: that one takes requests no
    more."""

    request: Request
    executor: ExecutorView | None


class Migrations:
    """The requests of one executor, ``source``, that are to migrate.

    ``touch``: called with executors that have new work to plan.
    """

    def __init__(self, source: ExecutorView, roles: Roles, touch: Callable[[ExecutorView], None]) -> None:
        self._source = source
        self._roles = roles
        self._touch = touch
        self._placed: dict[Request, Placement] = {}
        self._staying: dict[Request, None] = {}
        self._leaving: dict[Request, ExecutorView] = {}
        self._num_ended = -1

    @property
    def num_staying(self) -> int:
        """Requests that decode where their prompt was computed, because no decoder has room."""
        return len(self._staying)

    def placed(self, placement: Placement) -> None:
        """A request was placed on the executor."""
        if placement.decoder is not None:
            self._placed[placement.request] = placement
            placement.on_end = self._ended

    def _ended(self, request: Request) -> None:
        del self._placed[request]
        self._staying.pop(request, None)
        self._leaving.pop(request, None)

    def stepped(self, output: StepOutput, executors: Collection[ExecutorView], now: float) -> list[Migration]:
        """A step of the executor has come back. Returns the requests that have left, which the caller adds elsewhere at
        once. ``executors``: all executors that take requests. ``now``: seconds."""
        # A request migrates in three steps. While its prompt is computed (``_placed``), the decoder fetches the blocks
        # of each chunk. After the last chunk it decodes here (``_staying``) until a decoder has room. Then nothing more
        # is planned for it (``_leaving``), and it leaves when its last token in flight has come back.
        if not self._placed:
            return []
        for sequence, num_computed in output.computed:
            if sequence.request in self._placed and sequence is sequence.request.sequences[0]:
                self._computed(sequence, num_computed, executors)
        if self._num_ended != self._roles.num_ended:  # there is no more room than before unless a sequence has ended
            self._num_ended = self._roles.num_ended
            self._begin_migrations(executors, now)
        left = [(request, to) for request, to in self._leaving.items() if _take_out(self._source.scheduler, request)]
        return [Migration(request, decoder if decoder in executors else None) for request, decoder in left]

    def _computed(self, sequence: RequestSequence, num_computed: int, executors: Collection[ExecutorView]) -> None:
        """A chunk of a prompt has come back: the decoder fetches it, or after the last one the request may migrate."""
        request = sequence.request
        if sequence.status is not SequenceStatus.DRAINING:  # the executor was reset, and the request has begun again
            self._leaving.pop(request, None)
        decoder = self._placed[request].decoder
        if sequence.prefilled:
            self._staying[request] = None
            self._num_ended = -1
        elif decoder in executors and sequence.status is SequenceStatus.PREFILL:
            self._fetch(decoder, request, num_computed)

    def _begin_migrations(self, executors: Collection[ExecutorView], now: float) -> None:
        """Begin migrations in the order in which prompts were completed, as long as decoders have room."""
        for request in list(self._staying):
            first = request.sequences[0]
            movable = may_move(request) and any(one.serves(request) for one in executors if one is not self._source)
            if first.status is not SequenceStatus.DECODE or not first.prefilled or not movable:
                del self._staying[request]  # if it was preempted, it is noted again when its tokens are computed
            elif (decoder := self._with_room(request, executors, now)) is not None:
                del self._staying[request]
                self._fetch(decoder, request, request.sequences[0].num_tokens - 1)
                _stop_planning(self._source.scheduler, request)
                self._leaving[request] = decoder
            else:
                break

    def _with_room(self, request: Request, executors: Collection[ExecutorView], now: float) -> ExecutorView | None:
        """The decoder to which a request migrates, None: no decoder has room for it."""
        placement = self._placed[request]
        after = AfterPrompt(request, PrefixQuery(request), executors, self._roles, now)
        decoder = placement.decoder
        if not after.has_room(decoder):  # the expected decoder comes first, because it has fetched blocks already
            decoder = after.best_elsewhere(self._source, 0.0).decoder
        if not after.has_room(decoder):
            return None
        placement.set_decoder(decoder)
        return decoder

    def _fetch(self, decoder: ExecutorView | None, request: Request, num_tokens: int) -> None:
        assert decoder is not None
        decoder.scheduler.features.prefetches.want(request.sequences[0], num_tokens)
        self._touch(decoder)


def _stop_planning(scheduler: Scheduler, request: Request) -> None:
    """Plan nothing more for a request. Its tokens in flight still come, so it stays known to the scheduler."""
    scheduler.waiting.withdraw(request)
    for sequence in request.sequences:
        for feature in request.features:
            feature.release(sequence, scheduler.newest_in_flight)
        if sequence.status in (SequenceStatus.PREFILL, SequenceStatus.DECODE):
            scheduler.vacate(sequence, ends=False)
        if not sequence.finished:
            sequence.status = SequenceStatus.DRAINING


def _take_out(scheduler: Scheduler, request: Request) -> bool:
    """Remove a request after ``_stop_planning``; False: a token of it is in flight, or it has begun again because the
    executor was reset."""
    oldest = scheduler.oldest_step
    for sequence in request.sequences:
        if not sequence.finished and sequence.status is not SequenceStatus.DRAINING:
            return False
        if not sequence.finished and oldest is not None and sequence.last_step >= oldest:
            return False
    scheduler.forget(request)
    return True
