"""Requests that leave a scheduler for another executor, while whatever else runs there goes on.

A move is dropping references here and a recovery there: the tokens go along, and the blocks stay behind as a cache from
which the other executor fetches them.
"""

from collections import deque
from collections.abc import Callable

from pagewise_scheduler.core.memory.kv_cache_manager import KVCacheManager
from pagewise_scheduler.core.requests.request import Request, Sequence, SequenceStatus
from pagewise_scheduler.core.scheduling.prefill_set import PrefillSet
from pagewise_scheduler.core.scheduling.step import StepInFlight
from pagewise_scheduler.core.scheduling.waiting_queue import WaitingQueue


class Departures:
    """The requests of one scheduler that are on their way out, until no token of theirs is in flight any more.

    ``in_flight``: the steps in flight, the oldest first. ``vacate``: takes a sequence off its row and drops its blocks.
    ``forget``: the request is not here any more.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        waiting: WaitingQueue,
        prefilling: PrefillSet,
        in_flight: deque[StepInFlight],
        vacate: Callable[[Sequence], None],
        forget: Callable[[Request], None],
    ) -> None:
        self._kv = kv
        self._waiting = waiting
        self._prefilling = prefilling
        self._in_flight = in_flight
        self._vacate = vacate
        self._forget = forget
        self._leaving: dict[Request, None] = {}

    def begin(self, request: Request) -> None:
        """Plan nothing more for a request. Tokens of it that are in flight still come; then ``take`` gives it."""
        assert request.beam is None, "what a beam search goes on with is decided where its hypotheses are"
        request.hands_over = False
        self._waiting.withdraw(request)
        for sequence in request.sequences:
            if sequence.status not in (SequenceStatus.WAITING, SequenceStatus.FINISHED):
                self._vacate(sequence)
            if not sequence.finished:
                sequence.status = SequenceStatus.DRAINING
        self._leaving[request] = None

    def take(self) -> list[Request]:
        """Requests that are not here any more, each given once: they may be added elsewhere."""
        left = []
        for request in list(self._leaving):
            if all(one.finished or not self._is_in_flight(one) for one in request.sequences):
                del self._leaving[request]
                if not request.finished:
                    self._forget(request)
                    left.append(request)
        return left

    def stay(self, request: Request) -> None:
        """A request that has stopped after its prefill, with all its blocks, goes on here after all."""
        request.hands_over = False
        for sequence in request.sequences:
            if sequence.status is SequenceStatus.DRAINING and not self._is_in_flight(sequence):
                if not self._prefilling.rejoin(sequence):
                    self._kv.free(sequence.table, None)
                    self._waiting.push(sequence)

    def _is_in_flight(self, sequence: Sequence) -> bool:
        return bool(self._in_flight) and sequence.last_step >= self._in_flight[0].step

    def clear(self) -> None:
        """All requests leave."""
        self._leaving.clear()
