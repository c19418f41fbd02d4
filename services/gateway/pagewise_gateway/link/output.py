"""The state of an output: its tokens, its text, and what its client has not read yet."""

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

from pagewise_shared.protocol import FinishReason, Started, StreamProgress, TokenLogprobs

from pagewise_gateway.generation import PackedLogprobs, SequenceDelta
from pagewise_gateway.metrics import Metrics
from pagewise_gateway.text.detokenizer import IncrementalDetokenizer
from pagewise_gateway.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pagewise_gateway.link.live_request import LiveRequest


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
