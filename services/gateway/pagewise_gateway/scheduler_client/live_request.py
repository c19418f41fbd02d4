"""A request that is being served: its prompts, its outputs, and the news that its client has not read yet."""

import asyncio
import logging
from array import array
from collections.abc import Callable, Iterator
from time import monotonic

from msgspec.structs import replace
from pagewise_shared.block_hash import adapter_salt
from pagewise_shared.logs import about
from pagewise_shared.protocol import FinishReason, Started, StreamProgress, Submit, TokenLogprobs

from pagewise_gateway.generation import (
    AdmissionError,
    AnswerOptions,
    Held,
    PackedLogprobs,
    SequenceDelta,
    SlowReaderError,
    token_bytes,
)
from pagewise_gateway.metrics import Metrics
from pagewise_gateway.text.detokenizer import IncrementalDetokenizer
from pagewise_gateway.text.stop_matcher import StopStrings
from pagewise_gateway.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MOST_UNREAD = 32 * 1024 * 1024
"""Bytes of a stream that may wait for the client before its request is stopped, as ``token_bytes`` counts them."""
_UNCOUNTED_BYTES = 65_536
"""Up to this size, unread tokens take no memory of the budget; most requests never have more."""
_FEW = 32
_GROWTH_BYTES = 65_536
"""The memory is taken in steps of this size, so that it is not taken anew for every token."""

_NO_PROGRESS = StreamProgress(b"", False)


class Output:
    """One output of a prompt. It outlives schedulers: the next one continues after the ``tokens`` here.

    Fields:
        tokens: output tokens so far (int32). finished: whether no more are accepted.
        hidden: the stop token that ends the output, if its text is to be left out, else -1. It is set before the token
            itself arrives, because a token does not say that it is the last one.
    """

    __slots__ = (
        "_delta_finish",
        "_end_of_sequence",
        "_hidden",
        "_hides_stop",
        "_last_time",
        "_live",
        "_logprobs",
        "_num_read",
        "_parts",
        "_pending",
        "_push",
        "_stops",
        "_text",
        "_tokenizer",
        "finished",
        "hidden",
        "index",
        "prompt",
        "tokens",
    )

    def __init__(self, prompt: "LivePrompt", index: int, tokenizer: Tokenizer) -> None:
        self.index = index
        self.prompt = prompt
        self.tokens = array("i")
        self.finished = False
        self.hidden = -1
        self._live = prompt.live
        self._tokenizer = tokenizer
        self._text: IncrementalDetokenizer | None = None  # until the first token
        self._push: Callable[[int], str]
        self._stops = bool(prompt.live.options.stop)
        self._hides_stop = not prompt.live.options.include_stop_str_in_output
        self._end_of_sequence = tokenizer.eos_token_ids
        self._hidden = not prompt.live.request.prompts[prompt.number].max_tokens  # it is only computed
        self._last_time = 0.0
        # What the client has not read: text, log-probabilities, tokens from ``_num_read`` on, and the finish reason.
        self._pending = False
        self._parts: list[str] = []
        self._logprobs: PackedLogprobs | None = None
        self._num_read = 0
        self._delta_finish: tuple[FinishReason, str | int | None] | None = None

    def take(self, token: int, now: float, gaps: dict[float, int]) -> bool:
        """Append a token. Returns whether it completed a stop string.

        ``now``: seconds of the monotonic clock. ``gaps``: for each time at which the token before this one arrived, how
        many outputs it was so for; the inter-token latency is observed once for all of them.
        """
        if last := self._last_time:
            self._last_time = now
            gaps[last] = gaps.get(last, 0) + 1
        else:
            self._first(now)
        self.tokens.append(token)
        self._live.num_taken += 1
        if token != self.hidden and (fresh := self._push(token)):
            self._parts.append(fresh)
        if self._pending:
            self._live.count_unread()
        else:
            self._pending = True
            self._live.changed(self)
        return self._stops and self._text is not None and self._text.stopped_by is not None

    def take_logprobs(self, entry: TokenLogprobs) -> None:
        """Add the log-probabilities of the last token."""
        if self._logprobs is None:
            self._logprobs = PackedLogprobs()
        self._logprobs.append(entry)

    def expect_stop(self, token: int) -> None:
        """The output will end with this stop token; its text is hidden unless the client wants it."""
        if self._hides_stop:
            self.hidden = token

    def finish(self, reason: FinishReason, stop_token: int, now: float) -> None:
        """The output has ended. ``stop_token``: the token that ended it, or -1."""
        text = self._detokenizer()
        rest = text.finish()
        if rest:
            self._parts.append(rest)
        stop_reason: str | int | None = None
        stopped_by = text.stopped_by
        if stop_token >= 0 and stop_token not in self._end_of_sequence:
            stop_reason = stop_token
        if stopped_by is not None and (
            reason == "length" or stop_token < 0
        ):  # the last token may complete a stop string and reach the length
            reason, stop_reason = "stop", stopped_by
        self.finished = True
        self._delta_finish = (reason, stop_reason)
        if not self._pending:
            self._pending = True
            self._live.changed(self)
        self._live.output_finished(self, reason, now)

    def news(self) -> SequenceDelta:
        """Return what is new since the last call."""
        self._pending = False
        parts, self._parts = self._parts, []
        delta = SequenceDelta(self.index, "".join(parts))
        if self._logprobs is not None:
            delta.logprobs, self._logprobs = self._logprobs, None
        if self._live.options.wants_token_ids:
            delta.token_ids = self.tokens[self._num_read :].tolist()
            self._num_read = len(self.tokens)
        if self._delta_finish is not None:
            delta.finish_reason, delta.stop_reason = self._delta_finish
        if self._hidden:  # a token may have been computed nevertheless
            delta.text, delta.token_ids, delta.logprobs = "", [], None
        return delta

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it has ended; None if it has not."""
        return self._delta_finish[0] if self._delta_finish is not None else None

    def progress(self) -> StreamProgress:
        """Return what the next scheduler has to know to continue this output.

        Outputs of beam search have no tokens before they end, and so they start over.
        """
        if self._hidden:
            return StreamProgress(b"", self.finished)
        return StreamProgress(self.tokens.tobytes(), self.finished)

    def _detokenizer(self) -> IncrementalDetokenizer:
        if self._text is None:
            options = self._live.options
            self._text = IncrementalDetokenizer(
                self._tokenizer,
                self._live.request.prompts[self.prompt.number].token_ids,
                skip_special_tokens=options.skip_special_tokens,
                stop=self._live.stop_strings,
                min_tokens=self._live.request.params.sampling.min_tokens,
                shown=options.shown_tokens,
            )
            self._push = self._text.push_one
        return self._text

    def _first(self, now: float) -> None:
        self._detokenizer()
        self.prompt.first_token(now)
        if self._live.request.params.beam is None:  # their tokens all arrive at the end, without a latency between them
            self._last_time = now


class LivePrompt:
    """State of one prompt of a live request.

    Fields:
        logprobs: of the prompt's tokens; complete before the first delta of its outputs.
        cached_tokens: how many of its tokens were found in a prefix cache.
        queue_seconds: from its arrival to its first step; None before its first token.
        first_token_time: seconds of the monotonic clock; None before.
        number: of the prompt in the request, which keeps its tokens. index: of its first output.
        unfinished: how many of its n outputs have not ended.
    """

    __slots__ = (
        "_known",
        "_metrics",
        "_started",
        "cached_tokens",
        "first_token_time",
        "index",
        "live",
        "logprobs",
        "number",
        "queue_seconds",
        "unfinished",
    )

    def __init__(self, live: "LiveRequest", number: int, metrics: Metrics) -> None:
        self.live, self.number = live, number
        self.index = number * live.request.params.n
        self.logprobs = PackedLogprobs()
        self._known = 0
        self.cached_tokens = 0
        self.queue_seconds: float | None = None
        self.unfinished = live.request.params.n
        self._metrics = metrics
        self._started = False
        self.first_token_time: float | None = None

    def start(self, started: Started) -> None:
        """The first output token has been computed. A later scheduler that computes it again is ignored."""
        if self._started:
            return
        self._started = True
        self.cached_tokens = started.cached_tokens
        self.live.prompt_computed(self)
        waited = self.live.submission_time - self.live.arrival_time
        self.queue_seconds = waited + started.queue_us / 1e6
        self._metrics.prompt_tokens.inc(len(self.live.request.prompts[self.number].token_ids))
        self._metrics.request_queue_time_seconds.observe(self.queue_seconds)
        self._metrics.request_prefill_time_seconds.observe(started.prefill_us / 1e6)

    def first_token(self, now: float) -> None:
        """An output has received its first token."""
        if self.first_token_time is None:
            self.first_token_time = now
            self._metrics.time_to_first_token_seconds.observe(now - self.live.arrival_time)

    def take_logprobs(self, entries: tuple[TokenLogprobs, ...]) -> None:
        """Add the log-probabilities of one prefill chunk. Those of a chunk that was computed again are dropped."""
        for entry in entries:
            if entry.index > self._known:
                self.logprobs.append(entry)
                self._known = entry.index

    def end(self, now: float) -> None:
        """All outputs of the prompt have ended."""
        self._metrics.e2e_request_latency_seconds.observe(now - self.live.arrival_time)
        if self.first_token_time is not None:
            self._metrics.request_decode_time_seconds.observe(now - self.first_token_time)


class LiveRequest:
    """One request of a client, from its submission until its outputs have ended. It outlives schedulers.

    Fields:
        request: as it was checked; each submission adds what is of the moment (``submission``).
        arrival_time: seconds of the monotonic clock.
        prompts: state of the request's prompts. num_outputs: n of each; output j of prompt i has the index i * n + j.
        outputs: those of which something has arrived, by index.
        stop_strings: of the request, if it has any; its outputs share them.
        stream: its first stream number under the current epoch; None while it waits to be submitted.
        submissions: how often it was submitted. submission_time, waiting_since: seconds of the monotonic clock.
        refusal: why it was not accepted when it was last submitted again.
        num_taken: tokens that have arrived. num_cached_tokens: of the prompts, those that were found in a prefix cache.
        counted_as: the request without prompts whose place it takes when it is submitted, if there is one.
        ended: whether nothing comes any more. ``on_end`` is called once then.

    A frame from the scheduler brings tokens of many outputs, but its client should be woken once. So ``on_news`` is
    called with the first change since the client read, and ``tell`` once the whole frame has been applied.
    """

    def __init__(
        self,
        request: Submit,
        options: AnswerOptions,
        tokenizer: Tokenizer,
        metrics: Metrics,
        on_news: Callable[["LiveRequest"], None],
        on_end: Callable[["LiveRequest"], None],
        held: Held | None = None,
        on_prompt: Callable[["memoryview[int]", str | None], None] = lambda tokens, salt: None,
    ) -> None:
        """``held``: the memory that is taken for the answer; without it, only ``MOST_UNREAD`` bounds what is unread.
        ``on_prompt``: is called with each prompt whose first token has arrived, and with the request's cache salt."""
        self.request, self.options = request, options
        self.stop_strings = StopStrings(options.stop, options.include_stop_str_in_output) if options.stop else None
        self.stream: int | None = None
        self.submissions = 0
        self.arrival_time = self.submission_time = self.waiting_since = monotonic()
        self.refusal: AdmissionError | None = None
        self.counted_as: LiveRequest | None = None
        self.ended = False
        self.num_taken = self.num_cached_tokens = 0
        self.prompts = [LivePrompt(self, number, metrics) for number in range(len(request.prompts))]
        self.num_outputs = len(self.prompts) * request.params.n
        self.outputs: dict[int, Output] = {}
        self._tokenizer = tokenizer
        self._unfinished_prompts = len(self.prompts)
        self._metrics = metrics
        self._on_news, self._on_end, self._on_prompt = on_news, on_end, on_prompt
        self._changed: list[Output] = []
        self._unread = 0
        self._held = held
        self.token_bytes = token_bytes(request.params.sampling.logprobs)
        reserved = held.size - options.prompt_bytes if held is not None else 0
        self._may_wait = max(_UNCOUNTED_BYTES, reserved) // self.token_bytes  # tokens, before more memory is taken
        self._bounded = request.params.beam is None and not options.whole
        self._admitted = False
        self._error: Exception | None = None
        self._follower: Callable[[], bool] | None = None
        self._waiter: asyncio.Future[None] | None = None

    # ---- for the client ------------------------------------------------------------------------------

    async def next(self) -> list[SequenceDelta]:
        """Wait for new deltas, at most one for each output.

        Returns an empty list once all outputs have ended. A request without prompts gets one when it may run.

        Raises:
            GenerationError: the request was not accepted, or failed; deltas from before have been returned.
            Exception: whatever a follower has raised.
        """
        self._release_memory()
        while not self._changed:
            if self._error is not None:
                raise self._error
            if self.ended or self._admitted:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._follower = None
        return self.take_news()

    async def outcome(self) -> Iterator[SequenceDelta]:
        """Wait until all outputs have ended. Returns one delta for each, in order, which is made when it is taken.

        Raises:
            GenerationError: the request was not accepted, or failed.
            Exception: there was not enough memory for its answer.
        """
        while not self.ended:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        return (self.output(index).news() for index in range(self.num_outputs))

    def take_news(self) -> list[SequenceDelta]:
        """Return the deltas that there are now."""
        changed, self._changed = self._changed, []
        self._unread = 0
        return [output.news() for output in changed]

    def follow(self, follower: Callable[[], bool]) -> None:
        """Call ``follower`` when there are new deltas, until ``next`` returns some.

        It takes them and returns true, or it returns false and leaves them to ``next``. The last ones always come from
        ``next``.
        """
        self._follower = follower

    def abort(self) -> None:
        """Stop all outputs that have not ended. The client reads nothing any more.

        This also breaks the references between the objects of a request, which otherwise would stay until the garbage
        collector runs, which is rare.
        """
        if not self.ended:
            self._end("abort")
        self.prompts, self.outputs, self._changed = [], {}, []
        self._follower = self._error = None

    @property
    def unfinished(self) -> bool:
        """Whether a scheduler that has this request still has work to do for it."""
        return self._unfinished_prompts > 0 or not self.request.prompts

    @property
    def resumed(self) -> bool:
        """Whether a scheduler may have accepted it before it was last submitted. One without prompts was told so."""
        return self.submissions > 1 and (self._admitted or bool(self.request.prompts))

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far. Those of prompts with ``max_tokens`` 0 do not count: one may have been computed."""
        return self.num_taken if self.request.prompts and self.request.prompts[0].max_tokens else 0

    @property
    def few_unread(self) -> bool:
        """Whether so few tokens and ends of outputs wait for the client that their events may be made at once."""
        return len(self._changed) + self._unread <= _FEW

    def finish_reasons(self) -> list[FinishReason]:
        """Return why each output of a request that has ended did so."""
        cut: FinishReason = "abort" if self._error is None or isinstance(self._error, SlowReaderError) else "error"
        made = (self.outputs.get(index) for index in range(self.num_outputs))
        return [(output.finish_reason if output is not None else None) or cut for output in made]

    # ---- for the scheduler -------------------------------------------------------------------------

    def submission(self, epoch: int, now: float) -> Submit:
        """Return the message that submits the request under its stream numbers, with the tokens that its outputs have.

        ``now``: seconds of the monotonic clock.
        """
        assert self.stream is not None
        again, prompts, counted, n = self.resumed, self.request.prompts, self.counted_as, self.request.params.n
        if again:  # outputs without tokens have an entry too: it was accepted once
            prompts = tuple(
                replace(one, progress=tuple(map(self._progress, range(number * n, number * n + n))))
                for number, one in enumerate(prompts)
            )
        return replace(
            self.request,
            epoch=epoch,
            stream=self.stream,
            prompts=prompts,
            age_us=max(0, int((now - self.arrival_time) * 1e6)),
            resumed=again,
            counted_as=-1 if counted is None or counted.stream is None else counted.stream,
        )

    def _progress(self, index: int) -> StreamProgress:
        output = self.outputs.get(index)
        return _NO_PROGRESS if output is None else output.progress()

    def output(self, index: int) -> Output:
        """Return an output. It is made when it is first asked for: there may be thousands, of which few run at a time,
        and the request may not be admitted."""
        if (output := self.outputs.get(index)) is None:
            prompt = self.prompts[index // self.request.params.n]
            output = self.outputs[index] = Output(prompt, index, self._tokenizer)
        return output

    def start(self) -> None:
        """A request without prompts may run."""
        self._admitted = True
        self._wake()

    def prompt_computed(self, prompt: LivePrompt) -> None:
        """The first output token of a prompt has been computed."""
        self.num_cached_tokens += prompt.cached_tokens
        adapter, salt = self.request.params.adapter, self.request.params.cache_salt
        self._on_prompt(
            self.request.prompts[prompt.number].token_ids,
            salt if adapter is None else adapter_salt(adapter.content, salt),
        )

    def changed(self, output: Output) -> None:
        """An output has changed for the first time since the client read."""
        if not self._changed:
            self._on_news(self)
        self._changed.append(output)

    def tell(self) -> None:
        """Pass new deltas to the follower, or wake the task that waits for them."""
        if self.options.whole or self.ended or not self._changed:
            return  # a whole request is passed on at its end, which wakes the waiting task
        if self._follower is not None:
            try:
                if self._follower():
                    return
            except Exception as error:
                self._changed.clear()
                self.fail(error)
        self._wake()

    def count_unread(self) -> None:
        """Count a token that has arrived before the client has read the one before it."""
        self._unread += 1
        if self._unread > self._may_wait and not self.ended:
            self._take_memory()

    def output_finished(self, output: Output, reason: FinishReason, now: float) -> None:
        """An output has ended."""
        if self.ended:  # an earlier token of the same frame has stopped it
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
        """The request is not accepted, and appears in no metric of requests."""
        if not self.ended:
            self._error = error
            self._close()

    def fail(self, error: Exception) -> None:
        """The whole request has failed."""
        if not self.ended:
            self._error = error
            self._end("error")

    def cut_off(self, error: AdmissionError) -> None:
        """End all outputs where they are, with the finish reason "abort", because this gateway stops.

        A request that has no tokens yet fails with ``error`` instead, and so does one whose client has not seen any
        of them: it can be sent again elsewhere.
        """
        if self.ended:
            return
        if self.options.whole or not self.num_output_tokens:
            self.fail(error)
            return
        self.ended = True  # before its outputs have: they are counted together
        now = monotonic()
        for index in range(self.num_outputs):
            if not (output := self.output(index)).finished:
                output.finish("abort", -1, now)
        self._end("abort")

    def _take_memory(self) -> None:
        """Take memory for what waits for the client, and for a little more. The request ends if there is not enough."""
        size = self._unread * self.token_bytes
        try:
            if self._bounded and size > MOST_UNREAD:
                self._metrics.slow_readers.inc()
                raise SlowReaderError(
                    f"the response was not read as fast as its tokens came: {self._unread} of them take {size} bytes, "
                    f"at most {MOST_UNREAD} may wait"
                )
            size = min(size + _GROWTH_BYTES, MOST_UNREAD) if self._bounded else size + _GROWTH_BYTES
            if self._held is not None:
                tokens = self.request.params.n * sum(prompt.max_tokens for prompt in self.request.prompts)
                self._held.grow_to(self.options.prompt_bytes + min(size, tokens * self.token_bytes))
            self._may_wait = size // self.token_bytes
        except Exception as error:
            request_id = self.request.request_id
            extra = about(request_id, self.request.traceparent)
            log.info("request %s is stopped: %s", request_id, error, extra=extra)
            self._error = error
            self._end("abort")
            self._changed.clear()

    def _release_memory(self) -> None:
        """Give the memory back that was taken for tokens which the client has read by now."""
        if self._held is not None and self._held.size > self.options.prompt_bytes:
            self._held.shrink_to(self.options.prompt_bytes)
            self._may_wait = _UNCOUNTED_BYTES // self.token_bytes

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
