"""Requests that go on at another executor once their prompt is computed: when they leave, and for where.

A move is dropping references here and a recovery there. The blocks stay behind as a cache, and the executor where a
request goes on fetches them: those of each chunk as soon as it is computed, so that little is left at the end. A
request that nobody has room for stays where it is and decodes there, until there is room.
"""

from collections.abc import Callable, Collection
from typing import NamedTuple

from pagewise_scheduler.core.requests.request import Request, SequenceStatus
from pagewise_scheduler.core.routing.executor_view import ExecutorView, Placement
from pagewise_scheduler.core.routing.prefix_query import PrefixQuery
from pagewise_scheduler.core.routing.roles import Roles, may_move
from pagewise_scheduler.core.scheduling.departures import begin_leaving, leaves
from pagewise_scheduler.core.scheduling.step import StepOutput


class Move(NamedTuple):
    """A request that has left, and the executor at which it goes on; None: that one takes requests no more."""

    request: Request
    executor: ExecutorView | None


class Moves:
    """The requests of one executor, ``source``, that are to go on elsewhere.

    ``touch``: called with executors that have something new to plan.
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
        """Requests that decode where their prompt was computed, because nobody else has room."""
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

    def stepped(self, output: StepOutput, executors: Collection[ExecutorView], now: float) -> list[Move]:
        """A step of the executor has come back. Returns the requests that have left: they are to be added elsewhere
        at once. ``executors``: all that take requests."""
        if not self._placed:
            return []
        for sequence, num_computed in output.computed:
            request = sequence.request
            if (placement := self._placed.get(request)) is None or sequence is not request.sequences[0]:
                continue
            if sequence.status is not SequenceStatus.DRAINING:  # the executor was reset, and it has begun again
                self._leaving.pop(request, None)
            if sequence.prefilled:
                self._staying[request] = None
                self._num_ended = -1
            elif placement.decoder in executors and sequence.status is SequenceStatus.PREFILL:
                self._fetch(placement.decoder, request, num_computed)
        if self._num_ended != self._roles.num_ended:  # else there is no more room than before
            self._num_ended = self._roles.num_ended
            self._let_leave(executors, now)
        left = [(request, to) for request, to in self._leaving.items() if leaves(self._source.scheduler, request)]
        return [Move(request, decoder if decoder in executors else None) for request, decoder in left]

    def _let_leave(self, executors: Collection[ExecutorView], now: float) -> None:
        """Those that came first go first."""
        for request in list(self._staying):
            first = request.sequences[0]
            movable = may_move(request) and any(one.serves(request) for one in executors if one is not self._source)
            if first.status is not SequenceStatus.DECODE or not first.prefilled or not movable:
                del self._staying[request]  # if it lost its blocks, it is noted again when they are computed
            elif (decoder := self._with_room(request, executors, now)) is not None:
                del self._staying[request]
                self._fetch(decoder, request, request.sequences[0].num_tokens - 1)
                begin_leaving(self._source.scheduler, request)
                self._leaving[request] = decoder
            else:
                break

    def _with_room(self, request: Request, executors: Collection[ExecutorView], now: float) -> ExecutorView | None:
        """Where a request goes on from now on, None: nobody has room for it."""
        placement = self._placed[request]
        after = self._roles.after(request, PrefixQuery(request), executors, now)
        decoder = placement.decoder
        if not after.has_room(decoder):  # where it was expected, what was computed first lies already
            decoder = after.best_elsewhere(self._source, 0.0).decoder
        if not after.has_room(decoder):
            return None
        placement.goes_on_at(decoder)
        return decoder

    def _fetch(self, decoder: ExecutorView | None, request: Request, num_tokens: int) -> None:
        assert decoder is not None
        decoder.scheduler.recoveries.prefetches.want(request.sequences[0], num_tokens)
        self._touch(decoder)
