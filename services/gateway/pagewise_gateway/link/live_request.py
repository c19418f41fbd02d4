"""A request that is being served: what has come of each of its outputs, and the news that its client reads."""

import asyncio
import logging
from array import array
from collections.abc import Callable
from time import monotonic

from pagewise_shared.protocol import FinishReason, Started, StreamProgress, TokenLogprobs

from pagewise_gateway.generation import (
    AdmissionError,
    GenerationRequest,
    Prompt,
    SequenceDelta,
    SlowReaderError,
)
from pagewise_gateway.metrics import Metrics
from pagewise_gateway.text.detokenizer import IncrementalDetokenizer
from pagewise_gateway.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MOST_UNREAD = 32_768
"""Entries (a token, or a candidate of one) per prompt that may wait for the client before its request is stopped."""


class Output:
    """One output of a prompt. It outlives schedulers: another one goes on behind the ``tokens`` that are here.

    Fields:
        tokens: output tokens so far (int32). finished: it takes no more.
        hidden: the stop token that ended it, if that does not belong to its text, else -1. It is set before the token
            itself arrives, because a token does not tell whether it is the last one.
    """

    __slots__ = (
        "_delta_finish",
        "_end_of_sequence",
        "_hides_stop",
        "_last_time",
        "_live",
        "_logprobs",
        "_parts",
        "_pending",
        "_push",
        "_stops",
        "_text",
        "_told",
        "finished",
        "hidden",
        "index",
        "prompt",
        "tokens",
    )

    def __init__(self, prompt: "LivePrompt", index: int, tokenizer: Tokenizer) -> None:
        request = prompt.live.request
        self.index = index
        self.prompt = prompt
        self.tokens = array("i")
        self.finished = False
        self.hidden = -1
        self._live = prompt.live
        self._text = IncrementalDetokenizer(
            tokenizer,
            prompt.given.tokens,
            skip_special_tokens=request.skip_special_tokens,
            stop=request.stop,
            include_stop_str_in_output=request.include_stop_str_in_output,
            min_tokens=request.sampling.min_tokens,
        )
        self._push = self._text.push_one
        self._stops = bool(request.stop)
        self._hides_stop = not request.include_stop_str_in_output
        self._end_of_sequence = tokenizer.eos_token_ids
        self._last_time = 0.0
        # News that the client has not been told: text, log-probabilities, tokens from ``_told`` on, and how it ended.
        self._pending = False
        self._parts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._told = 0
        self._delta_finish: tuple[FinishReason, str | int | None] | None = None

    def take(self, token: int, now: float, gaps: dict[float, int]) -> bool:
        """Append a token; returns whether it completed a stop string.

        ``now``: seconds of the monotonic clock. ``gaps`` counts for each earlier time how many tokens came last then.
        """
        if last := self._last_time:
            self._last_time = now
            gaps[last] = gaps.get(last, 0) + 1
        else:
            self._first(now)
        self.tokens.append(token)
        if token != self.hidden and (fresh := self._push(token)):
            self._parts.append(fresh)
        if self._pending:
            self._live.count_unread()
        else:
            self._pending = True
            self._live.changed(self)
        return self._stops and self._text.stopped_by is not None

    def take_logprobs(self, entry: TokenLogprobs) -> None:
        """Add the log-probabilities of the token that came last."""
        self._logprobs.append(entry)

    def expect_stop(self, token: int) -> None:
        """Say that this token, if it is one, ends the output."""
        if self._hides_stop:
            self.hidden = token

    def finish(self, reason: FinishReason, stop_token: int, now: float) -> None:
        """The output takes no more tokens; ``stop_token``: the one that ended it, else -1."""
        rest = self._text.finish()
        if rest:
            self._parts.append(rest)
        stop_reason: str | int | None = None
        stopped_by = self._text.stopped_by
        if stop_token >= 0 and stop_token not in self._end_of_sequence:
            stop_reason = stop_token
        if stopped_by is not None and (reason == "length" or stop_token < 0):  # its last token may complete both
            reason, stop_reason = "stop", stopped_by
        self.finished = True
        self._delta_finish = (reason, stop_reason)
        if not self._pending:
            self._pending = True
            self._live.changed(self)
        self._live.output_finished(self, reason, now)

    def news(self) -> SequenceDelta:
        """What is new since the last call."""
        self._pending = False
        parts, self._parts = self._parts, []
        delta = SequenceDelta(self.index, "".join(parts))
        if self._logprobs:
            delta.logprobs, self._logprobs = self._logprobs, []
        if self._live.request.wants_token_ids:
            delta.token_ids = self.tokens[self._told :].tolist()
            self._told = len(self.tokens)
        if self._delta_finish is not None:
            delta.finish_reason, delta.stop_reason = self._delta_finish
        if not self.prompt.given.max_tokens:  # one may have been computed all the same
            delta.text, delta.token_ids, delta.logprobs = "", [], []
        return delta

    def progress(self) -> StreamProgress:
        """What another scheduler has to know to go on. What is chosen at the end starts over: nobody has seen it."""
        if not self.prompt.given.max_tokens:
            return StreamProgress(finished=self.finished)
        return StreamProgress(self.tokens.tobytes(), self.finished)

    def _first(self, now: float) -> None:
        self.prompt.first_token(now)
        if not self._live.request.chooses:  # those come all at once
            self._last_time = now


class LivePrompt:
    """One prompt of a live request. ``given``: its tokens, as the client sent them.

    ``logprobs``: of its tokens, complete before the first delta of its outputs. ``cached_tokens``: how many of its
    tokens were found in a cache. ``index``: of its first output. ``unfinished``: how many of its n have not ended.
    """

    __slots__ = (
        "_first_token_time",
        "_metrics",
        "_started",
        "cached_tokens",
        "given",
        "index",
        "live",
        "logprobs",
        "unfinished",
    )

    def __init__(self, live: "LiveRequest", prompt: Prompt, index: int, metrics: Metrics) -> None:
        self.live = live
        self.given = prompt
        self.index = index
        self.logprobs: list[TokenLogprobs] = []
        self.cached_tokens = 0
        self.unfinished = live.request.n
        self._metrics = metrics
        self._started = False
        self._first_token_time: float | None = None

    def start(self, started: Started) -> None:
        """Its first token has been computed. When another scheduler has computed it again, that is no news."""
        if self._started:
            return
        self._started = True
        self.cached_tokens = started.cached_tokens
        waited = self.live.submission_time - self.live.request.arrival_time
        self._metrics.prompt_tokens.inc(len(self.given.tokens))
        self._metrics.request_queue_time_seconds.observe(waited + started.queue_us / 1e6)
        self._metrics.request_prefill_time_seconds.observe(started.prefill_us / 1e6)

    def first_token(self, now: float) -> None:
        """An output has got its first token."""
        if self._first_token_time is None:
            self._first_token_time = now
            self._metrics.time_to_first_token_seconds.observe(now - self.live.request.arrival_time)

    def take_logprobs(self, entries: tuple[TokenLogprobs, ...]) -> None:
        """Log-probabilities of one chunk; those of a chunk computed again are dropped."""
        known = self.logprobs[-1].index if self.logprobs else 0
        self.logprobs += [entry for entry in entries if entry.index > known]

    def end(self, now: float) -> None:
        """All of it has ended."""
        self._metrics.e2e_request_latency_seconds.observe(now - self.live.request.arrival_time)
        if self._first_token_time is not None:
            self._metrics.request_decode_time_seconds.observe(now - self._first_token_time)


class LiveRequest:
    """One request of a client, from its submission until its outputs have ended. It outlives schedulers.

    Fields:
        prompts, outputs: all of them; output j of prompt i has the index i * n + j.
        stream: its first stream number under the current epoch; None: it waits to be submitted.
        submissions: how often it was submitted. submission_time, waiting_since: seconds of the monotonic clock.
        refusal: why the last scheduler that it was submitted to again did not take it.
        ended: nothing comes any more. ``on_end`` is told once.

    ``on_news`` is told when there is news, the first since the client was told any. Whoever tells this request what has
    come calls ``tell`` then, once it has told everything.
    """

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        metrics: Metrics,
        on_news: Callable[["LiveRequest"], None],
        on_end: Callable[["LiveRequest"], None],
    ) -> None:
        self.request = request
        self.stream: int | None = None
        self.submissions = 0
        self.submission_time = self.waiting_since = monotonic()
        self.refusal: AdmissionError | None = None
        self.ended = False
        self.prompts: list[LivePrompt] = []
        self.outputs: list[Output] = []
        for prompt in request.prompts:
            first = len(self.outputs)
            self.prompts.append(live_prompt := LivePrompt(self, prompt, first, metrics))
            self.outputs += [Output(live_prompt, first + number, tokenizer) for number in range(request.n)]
        self._unfinished_prompts = len(self.prompts)
        self._metrics = metrics
        self._on_news, self._on_end = on_news, on_end
        self._changed: list[Output] = []
        self._unread = 0
        self._most_unread = MOST_UNREAD // (1 + (request.sampling.logprobs or 0)) * len(request.prompts)
        self._bounded = not request.chooses and not request.whole
        self._admitted = False
        self._error: Exception | None = None
        self._follower: Callable[[], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None

    # ---- the client's side ---------------------------------------------------------------------------

    async def next(self) -> list[SequenceDelta]:
        """Wait for news: at most one delta for each output; none once all outputs have ended, or, of a request without
        prompts, once it may run.

        Raises:
            GenerationError: it was not taken, or failed; what had come before has been told.
            Exception: whatever a follower has raised.
        """
        while not self._changed or (self.request.whole and not self.ended):
            if self._error is not None:
                raise self._error
            if self.ended or self._admitted:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self.take_news()

    def take_news(self) -> list[SequenceDelta]:
        """The news that there is now."""
        changed, self._changed = self._changed, []
        self._unread = 0
        return [output.news() for output in changed]

    def follow(self, follower: Callable[[], bool]) -> None:
        """From now on, call ``follower`` when there is news. It takes them and returns true; or it returns false, and
        whoever waits for ``next`` gets them, as the last ones in any case."""
        self._follower = follower

    def abort(self) -> None:
        """Nobody reads it any more: stop all outputs that have not ended, and let go of everything.

        What refers to each other here would else wait for the garbage collector, which is told to look seldom.
        """
        if not self.ended:
            self._end("abort")
        self.prompts, self.outputs, self._changed = [], [], []
        self._follower = self._error = None

    @property
    def unfinished(self) -> bool:
        """Whether a scheduler that has it still has something to do for it."""
        return self._unfinished_prompts > 0 or not self.request.prompts

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far. A prompt that none are wanted of may have got one, which does not count."""
        return sum(len(output.tokens) for output in self.outputs if output.prompt.given.max_tokens)

    # ---- the scheduler's side ------------------------------------------------------------------------

    def start(self) -> None:
        """The scheduler lets a request without prompts run."""
        self._admitted = True
        self._wake()

    def changed(self, output: Output) -> None:
        """An output that had no news has some."""
        if not self._changed:
            self._on_news(self)
        self._changed.append(output)

    def tell(self) -> None:
        """Tell the client the news, or wake who does."""
        if self.request.whole or self.ended or not self._changed:
            return  # what is whole is told at its end, and that has woken everybody
        if self._follower is not None:
            try:
                if self._follower():
                    return
            except Exception as error:
                self._changed.clear()
                self.fail(error)
        self._wake()

    def count_unread(self) -> None:
        """A token has come before the client has taken the one before it."""
        self._unread += 1
        if self._unread > self._most_unread and self._bounded and not self.ended:
            log.info("request %s: its client left too much unread, stopping it", self.request.request_id)
            self._metrics.slow_readers.inc()
            self._error = SlowReaderError("the answer was not read fast enough")
            self._end("abort")
            self._changed.clear()

    def output_finished(self, output: Output, reason: FinishReason, now: float) -> None:
        """One of its outputs has ended."""
        if self.ended:  # cut off by a token of the same frame
            return
        self._metrics.request_success(reason).inc()
        prompt = output.prompt
        prompt.unfinished -= 1
        if prompt.unfinished == 0:
            prompt.end(now)
            self._unfinished_prompts -= 1
            if self._unfinished_prompts == 0:
                self._close()

    def refuse(self, error: AdmissionError) -> None:
        """No scheduler has taken it: it counts nowhere."""
        if not self.ended:
            self._error = error
            self._close()

    def fail(self, error: Exception) -> None:
        """The whole request has failed."""
        if not self.ended:
            self._error = error
            self._end("error")

    def _end(self, reason: FinishReason) -> None:
        now = monotonic()
        for prompt in self.prompts:
            if prompt.unfinished:
                self._metrics.request_success(reason).inc(prompt.unfinished)
                prompt.end(now)
        self._close()

    def _close(self) -> None:
        self.ended = True
        self._on_end(self)
        self._wake()

    def _wake(self) -> None:
        if (waiter := self._waiter) is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)
