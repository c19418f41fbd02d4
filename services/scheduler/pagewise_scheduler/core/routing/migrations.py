"""Migrations of requests from the executor that computed their prompt to another one that decodes.

A migration drops references at the source and is a recovery at the decoder. The blocks stay cached at the source, and
the decoder fetches them: the blocks of each chunk as soon as it is computed, so that few are left at the end. If no
decoder has room for a request, it stays and decodes at the source until one has.
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
"""The weight of a second by which a prompt delays a decoding sequence at a decoder, in seconds to a first token.

Chosen by replays (``benchmarks/roles/run.py``): with 1 much of the gain in the time between tokens was lost, with 20
first tokens waited while decoders had time for them.
"""


class Continuation(NamedTuple):
    """The executor at which a request decodes (None: where its prompt was computed), and the seconds that it costs."""

    decoder: ExecutorView | None
    seconds: float


class Roles:
    """Statistics of executors with roles. ``output_tokens``: of a sequence, a moving average. ``num_ended``: sequences
    that have ended."""

    def __init__(self) -> None:
        self.output_tokens = _FIRST_GUESS
        self.num_ended = 0

    def ended(self, num_output_tokens: int) -> None:
        """A sequence has ended after ``num_output_tokens`` tokens."""
        self.num_ended += 1
        self.output_tokens += _LATELY * (num_output_tokens - self.output_tokens)

    def after(
        self, request: Request, query: PrefixQuery, executors: Iterable[ExecutorView], now: float
    ) -> "AfterPrompt":
        """Compare the ``executors`` that could hold and serve a request for decoding it after its prompt."""
        size = len(request.prompt_token_ids), request.max_tokens
        able = [executor for executor in executors if executor.scheduler.fits(*size) and executor.serves(request)]
        return AfterPrompt(query, able, self.output_tokens, now, moves=may_move(request))


class AfterPrompt:
    """The possible continuations after the prompt of ``query``. ``moves``: whether the request may migrate."""

    def __init__(
        self, query: PrefixQuery, executors: Sequence[ExecutorView], output_tokens: float, now: float, *, moves: bool
    ) -> None:
        self._query = query
        decoders = [executor for executor in executors if executor.role != "prefill"] if moves else []
        self._decoders = {decoder: decoder.find(query) for decoder in decoders}
        self._output_tokens = output_tokens
        self._now = now

    def best(self, executor: ExecutorView, estimate: CostEstimate) -> Continuation:
        """The cheapest continuation of a prompt that is computed at ``executor``. The cost includes the delay of the
        sequences that decode there meanwhile, which weighs more at decoders."""
        if executor.role == "prefill":
            moving = self.best_elsewhere(executor, estimate.recovery)
            if moving.decoder is not None:
                return moving._replace(seconds=moving.seconds + estimate.recovery * executor.num_decoding)
        waiting = max(executor.num_decoding, executor.costs.decoding)  # on average, if few decode at this moment
        if executor.role == "decode":
            waiting *= _WEIGHT_OF_PAUSES
        return Continuation(None, estimate.recovery * waiting + self._decode_seconds(executor))

    def best_elsewhere(self, executor: ExecutorView, computing: float) -> Continuation:
        """The cheapest migration away from ``executor``, where the prompt takes ``computing`` seconds."""
        best = Continuation(None, inf)
        for decoder in self._decoders:
            if decoder is not executor:
                seconds = self._move_seconds(executor, decoder, computing) + self._decode_seconds(decoder)
                if seconds < best.seconds:
                    best = Continuation(decoder, seconds)
        return best

    def has_room(self, decoder: ExecutorView | None) -> bool:
        """Whether a decoder has a row and enough blocks now."""
        if decoder not in self._decoders or decoder is None:
            return False
        return not decoder.room_seconds(self._query, self._num_blocks(decoder), self._now)

    def _num_blocks(self, decoder: ExecutorView) -> int:
        """The number of blocks that the prompt takes beside its cached blocks on the device."""
        kv = decoder.scheduler.kv
        return kv.blocks_for(self._query.num_tokens) - self._decoders[decoder].device // kv.block_size

    def _move_seconds(self, executor: ExecutorView, decoder: ExecutorView, computing: float) -> float:
        """Seconds from the end of the prompt until its KV and its adapter are at ``decoder``; infinite if it cannot
        fetch from ``executor``."""
        peer = executor.scheduler.recoveries.endpoint
        if not decoder.scheduler.recoveries.can_fetch_from(peer):
            return inf
        kv, link, num_blocks = decoder.scheduler.kv, decoder.costs.link(peer), self._num_blocks(decoder)
        # All blocks but the ones of the last chunk are fetched while later chunks are computed.
        last = min(num_blocks, kv.blocks_for(executor.scheduler.limits.max_num_batched_tokens))
        fetching = max(link.seconds(last, link.num_loading), link.seconds(num_blocks, link.num_loading) - computing)
        room = decoder.room_seconds(self._query, num_blocks, self._now)
        return fetching + room + decoder.eviction_seconds(num_blocks) + decoder.adapter_seconds(self._query)

    def _decode_seconds(self, executor: ExecutorView) -> float:
        return self._output_tokens * executor.costs.token_seconds(executor.load + executor.num_expected + 1)


def may_move(request: Request) -> bool:
    """Whether a request may migrate after its prompt, and has tokens left to decode.

    The hypotheses of a beam search stay together, and so do outputs that share blocks, once a second one has begun.
    Log-probabilities of a prompt need a prompt that is computed, not fetched.
    """
    begun = any(one.row >= 0 or one.output_token_ids for one in request.sequences[1:])
    params = request.params
    return request.max_tokens > 1 and params.beam is None and params.sampling.prompt_logprobs is None and not begun


class Migration(NamedTuple):
    """A request that has left its executor, and the executor to which it migrates; None: that one takes requests no
    more."""

    request: Request
    executor: ExecutorView | None


class Migrations:
    """The requests of one executor, ``source``, that are to migrate.

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
        after = self._roles.after(request, PrefixQuery(request), executors, now)
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
