"""Requests that go on at another executor once their prompt is computed: when they leave, and for where.

A move is dropping references here and a recovery there. The blocks stay behind as a cache, and the executor where a
request goes on fetches them: those of each chunk as soon as it is computed, so that little is left at the end. A
request that nobody has room for stays where it is and decodes there, until there is room.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from math import inf
from typing import NamedTuple

from pagewise_scheduler.core.requests.request import Request, RequestSequence, SequenceStatus
from pagewise_scheduler.core.routing.executor_view import CostEstimate, ExecutorView, Placement, PrefixQuery
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.scheduling.step import StepOutput

_LATELY = 0.02
_FIRST_GUESS = 128.0
_WEIGHT_OF_PAUSES = 5.0
"""What a second costs by which a prompt holds up a sequence at an executor for decoding, in seconds to a first token.

Found by replays (``benchmarks/roles/run.py``): with 1 much of the gain in the time between tokens was lost, with 20
first tokens waited while executors for decoding had time for them.
"""


class Continuation(NamedTuple):
    """Where a request goes on after its prompt, None: where that was computed; and the seconds that this costs."""

    decoder: ExecutorView | None
    seconds: float


class Roles:
    """What is known of a fleet whose executors have roles. ``output_tokens``: of a sequence, lately. ``num_ended``:
    sequences that have ended."""

    def __init__(self) -> None:
        self.output_tokens = _FIRST_GUESS
        self.num_ended = 0

    def ended(self, num_output_tokens: int) -> None:
        """A sequence has ended after so many tokens."""
        self.num_ended += 1
        self.output_tokens += _LATELY * (num_output_tokens - self.output_tokens)

    def after(
        self, request: Request, query: PrefixQuery, executors: Iterable[ExecutorView], now: float
    ) -> "AfterPrompt":
        """What may come after the prompt of a request, at those of ``executors`` that could hold and serve it."""
        size = len(request.prompt_token_ids), request.max_tokens
        able = [executor for executor in executors if executor.scheduler.fits(*size) and executor.serves(request)]
        return AfterPrompt(query, able, self.output_tokens, now, moves=may_move(request))


class AfterPrompt:
    """What may come after the prompt of ``query``. ``moves``: it may go on elsewhere than where it was computed."""

    def __init__(
        self, query: PrefixQuery, executors: Sequence[ExecutorView], output_tokens: float, now: float, *, moves: bool
    ) -> None:
        self._query = query
        decoders = [executor for executor in executors if executor.role != "prefill"] if moves else []
        self._decoders = {decoder: decoder.find(query) for decoder in decoders}
        self._output_tokens = output_tokens
        self._now = now

    def best(self, executor: ExecutorView, estimate: CostEstimate) -> Continuation:
        """The cheapest continuation of a prompt that is computed at ``executor``, with what others lose by that: who
        decodes there waits meanwhile. Executors for decoding are spared that, as long as others are not too busy."""
        if executor.role == "prefill":
            moving = self.best_elsewhere(executor, estimate.recovery)
            if moving.decoder is not None:
                return moving._replace(seconds=moving.seconds + estimate.recovery * executor.num_decoding)
        waiting = max(executor.num_decoding, executor.costs.decoding)  # or who is to come meanwhile
        if executor.role == "decode":
            waiting *= _WEIGHT_OF_PAUSES
        return Continuation(None, estimate.recovery * waiting + self._decode_seconds(executor))

    def best_elsewhere(self, executor: ExecutorView, computing: float) -> Continuation:
        """The cheapest executor to go on at. ``computing``: seconds that the prompt takes at ``executor``."""
        best = Continuation(None, inf)
        for decoder in self._decoders:
            if decoder is not executor:
                seconds = self._move_seconds(executor, decoder, computing) + self._decode_seconds(decoder)
                if seconds < best.seconds:
                    best = Continuation(decoder, seconds)
        return best

    def has_room(self, decoder: ExecutorView | None) -> bool:
        """Whether there are a row and blocks at a decoder now; None has none."""
        if decoder not in self._decoders or decoder is None:
            return False
        return not decoder.room_seconds(self._query, self._num_blocks(decoder), self._now)

    def _num_blocks(self, decoder: ExecutorView) -> int:
        """Blocks that the prompt takes beside those that are there."""
        kv = decoder.scheduler.kv
        return kv.blocks_for(self._query.num_tokens) - self._decoders[decoder].device // kv.block_size

    def _move_seconds(self, executor: ExecutorView, decoder: ExecutorView, computing: float) -> float:
        """Until the KV and the adapter are there, from when the prompt is computed; infinite if KV cannot come."""
        peer = executor.scheduler.recoveries.endpoint
        if not decoder.scheduler.recoveries.can_fetch_from(peer):
            return inf
        kv, link, num_blocks = decoder.scheduler.kv, decoder.costs.link(peer), self._num_blocks(decoder)
        # All but what the last chunk computes is fetched while later chunks are computed.
        last = min(num_blocks, kv.blocks_for(executor.scheduler.limits.max_num_batched_tokens))
        fetching = max(link.seconds(last, link.num_loading), link.seconds(num_blocks, link.num_loading) - computing)
        room = decoder.room_seconds(self._query, num_blocks, self._now)
        return fetching + room + decoder.eviction_seconds(num_blocks) + decoder.adapter_seconds(self._query)

    def _decode_seconds(self, executor: ExecutorView) -> float:
        return self._output_tokens * executor.costs.token_seconds(executor.load + executor.num_expected + 1)


def may_move(request: Request) -> bool:
    """Whether a request may go on elsewhere after its prompt, and has something left to do there.

    What is chosen among several sequences is decided where they are, log-probabilities of a prompt come from computing
    it, and outputs that share blocks stay together once they have begun.
    """
    begun = any(one.row >= 0 or one.output_token_ids for one in request.sequences[1:])
    params = request.params
    return request.max_tokens > 1 and params.beam is None and params.sampling.prompt_logprobs is None and not begun


class Move(NamedTuple):
    """A request that has left, and the executor at which it goes on; None: that one takes requests no more."""

    request: Request
    executor: ExecutorView | None


class Migrations:
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
            if sequence.request in self._placed and sequence is sequence.request.sequences[0]:
                self._computed(sequence, num_computed, executors)
        if self._num_ended != self._roles.num_ended:  # else there is no more room than before
            self._num_ended = self._roles.num_ended
            self._let_leave(executors, now)
        left = [(request, to) for request, to in self._leaving.items() if leaves(self._source.scheduler, request)]
        return [Move(request, decoder if decoder in executors else None) for request, decoder in left]

    def _computed(self, sequence: RequestSequence, num_computed: int, executors: Collection[ExecutorView]) -> None:
        """A chunk of a prompt has come back: fetch it where the request goes on, or let it leave after the last one."""
        request = sequence.request
        if sequence.status is not SequenceStatus.DRAINING:  # the executor was reset, and it has begun again
            self._leaving.pop(request, None)
        decoder = self._placed[request].decoder
        if sequence.prefilled:
            self._staying[request] = None
            self._num_ended = -1
        elif decoder in executors and sequence.status is SequenceStatus.PREFILL:
            self._fetch(decoder, request, num_computed)

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
        decoder.scheduler.features.prefetches.want(request.sequences[0], num_tokens)
        self._touch(decoder)


def begin_leaving(scheduler: Scheduler, request: Request) -> None:
    """Plan nothing more for a request. Tokens of it that are in flight still come."""
    assert request.params.beam is None, "what it goes on with is decided where all its sequences are"
    scheduler.waiting.withdraw(request)
    for sequence in request.sequences:
        for feature in request.features:
            feature.release(sequence, scheduler.newest_in_flight)
        if sequence.status in (SequenceStatus.PREFILL, SequenceStatus.DECODE):
            scheduler.vacate(sequence, ends=False)
        if not sequence.finished:
            sequence.status = SequenceStatus.DRAINING


def leaves(scheduler: Scheduler, request: Request) -> bool:
    """Take a request out after ``begin_leaving``, to be added elsewhere; False: a token of it is in flight, or it has
    begun again because the executor was reset."""
    oldest = scheduler.oldest_step
    for sequence in request.sequences:
        if not sequence.finished and sequence.status is not SequenceStatus.DRAINING:
            return False
        if not sequence.finished and oldest is not None and sequence.last_step >= oldest:
            return False
    scheduler.forget(request)
    return True
