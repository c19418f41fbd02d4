"""Requests that leave a scheduler for another executor, while whatever else runs there goes on.

A move is dropping references here and a recovery there: the tokens go along, and the blocks stay behind as a cache from
which the other executor fetches them.
"""

from collections.abc import Callable
from collections.abc import Sequence as ReadOnlyList
from typing import Protocol

from pagewise_scheduler.core.requests.request import Request, Sequence, SequenceStatus
from pagewise_scheduler.core.scheduling.step import StepInFlight
from pagewise_scheduler.core.scheduling.waiting_queue import WaitingQueue


class Vacate(Protocol):
    """How a sequence loses its row and its blocks."""

    def __call__(self, sequence: Sequence, *, ends: bool = ...) -> None:
        """``ends``: whether this use of its blocks ends with that."""


class Departures:
    """The requests of one scheduler that are on their way out, until no token of theirs is in flight any more.

    ``in_flight``: the steps in flight, the oldest first. ``gone``: called with requests that are
    not here any more.
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        in_flight: ReadOnlyList[StepInFlight],
        vacate: Vacate,
        gone: Callable[[Request], None],
    ) -> None:
        self._waiting = waiting
        self._in_flight = in_flight
        self._vacate = vacate
        self._gone = gone
        self._leaving: dict[Request, None] = {}

    def begin(self, request: Request) -> None:
        """Plan nothing more for a request. Tokens of it that are in flight still come; then ``take`` gives it."""
        assert not request.chooses, "what it goes on with is decided where all its sequences are"
        self._waiting.withdraw(request)
        for sequence in request.sequences:
            if sequence.status in (SequenceStatus.PREFILL, SequenceStatus.DECODE):
                self._vacate(sequence, ends=False)
            if not sequence.finished:
                sequence.status = SequenceStatus.DRAINING
        self._leaving[request] = None

    def take(self) -> list[Request]:
        """Requests that are not here any more, each given once: they may be added elsewhere."""
        oldest = self._in_flight[0].step if self._in_flight else None
        left = [
            request
            for request in self._leaving
            if all(one.finished or oldest is None or one.last_step < oldest for one in request.sequences)
        ]
        for request in left:
            self._gone(request)
        return left

    def forget(self, request: Request) -> None:
        """A request has ended, or is not here any more; harmless for any."""
        self._leaving.pop(request, None)

    def clear(self) -> None:
        """All requests are taken out."""
        self._leaving.clear()
