"""Prefill and decode apart: where a request goes on once its prompt is computed, and what that costs.

An executor that computes prompts lets those wait whose tokens it decodes beside them: a chunk of a long prompt takes as
long as dozens of decode steps. So a request may be computed at one executor and go on at another, which fetches its
blocks. All costs are in seconds, those of the request itself and those that others lose, so that they add up with those
of the first token.
"""

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.routing.executor_view import CostEstimate, ExecutorView
from pagewise_scheduler.core.routing.prefix_query import PrefixQuery

_LATELY = 0.02
_FIRST_GUESS = 128.0


class Continuation(NamedTuple):
    """Where a request goes on after its prompt, None: where that was computed; and the seconds that this costs."""

    decoder: ExecutorView | None
    seconds: float


class Roles:
    """What is known of a fleet whose executors have roles. ``output_tokens``: of a sequence, lately."""

    def __init__(self) -> None:
        self.output_tokens = _FIRST_GUESS

    def ended(self, num_output_tokens: int) -> None:
        """A sequence has ended after so many tokens."""
        self.output_tokens += _LATELY * (num_output_tokens - self.output_tokens)

    def after(self, request: Request, query: PrefixQuery, executors: Iterable[ExecutorView], now: float) -> "AfterPrompt":
        """What may come after the prompt of a request."""
        return AfterPrompt(query, executors, self.output_tokens, now, may_move=_may_move(request))


class AfterPrompt:
    """What may come after the prompt of ``query``. ``may_move``: it may go on elsewhere than where it was computed."""

    def __init__(
        self, query: PrefixQuery, executors: Iterable[ExecutorView], output_tokens: float, now: float, *, may_move: bool
    ) -> None:
        self._query = query
        decoders = [executor for executor in executors if executor.role != "prefill"] if may_move else []
        self._decoders = {decoder: decoder.find(query) for decoder in decoders}
        self._others_prefill = any(executor.role != "decode" for executor in executors)
        self._output_tokens = output_tokens
        self._now = now

    def best(self, executor: ExecutorView, estimate: CostEstimate) -> Continuation:
        """The cheapest continuation of a prompt that is computed at ``executor``; infinite where it must not be."""
        import os
        if (executor.role == "prefill" or (executor.role == "both" and os.environ.get("X")=="2")) and self._decoders:
            best = self.best_elsewhere(executor, estimate.recovery)
            if best.decoder is not None and executor.role=="prefill":
                return best
            if best.decoder is not None:
                waiting = max(executor.num_decoding, executor.costs.decoding)
                stay= estimate.recovery * waiting + self._decode_seconds(executor)
                move= estimate.recovery * executor.num_decoding + best.seconds
                if move<stay: return Continuation(best.decoder, move)
        if executor.role == "decode" and self._others_prefill:
            # What takes it more than a step would hold up those that come from elsewhere meanwhile.
            if self._query.num_tokens - estimate.start > executor.share * executor.scheduler.limits.max_num_batched_tokens:
                return Continuation(None, inf)
        # Those that decode there wait while it is computed.
        waiting = max(executor.num_decoding, executor.costs.decoding)
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

    def has_room(self, decoder: ExecutorView) -> bool:
        """Whether there are a row and blocks now."""
        return decoder in self._decoders and not decoder.room_seconds(self._query, self._num_blocks(decoder), self._now)

    def _num_blocks(self, decoder: ExecutorView) -> int:
        """Blocks that the prompt takes beside those that are there."""
        kv = decoder.scheduler.kv
        return kv.blocks_for(self._query.num_tokens) - self._decoders[decoder].device // kv.block_size

    def _move_seconds(self, executor: ExecutorView, decoder: ExecutorView, computing: float) -> float:
        """Until the KV is there, from when the prompt is computed; infinite if it cannot come."""
        peer = executor.scheduler.recoveries.endpoint
        if not decoder.scheduler.recoveries.can_fetch_from(peer):
            return inf
        kv, link, num_blocks = decoder.scheduler.kv, decoder.costs.link(peer), self._num_blocks(decoder)
        # All but what the last chunk computes is fetched while later chunks are computed.
        last = min(num_blocks, kv.blocks_for(executor.scheduler.limits.max_num_batched_tokens))
        fetching = max(link.seconds(last, link.num_loading), link.seconds(num_blocks, link.num_loading) - computing)
        room = decoder.room_seconds(self._query, num_blocks, self._now)
        return fetching + room + decoder.eviction_seconds(num_blocks)

    def _decode_seconds(self, executor: ExecutorView) -> float:
        return self._output_tokens * executor.costs.token_seconds(executor.load + executor.num_expected + 1)


def _may_move(request: Request) -> bool:
    """Whether a request may go on elsewhere after its prompt, and has something left to do there.

    What a beam search goes on with is decided where its hypotheses are, and log-probabilities of a prompt come from
    computing it.
    """
    unfinished = sum(not sequence.finished for sequence in request.sequences)
    computed = request.beam is not None or request.sampling.prompt_logprobs is not None
    return request.max_tokens > 1 and not computed and unfinished <= 1
