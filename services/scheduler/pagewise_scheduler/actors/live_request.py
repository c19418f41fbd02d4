"""A request that is being served: the core's request, its text, and the stream its client reads."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from time import monotonic

from pagewise_shared.protocol import TokenLogprobs

from pagewise_scheduler.core.requests.request import Request, Sequence
from pagewise_scheduler.core.routing.executor_view import Placement
from pagewise_scheduler.generation import (
    GenerationError,
    GenerationRequest,
    GenerationStats,
    SequenceDelta,
    SlowReaderError,
)
from pagewise_scheduler.metrics import Metrics
from pagewise_scheduler.text.detokenizer import IncrementalDetokenizer
from pagewise_scheduler.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MOST_UNREAD = 32_768
"""Entries (a token, or a candidate of one) that may wait for the client before its request is stopped."""


class LiveRequest:
    """Implements ``GenerationStream``. It outlives engines: what one leaves undone goes on at the next.

    ``abandoned``: nobody reads it any more. ``engine``: the one it was placed on last, ``placement``: how. ``deaths``:
    executors in a row that died in a step of it, without a token of it in between. ``homeless_seconds``: how long
    nobody could take it, since somebody did. Deltas that the client has not read yet are merged into one list; where
    that grows too long, the request is stopped.
    """

    def __init__(
        self,
        generation: GenerationRequest,
        tokenizer: Tokenizer,
        metrics: Metrics,
        on_abort: Callable[["LiveRequest"], None],
    ) -> None:
        self.request = Request(
            request_id=generation.request_id,
            prompt_token_ids=generation.prompt_token_ids,
            max_tokens=generation.max_tokens,
            sampling=generation.sampling,
            n=generation.n,
            priority=generation.priority,
            cache_salt=generation.cache_salt,
            beam=generation.beam,
            best_of=0 if generation.beam is not None else generation.best_of,
            arrival_time=generation.arrival_time,
            key=generation.key,
        )
        self.stats = GenerationStats(prompt_tokens=len(generation.prompt_token_ids))
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.deaths = 0
        self.engine: object | None = None
        self.placement: Placement | None = None
        self.done = False
        self.abandoned = False
        self._texts = [
            IncrementalDetokenizer(
                tokenizer,
                generation.prompt_token_ids,
                skip_special_tokens=generation.skip_special_tokens,
                stop=generation.stop,
                include_stop_str_in_output=generation.include_stop_str_in_output,
                min_tokens=generation.sampling.min_tokens,
            )
            for _ in range(generation.n)
        ]
        self._include_stop = generation.include_stop_str_in_output
        self._end_of_sequence = tokenizer.eos_token_ids
        self._metrics = metrics
        self._on_abort = on_abort
        self._unfinished = generation.n
        self._deltas: list[SequenceDelta] = []
        self._most_unread = MOST_UNREAD // (1 + (generation.sampling.logprobs or 0))
        self._error: GenerationError | None = None
        self._changed = asyncio.Event()
        self._first_token_time: float | None = None
        self._last_token_times = [0.0] * generation.n
        self._tokens_at_death = 0
        self.homeless_seconds = 0.0

    @property
    def num_drawn_tokens(self) -> int:
        """Output tokens computed for it so far, also those of outputs that it will not show."""
        return max(self.stats.output_tokens, self.request.num_drawn_tokens)

    # ---- the engine's side ---------------------------------------------------------------------------

    def take_prompt_logprobs(self, entries: tuple[TokenLogprobs, ...]) -> None:
        """Prompt log-probabilities of one chunk; those of a chunk computed again are dropped."""
        known = self.prompt_logprobs[-1].index if self.prompt_logprobs else 0
        self.prompt_logprobs += [entry for entry in entries if entry.index > known]

    def take_token(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None, now: float) -> str | None:
        """A new token; returns the stop string that it completed, if any.

        ``now``: seconds of the monotonic clock. The caller finishes the sequence when a stop string came back.
        """
        self.stats.output_tokens += 1
        if (placement := self.placement) is not None and placement.waits:
            placement.answered(now)
            self._metrics.placement_answered(placement.predicted, now - placement.time)
        index = sequence.index
        if self._first_token_time is None:
            self.stats.cached_tokens = self.request.num_cached_tokens
            self._first_token_time = now
            self._metrics.time_to_first_token_seconds.observe(now - self.request.arrival_time)
        elif (last := self._last_token_times[index]) > 0 and not self.request.chooses:
            self._metrics.inter_token_latency_seconds.observe(now - last)
        self._last_token_times[index] = now
        text = self._texts[index]
        # Of an output that was chosen at the end, every token comes when it has finished: the last one is hidden.
        hidden = sequence.finish_reason == "stop" and token == sequence.stop_reason and not self._include_stop
        fresh = "" if hidden else text.push([token])
        self._deltas.append(SequenceDelta(index, fresh, [token], [logprobs] if logprobs else []))
        self._changed.set()
        if len(self._deltas) > self._most_unread and not self.request.chooses and not self.abandoned:
            self._cut_off()
        return text.stopped_by

    def take_finish(self, sequence: Sequence, now: float) -> None:
        """The sequence has ended: flush its text and tell why."""
        index, text = sequence.index, self._texts[sequence.index]
        rest = text.finish()
        if text.stopped_by is not None and sequence.finish_reason == "length":  # its last token completed both
            sequence.finish_reason, sequence.stop_reason = "stop", text.stopped_by
        delta = self._deltas[-1] if self._deltas and self._deltas[-1].index == index else None
        if delta is None:
            delta = SequenceDelta(index, "", [])
            self._deltas.append(delta)
        delta.text += rest
        delta.finish_reason = sequence.finish_reason
        if sequence.stop_reason not in self._end_of_sequence:
            delta.stop_reason = sequence.stop_reason
        self._changed.set()
        self._metrics.request_success(sequence.finish_reason or "abort").inc()
        self._unfinished -= 1
        if self._unfinished == 0:
            self._end(now)

    def blame(self) -> None:
        """An executor died in a step of this request; tokens since the last time speak for its innocence."""
        tokens = sum(len(sequence.output_token_ids) for sequence in self.request.sequences)
        self.deaths = self.deaths + 1 if tokens <= self._tokens_at_death else 1
        self._tokens_at_death = tokens

    def take_error(self, error: str | GenerationError, now: float) -> None:
        """The whole request failed."""
        if not self.done:
            self._error = error if isinstance(error, GenerationError) else GenerationError(error)
            self._metrics.request_success("error").inc(self._unfinished)
            self._end(now)

    # ---- the client's side ---------------------------------------------------------------------------

    async def __aiter__(self) -> AsyncIterator[list[SequenceDelta]]:
        """Yield what has come in since the last time, until all sequences have finished."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            deltas, self._deltas = self._deltas, []
            if deltas:
                yield deltas
            if self._error is not None:
                raise self._error
            if self.done and not self._deltas:
                return

    def abort(self) -> None:
        """Stop all sequences; harmless once the request has ended."""
        if not self.done:
            self.abandoned = True
            self._on_abort(self)

    # ---- inside --------------------------------------------------------------------------------------

    def _cut_off(self) -> None:
        log.info("request %s: its client left too much unread, stopping it", self.request.request_id)
        self._metrics.slow_readers.inc()
        self._error = SlowReaderError("the answer was not read fast enough")
        self.abort()
        self._deltas.clear()

    def _end(self, now: float) -> None:
        self.done = True
        if self.placement is not None:
            self.placement.end(now)
        self._changed.set()
        request, metrics = self.request, self._metrics
        metrics.e2e_request_latency_seconds.observe(now - request.arrival_time)
        if request.scheduled_time == request.scheduled_time:  # not NaN: it ran
            metrics.request_queue_time_seconds.observe(request.scheduled_time - request.arrival_time)
            if self._first_token_time is not None:
                metrics.request_prefill_time_seconds.observe(self._first_token_time - request.scheduled_time)
                metrics.request_decode_time_seconds.observe(now - self._first_token_time)


def clock() -> float:
    """Now, in seconds: the clock of every time in the scheduler."""
    return monotonic()
