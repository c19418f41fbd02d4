"""Requests that go on at another executor once their prompt is computed: when they leave, and for where.

A move is dropping references here and a recovery there. The blocks stay behind as a cache, and the executor where a
request goes on fetches them: those of each chunk as soon as it is computed, so that little is left at the end. A
request that nobody has room for stays where it is and decodes there, until there is room.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pagewise_scheduler.core.requests.request import Request, SequenceStatus
from pagewise_scheduler.core.routing.executor_view import ExecutorView, Placement
from pagewise_scheduler.core.routing.prefix_query import PrefixQuery
from pagewise_scheduler.core.routing.roles import Roles, may_move
from pagewise_scheduler.core.scheduling.step import StepOutput


class Move(NamedTuple):
    """A request that has left where it was placed, and the executor at which it goes on."""

    request: Request
    executor: ExecutorView


class Moves:
    """The requests of a fleet that are to go on elsewhere.

    ``touch``: called with executors that have something new to plan.
    """

    def __init__(self, roles: Roles, touch: Callable[[ExecutorView], None]) -> None:
        self._roles = roles
        self._touch = touch
        self._placed: dict[Request, Placement] = {}
        self._staying: dict[Request, None] = {}
        self._leaving: dict[Request, ExecutorView] = {}

    @property
    def num_staying(self) -> int:
        """Requests that decode where their prompt was computed, because nobody else has room."""
        return len(self._staying)

    def placed(self, placement: Placement) -> None:
        """A request was placed, perhaps anew."""
        self.ended(placement.request)
        if placement.decoder is not None:
            self._placed[placement.request] = placement

    def ended(self, request: Request) -> None:
        """A request has ended, or was placed anew; harmless for any."""
        if self._placed.pop(request, None) is not None:
            self._staying.pop(request, None)
            self._leaving.pop(request, None)

    def stepped(self, output: StepOutput, executors: Sequence[ExecutorView], now: float) -> list[Move]:
        """A step of one of ``executors`` has come back. Returns the requests that have left where they were: they are
        to be added elsewhere at once."""
        if not self._placed:
            return []
        may_be_room = bool(output.finished)
        for sequence, num_computed in output.computed:
            request = sequence.request
            if (placement := self._placed.get(request)) is None or sequence is not request.sequences[0]:
                continue
            self._leaving.pop(request, None)  # else its executor has been reset, and it has begun again
            if sequence.prefilled:
                self._staying[request] = None
                may_be_room = True
            elif placement.decoder in executors and sequence.status is SequenceStatus.PREFILL:
                self._fetch(placement.decoder, request, num_computed)
        for request in list(self._staying) if may_be_room else ():  # those that came first go first
            if request.sequences[0].status is not SequenceStatus.DECODE or not may_move(request):
                del self._staying[request]
            elif not self._leave(request, executors, now):
                break
        left = [one for source in self._sources() for one in source.scheduler.departures.take()]
        return [Move(request, self._leaving[request]) for request in left]

    def _sources(self) -> list[ExecutorView]:
        return list(dict.fromkeys(self._placed[request].executor for request in self._leaving))

    def _leave(self, request: Request, executors: Sequence[ExecutorView], now: float) -> bool:
        """Let a request leave for whoever has room for it; False: nobody has."""
        placement = self._placed[request]
        source, decoder = placement.executor, placement.decoder
        after = self._roles.after(request, PrefixQuery(request), executors, now)
        if not after.has_room(decoder):  # where it was expected, what was computed first lies already
            decoder = after.best_elsewhere(source, 0.0).decoder
        if not after.has_room(decoder):
            return False
        del self._staying[request]
        assert decoder is not None
        placement.goes_on_at(decoder)
        self._fetch(decoder, request, request.sequences[0].num_tokens - 1)
        source.scheduler.departures.begin(request)
        self._leaving[request] = decoder
        return True

    def _fetch(self, decoder: ExecutorView | None, request: Request, num_tokens: int) -> None:
        assert decoder is not None
        decoder.scheduler.recoveries.prefetches.want(request.sequences[0], num_tokens)
        self._touch(decoder)
