"""A request of the core with its place in the service: its gateway's streams, and the executor that runs it."""

import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec
from pagewise_shared.logs import about
from pagewise_shared.protocol import (
    Outputs,
    PromptFailed,
    RequestRefused,
    Started,
    StreamFinished,
    StreamPromptLogprobs,
    TokenLogprobs,
)

from pagewise_scheduler.core.requests.request import Request, RequestSequence
from pagewise_scheduler.core.routing.executor_view import Placement

if TYPE_CHECKING:
    from pagewise_scheduler.server.executor_handle import ExecutorHandle

log = logging.getLogger(__name__)

FailureKind = Literal["internal", "unavailable", "invalid"]


class OutputBuilder:
    """Collects the fields of the next ``Outputs`` frame of one gateway, which is sent at the end of a round.

    ``streams`` and ``tokens`` are parallel. Sequences append to them directly: this is their ``TokenSink``.
    """

    __slots__ = ("failed", "finished", "logprobs", "prompt_logprobs", "refused", "started", "streams", "tokens")

    def __init__(self) -> None:
        self.streams: list[int] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.refused: list[RequestRefused] = []
        self.started: list[Started] = []
        self.prompt_logprobs: list[StreamPromptLogprobs] = []
        self.finished: list[StreamFinished] = []
        self.failed: list[PromptFailed] = []

    def add_logprobs(self, of_streams: dict[int, TokenLogprobs]) -> None:
        """Add the log-probabilities of the newest token of each of these streams."""
        found = []
        for index in range(len(self.streams) - 1, -1, -1):
            if (entry := of_streams.pop(self.streams[index], None)) is not None:
                found.append(msgspec.structs.replace(entry, index=index))
                if not of_streams:
                    break
        self.logprobs += reversed(found)

    def take(self, epoch: int) -> Outputs | None:
        """Return the frame with everything that was collected, None if nothing was; empty the builder."""
        if not (self.streams or self.finished or self.started or self.refused or self.failed or self.prompt_logprobs):
            return None
        outputs = Outputs(
            epoch,
            tuple(self.refused),
            tuple(self.started),
            tuple(self.prompt_logprobs),
            array("i", self.streams).tobytes(),
            array("i", self.tokens).tobytes(),
            tuple(self.logprobs),
            tuple(self.finished),
            tuple(self.failed),
        )
        self.__init__()  # type: ignore[misc]  # empty
        return outputs


@dataclass(slots=True, eq=False, kw_only=True)
class ClientRequest(Request):
    """One prompt of a client's request. If its executor dies, it continues on another executor from its tokens.

    Output ``i`` is stream ``stream + i`` of its gateway.

    Fields:
        on_end: called once, when the whole request has ended.
        arrived: its arrival at this scheduler, seconds of ``clock``.
        unfinished: number of outputs that take more tokens. done: whether the whole request has ended.
        executor: its last executor; None: it waits for one. placement: the reason for this executor.
        deaths: executors in a row that died during a step of this request, without a new token in between.
        unplaced_seconds: time without an executor since its last placement.
        tokens_before: output tokens from an earlier scheduler.
        num_generated_tokens: output tokens that this scheduler has had computed, shown or not; set at its end.
        traceparent: the span of its gateway, "" if it is not traced. failure: the kind of its error, if it failed.
    """

    outputs: OutputBuilder
    on_end: Callable[["ClientRequest"], None]
    arrived: float
    unfinished: int
    tokens_before: int = 0
    num_generated_tokens: int = 0
    done: bool = False
    executor: "ExecutorHandle | None" = None
    placement: Placement | None = None
    deaths: int = 0
    unplaced_seconds: float = 0.0
    traceparent: str = ""
    failure: FailureKind | None = None
    _started: bool = False
    _tokens_at_death: int = 0
    _last_prompt_logprob: int = 0

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all outputs so far."""
        return sum(len(sequence.output_token_ids) for sequence in self.sequences)

    def started(self, now: float) -> None:
        """Report its first token; harmless the second time. ``now``: seconds of ``clock``."""
        if self.placement is not None:
            self.placement.answered(now)
        if self._started:
            return
        self._started = True
        self.first_token_time = now
        self.timeline.answered(now)
        scheduled = self.scheduled_time if self.scheduled_time == self.scheduled_time else now  # NaN: never
        self.outputs.started.append(
            Started(
                self.stream,
                self.num_cached_tokens,
                max(0, int((scheduled - self.arrived) * 1e6)),
                max(0, int((now - scheduled) * 1e6)),
            )
        )

    def take_prompt_logprobs(self, entries: tuple[TokenLogprobs, ...]) -> None:
        """Report the prompt log-probabilities of one chunk, except positions that were reported before a
        recomputation."""
        fresh = tuple(entry for entry in entries if entry.index > self._last_prompt_logprob)
        if fresh:
            self._last_prompt_logprob = fresh[-1].index
            self.outputs.prompt_logprobs.append(StreamPromptLogprobs(self.stream, fresh))

    def take_finish(self, sequence: RequestSequence, now: float, *, report: bool = True) -> None:
        """Finish an output. ``report``: send the finish reason of ``sequence``; False if the gateway itself has
        finished it."""
        if report:
            self.started(now)
            stop_token = sequence.stop_reason if isinstance(sequence.stop_reason, int) else -1
            reason = sequence.finish_reason or "abort"
            self.outputs.finished.append(StreamFinished(self.stream + sequence.index, reason, stop_token))
        self.unfinished -= 1
        if self.unfinished <= 0:
            self.end(now)

    def report_failure(self, kind: FailureKind, message: str, now: float) -> None:
        """Fail the whole request. The kind "invalid" is the client's error."""
        if not self.done:
            self.failure = kind
            self.outputs.failed.append(PromptFailed(self.stream, kind, message))
            self.end(now)

    def report_abort(self, now: float) -> None:
        """Report to its gateway that its unfinished outputs are aborted. The caller then aborts it."""
        self.started(now)
        ended = set[int]() if self.params.beam is not None else {one.index for one in self.sequences if one.finished}
        self.outputs.finished += [
            StreamFinished(self.stream + index, "abort") for index in range(self.params.n) if index not in ended
        ]

    def end(self, now: float) -> None:
        """End it, without a report."""
        if self.done:
            return
        self.done = True
        if self.placement is not None:
            self.placement.end(now)
            self.placement = None  # breaks a reference cycle, so that no garbage is left
        tokens = self.num_output_tokens - self.tokens_before
        self.timeline.ended(now)
        self.num_generated_tokens = max(tokens, self.num_sampled_tokens)
        self.on_end(self)
        self.replace_sequences([])

    def log(self, level: int, text: str) -> None:
        """Log a line about the request, with its id and its executor."""
        where = f"{self.executor.executor_id}: " if self.executor is not None else ""
        log.log(level, "%srequest %s %s", where, self.request_id, text, extra=about(self.request_id, self.traceparent))

    def count_death(self) -> None:
        """Count an executor that died in a step of this request; a new token since the last death resets the count."""
        tokens = self.num_output_tokens
        self.deaths = self.deaths + 1 if tokens <= self._tokens_at_death else 1
        self._tokens_at_death = tokens
