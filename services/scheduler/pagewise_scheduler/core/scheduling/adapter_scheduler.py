"""The scheduler of an executor that serves LoRA adapters: requests wait for theirs before they wait to run."""

from typing import Any

from pagewise_shared.protocol import AdapterLoaded, LoadAdapter

from pagewise_scheduler.core.requests.request import FinishReason, Request, Sequence, SequenceStatus
from pagewise_scheduler.core.scheduling.adapter_slots import MAX_RANK, AdapterSlots
from pagewise_scheduler.core.scheduling.scheduler import Scheduler


class AdapterScheduler(Scheduler):
    """A scheduler that takes requests on when their adapters are in slots. What has none goes past all of this.

    ``max_loras``: slots of the executor, 0: it serves no adapters. ``max_lora_rank``: the greatest that adapters may
    have. ``adapters``: what is in the slots, and who waits. ``max_grammars``: those that the executor keeps compiled
    (see ``Hello``). ``grammars``: which these are.
    """

    def __init__(
        self, *, max_loras: int = 0, max_lora_rank: int = MAX_RANK, max_grammars: int = 0, **options: Any
    ) -> None:
        super().__init__(**options)
        self.grammars = self._prefilling.grammars
        self.grammars.num_kept = max_grammars
        self.adapters = AdapterSlots(max_loras, self.waiting, max_lora_rank)
        # Of the slots and not of this object: a cycle would keep its memory until a garbage collection.
        self.segments.computing, self.segments.computed = self.adapters.pin, self.adapters.unpin

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for admission or for their adapters, preempted ones included."""
        return super().num_waiting + self.adapters.parked().sequences

    @property
    def requests(self) -> list[Request]:
        """See ``Scheduler``; those that wait for adapters come last."""
        return [*super().requests, *self.adapters.waiting]

    def add(self, request: Request) -> None:
        """See ``Scheduler``. A request whose adapter is not there waits for it.

        Raises:
            ValueError: it could never fit, its id is taken, or the executor does not serve adapters like its own.
        """
        if request.adapter is None:
            super().add(request)
            return
        if not self.adapters.serves(request.adapter):
            raise ValueError(
                f"{request.request_id} needs an adapter of rank {request.adapter.rank}, and the executor serves none"
            )
        if not self.fits(len(request.prompt_token_ids), request.max_tokens, request.segments):
            raise ValueError(f"{request.request_id} needs more than the {self.kv.capacity_tokens} tokens of the pool")
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id} is here already")
        if self.adapters.admit(request):  # from here on it has a slot until it ends, so nothing may fail
            super().add(request)
            return
        request.create_sequences()
        request.timeline.begin("adapter", request.executors[-1][0] if request.executors else request.arrival_time)
        for sequence in request.sequences:
            if not sequence.finished:  # it may have run elsewhere, or before a reset
                sequence.status, sequence.prefilled, sequence.last_step = SequenceStatus.WAITING, False, 0

    def adapter_loads(self, now: float) -> list[LoadAdapter]:
        """Take requests on that waited for adapters which are there now (seconds); returns which others to load."""
        if not self.adapters.waiting and not self.adapters.has_loads:
            return []
        oldest = self.steps_in_flight[0].step if self.steps_in_flight else None
        admitted, taken_back = self.adapters.advance(now, oldest)
        for request in taken_back:  # none of them has begun
            self.waiting.withdraw(request)
            super().forget(request)
        for request in admitted:
            request.timeline.end(now)
            super().add(request)
        return self.adapters.take_loads(self.epoch, now)

    def adapter_loaded(self, message: AdapterLoaded, now: float) -> list[Request]:
        """The executor has loaded an adapter, or could not: the requests that waited for it then fail."""
        return _fail(self.adapters.loaded(message, now))

    def give_up_loads(self, now: float, most: float) -> list[Request]:
        """Give up loads that have not returned within ``most`` seconds: the requests that waited for them fail."""
        return _fail(self.adapters.give_up_loads(now, most))

    def abort(self, request_id: str) -> list[Sequence]:
        """See ``Scheduler``."""
        request = next((one for one in self.adapters.waiting if one.request_id == request_id), None)
        if request is None:
            return super().abort(request_id)
        ended = [sequence for sequence in request.sequences if not sequence.finished]
        request.num_pending = 0
        for sequence in ended:
            sequence.end("abort")
        self.forget(request)
        if request.beam is not None:
            request.replace_sequences(ended := [request.aborted(index) for index in range(request.n)])
        return ended

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """See ``Scheduler``."""
        request = sequence.request
        if request.adapter is None or request not in self.adapters.waiting:
            super().finish(sequence, reason, stop_reason)
        elif not sequence.finished:
            sequence.end(reason, stop_reason)
            if request.finished:
                self.forget(request)

    def forget(self, request: Request) -> None:
        """See ``Scheduler``."""
        super().forget(request)
        if request.adapter is not None:
            self.adapters.drop(request, self.last_step)

    def release_all(self) -> list[Request]:
        """See ``Scheduler``. The slots hold nothing any more."""
        requests = super().release_all()
        self.adapters.clear()
        return requests


def _fail(requests: list[Request]) -> list[Request]:
    for request in requests:
        request.fail()
    return requests
