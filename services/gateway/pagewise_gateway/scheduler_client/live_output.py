"""The prompts of a request that is being served and their outputs, with the deltas that its client has not read."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagewise_shared.protocol import FinishReason, Started, StreamProgress, TokenLogprobs

from pagewise_gateway.generation import PackedLogprobs, SequenceDelta
from pagewise_gateway.metrics import Metrics
from pagewise_gateway.text.detokenizer import IncrementalDetokenizer
from pagewise_gateway.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pagewise_gateway.scheduler_client.live_request import LiveRequest


@dataclass(slots=True, eq=False)
class Output:
    """One output of a prompt. It survives restarts of the scheduler: the next one continues after ``tokens``.

    Fields:
        tokens: output tokens so far (int32). finished: whether no more are accepted.
        hidden: the stop token that will end the output without text; -1: none. It is set before the token itself
            is taken, because a token does not show that it is the last one.
    """

    prompt: "LivePrompt"
    index: int
    _tokenizer: Tokenizer
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    finished: bool = False
    hidden: int = -1
    _live: "LiveRequest" = field(init=False)
    _text: IncrementalDetokenizer | None = None  # until the first token
    _push: Callable[[int], str] = field(init=False)
    _hidden: bool = field(init=False)
    _last_time: float = 0.0
    # The client has not read these: text, log-probabilities, tokens from ``_num_read`` on, and the finish reason.
    _pending: bool = False
    _parts: list[str] = field(default_factory=list)
    _logprobs: PackedLogprobs | None = None
    _num_read: int = 0
    _delta_finish: tuple[FinishReason, str | int | None] | None = None

    def __post_init__(self) -> None:
        self._live = self.prompt.live
        self._hidden = not self._live.request.prompts[self.prompt.number].max_tokens  # only its prompt is computed

    def take(self, token: int, now: float, gaps: dict[float, int]) -> bool:
        """Append a token. Returns whether it completed a stop string.

        ``now``: seconds of the monotonic clock. ``gaps``: counts outputs by the arrival time of their previous token,
        so that equal inter-token latencies are observed together.
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
        return self._live.stop_strings is not None and self._text is not None and self._text.stopped_by is not None

    def take_logprobs(self, entry: TokenLogprobs) -> None:
        """Add the log-probabilities of the last token."""
        if self._logprobs is None:
            self._logprobs = PackedLogprobs()
        self._logprobs.append(entry)

    def expect_stop(self, token: int) -> None:
        """Note that the output will end with this stop token, which has no text unless the client wants it."""
        if not self._live.options.include_stop_str_in_output:
            self.hidden = token

    def finish(self, reason: FinishReason, stop_token: int, now: float) -> None:
        """End the output. ``stop_token``: the token that has ended it, or -1."""
        text = self._detokenizer()
        if rest := text.finish():
            self._parts.append(rest)
        stop_reason: str | int | None = None
        if stop_token >= 0 and stop_token not in self._tokenizer.eos_token_ids:
            stop_reason = stop_token
        # A stop string wins over the length: the last token that is allowed may complete it.
        if text.stopped_by is not None and (reason == "length" or stop_token < 0):
            reason, stop_reason = "stop", text.stopped_by
        self.finished = True
        self._delta_finish = (reason, stop_reason)
        if not self._pending:
            self._pending = True
            self._live.changed(self)
        self._live.output_finished(self, reason, now)

    def take_delta(self) -> SequenceDelta:
        """Return everything that is new since the last call."""
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
        if self._hidden:  # the executor may have computed a token nevertheless
            delta.text, delta.token_ids, delta.logprobs = "", [], None
        return delta

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason for its end; None before."""
        return self._delta_finish[0] if self._delta_finish is not None else None

    def progress(self) -> StreamProgress:
        """Return the state from which the next scheduler continues this output. Beam search has none: it starts over,
        because its outputs get no tokens before they end."""
        return StreamProgress(b"" if self._hidden else self.tokens.tobytes(), self.finished)

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
            self._push = self._text.push
        return self._text

    def _first(self, now: float) -> None:
        self._detokenizer()
        self.prompt.first_token(now)
        if self._live.request.params.beam is None:  # tokens of beams arrive all at once, which is no latency
            self._last_time = now


@dataclass(slots=True, eq=False)
class LivePrompt:
    """State of one prompt of a live request.

    Fields:
        number: index of the prompt in the request, which keeps its tokens. index: of its first output.
        logprobs: of the prompt's tokens; complete before the first delta of its outputs.
        cached_tokens: how many of its tokens were found in a prefix cache.
        queue_seconds: from its arrival to its first step; None before its first token.
        first_token_time: seconds of the monotonic clock; None before its first token.
        unfinished: how many of its n outputs have not ended.
    """

    live: "LiveRequest"
    number: int
    _metrics: Metrics
    index: int = field(init=False)
    unfinished: int = field(init=False)
    logprobs: PackedLogprobs = field(default_factory=PackedLogprobs)
    cached_tokens: int = 0
    queue_seconds: float | None = None
    first_token_time: float | None = None
    _known: int = 0
    _started: bool = False

    def __post_init__(self) -> None:
        self.unfinished = self.live.request.params.n
        self.index = self.number * self.unfinished

    def start(self, started: Started) -> None:
        """Note the first step's times. A later scheduler that computes the prompt again is ignored."""
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
        """Note that an output has received its first token."""
        if self.first_token_time is None:
            self.first_token_time = now
            self._metrics.time_to_first_token_seconds.observe(now - self.live.arrival_time)

    def take_logprobs(self, entries: tuple[TokenLogprobs, ...]) -> None:
        """Add the log-probabilities of one prefill chunk. A chunk that was computed again is ignored."""
        for entry in entries:
            if entry.index > self._known:
                self.logprobs.append(entry)
                self._known = entry.index

    def end(self, now: float) -> None:
        """Observe the latencies of the prompt, all of whose outputs have ended."""
        self._metrics.e2e_request_latency_seconds.observe(now - self.live.arrival_time)
        if self.first_token_time is not None:
            self._metrics.request_decode_time_seconds.observe(now - self.first_token_time)
