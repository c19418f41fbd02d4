"""Maps stream numbers to outputs, and applies frames of outputs to them."""

from array import array
from bisect import bisect_left, bisect_right
from time import monotonic
from typing import NamedTuple

from pagewise_shared.errors import ProtocolError
from pagewise_shared.protocol import Outputs, PromptFailed, RequestRefused, TokenLogprobs, unpack_int32s

from pagewise_gateway.generation import GenerationError, InvalidGrammarError, NoExecutorError
from pagewise_gateway.metrics import Metrics
from pagewise_gateway.scheduler_client.live_output import LivePrompt, Output
from pagewise_gateway.scheduler_client.live_request import LiveRequest

MOST_STREAMS = 2**31 - 1
"""How many stream numbers there are under one epoch."""

_FAILURES: dict[str, type[GenerationError]] = {"unavailable": NoExecutorError, "invalid": InvalidGrammarError}


class Applied(NamedTuple):
    """The result of a frame of outputs.

    ``stopped``: streams that a stop string has ended, of which the scheduler does not know yet. ``refused``: requests
    that the scheduler did not accept.
    """

    stopped: list[int]
    refused: list[tuple[LiveRequest, RequestRefused]]


class StreamTable:
    """The stream numbers of one epoch, assigned in ascending order."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._next = 0
        # Requests and prompts by the number of their first stream, and these numbers of the requests in order.
        self._requests: dict[int, LiveRequest] = {}
        self._prompts: dict[int, LivePrompt] = {}
        self._first_streams: list[int] = []
        self._outputs: dict[int, Output] = {}
        """The outputs that are made and have not ended."""
        self._with_news: list[LiveRequest] = []

    def has_news(self, live: LiveRequest) -> None:
        """Have the request deliver its deltas once the whole frame has been applied."""
        self._with_news.append(live)

    def clear(self) -> None:
        """Forget all numbers, because a new epoch begins."""
        self._next = 0
        self._requests, self._prompts, self._first_streams, self._outputs = {}, {}, [], {}

    def add(self, live: LiveRequest) -> bool:
        """Assign a request its numbers. Returns False if there are not enough of them left under this epoch."""
        if self._next + max(1, live.num_outputs) > MOST_STREAMS:
            return False
        live.stream = stream = self._next
        self._next += max(1, live.num_outputs)
        self._requests[stream] = live
        self._first_streams.append(stream)
        for prompt in live.prompts:
            self._prompts[stream + prompt.index] = prompt
        for index, output in live.outputs.items():
            if not output.finished:
                self._outputs[stream + index] = output
        return True

    def remove(self, live: LiveRequest) -> None:
        """Forget a request's numbers. Tokens that still arrive for them are dropped."""
        if (stream := live.stream) is None:
            return
        live.stream = None
        del self._requests[stream], self._first_streams[bisect_left(self._first_streams, stream)]
        for prompt in live.prompts:
            del self._prompts[stream + prompt.index]
        for index in live.outputs:
            self._outputs.pop(stream + index, None)

    def apply(self, frame: Outputs) -> Applied:
        """Apply a frame to its requests. Unknown stream numbers belong to requests that were aborted.

        Raises:
            ProtocolError: the frame contradicts the protocol; nothing has been applied.
        """
        streams, tokens = unpack_int32s(frame.streams), unpack_int32s(frame.tokens)
        _check(frame, streams, tokens)
        now = monotonic()
        refused = [(live, one) for one in frame.refused if (live := self._requests.get(one.stream)) is not None]
        self._start(frame)
        # Before the tokens: the text of a stop token is left out, and the token does not show that it is one.
        for ending in frame.finished:
            if ending.stop_token >= 0 and (output := self._output(ending.stream)) is not None:
                output.expect_stop(ending.stop_token)
        stopped, overtaken = self._take_tokens(streams, tokens, frame.logprobs, now)
        self._end(frame, stopped, overtaken, now)
        for failed in frame.failed:
            self._fail(failed)
        news, self._with_news = self._with_news, []
        for live in news:
            live.deliver()
        return Applied(list(stopped), refused)

    def _start(self, frame: Outputs) -> None:
        for started in frame.started:
            if (prompt := self._prompts.get(started.stream)) is not None:
                prompt.start(started)
            elif (live := self._requests.get(started.stream)) is not None:
                live.start()
        for one in frame.prompt_logprobs:
            if (prompt := self._prompts.get(one.stream)) is not None:
                prompt.take_logprobs(one.entries)

    def _take_tokens(
        self, streams: "array[int]", tokens: "array[int]", logprobs: tuple[TokenLogprobs, ...], now: float
    ) -> tuple[dict[int, Output], set[int]]:
        """Append tokens to their outputs.

        Returns the outputs that a stop string has ended, by stream number, and the streams among them with further
        tokens in this frame: these tokens are dropped, and with them the finish reason that the scheduler gives.
        """
        outputs = self._outputs
        stopped: dict[int, Output] = {}
        overtaken: set[int] = set()
        gaps: dict[float, int] = {}
        known = {entry.index: entry for entry in logprobs}
        for index, (stream, token) in enumerate(zip(streams, tokens, strict=True)):
            if (output := outputs.get(stream) or self._output(stream)) is None:
                if stream in stopped:
                    overtaken.add(stream)
                continue
            if output.take(token, now, gaps):
                stopped[stream] = output
                outputs.pop(stream, None)  # it is gone already if this token has ended a request that was not read
            if known and (entry := known.get(index)) is not None:
                output.take_logprobs(entry)
        for last, count in gaps.items():
            self._metrics.inter_token_latency_seconds.observe(now - last, count)
        return stopped, overtaken

    def _output(self, stream: int) -> Output | None:
        """Return the output of a stream, which is made with its first token; None: it or its request has ended."""
        if (output := self._outputs.get(stream)) is not None:
            return output
        position = bisect_right(self._first_streams, stream) - 1
        if position < 0:
            return None
        live = self._requests[first := self._first_streams[position]]
        index = stream - first
        if live.ended or index >= live.num_outputs or index in live.outputs:
            return None
        output = self._outputs[stream] = live.output(index)
        return output

    def _end(self, frame: Outputs, stopped: dict[int, Output], overtaken: set[int], now: float) -> None:
        """End outputs. The ones that the scheduler has ended leave ``stopped``, because it knows of their end.

        ``stopped``, ``overtaken``: as ``_take_tokens`` returns them.
        """
        for ending in frame.finished:
            if ending.stream in overtaken:
                stopped.pop(ending.stream).finish("stop", -1, now)
                continue
            output = self._output(ending.stream) or stopped.pop(ending.stream, None)
            if output is not None:
                self._outputs.pop(ending.stream, None)
                output.finish(ending.reason, ending.stop_token, now)
        for output in stopped.values():
            output.finish("stop", -1, now)

    def _fail(self, failed: PromptFailed) -> None:
        """Fail the whole request, because a client cannot use a part of its outputs."""
        if (prompt := self._prompts.get(failed.stream)) is not None:
            kind = _FAILURES.get(failed.kind, GenerationError)
            prompt.live.fail(kind(failed.message))


def _check(frame: Outputs, streams: "array[int]", tokens: "array[int]") -> None:
    if len(streams) != len(tokens):
        raise ProtocolError(f"{len(tokens)} tokens for {len(streams)} streams")
    if min(tokens, default=0) < 0:
        raise ProtocolError("a token below 0")
    _check_logprobs(frame, len(tokens))


def _check_logprobs(frame: Outputs, num_tokens: int) -> None:
    last = -1
    for entry in frame.logprobs:
        if not last < entry.index < num_tokens:
            raise ProtocolError(f"log-probabilities of token {entry.index} of {num_tokens}, after those of {last}")
        last = entry.index
    entries = [*frame.logprobs, *(entry for one in frame.prompt_logprobs for entry in one.entries)]
    for entry in entries:
        if len(entry.top_ids) != len(entry.top_logprobs):
            num_ids, num_logprobs = len(entry.top_ids) / 4, len(entry.top_logprobs) / 4
            raise ProtocolError(f"{num_logprobs:g} log-probabilities of {num_ids:g} tokens")
        if not 0 <= entry.token_id <= MOST_STREAMS:
            raise ProtocolError(f"log-probabilities of token {entry.token_id}")
    if min(unpack_int32s(b"".join([entry.top_ids for entry in entries])), default=0) < 0:
        raise ProtocolError("log-probabilities of a token below 0")
