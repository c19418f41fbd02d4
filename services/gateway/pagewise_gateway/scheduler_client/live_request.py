"""A request that is being served, from its submission until all its outputs have ended."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from time import monotonic

from msgspec.structs import replace
from pagewise_shared.block_hash import adapter_salt
from pagewise_shared.logs import about
from pagewise_shared.protocol import FinishReason, StreamProgress, Submit

from pagewise_gateway.generation import (
    AdmissionError,
    AnswerOptions,
    Held,
    SequenceDelta,
    SlowReaderError,
    token_bytes,
)
from pagewise_gateway.metrics import Metrics
from pagewise_gateway.scheduler_client.live_output import LivePrompt, Output
from pagewise_gateway.text.detokenizer import StopStrings
from pagewise_gateway.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MOST_UNREAD = 32 * 1024 * 1024
"""Bytes of a stream, as ``token_bytes`` counts them, that may wait for the client before its request is stopped."""
_UNCOUNTED_BYTES = 65_536
"""Unread tokens up to this size reserve no memory; most requests never have more."""
_FEW = 32
_GROWTH_BYTES = 65_536
"""Memory is reserved in steps of this size, and not anew with every token."""
_NO_PROGRESS = StreamProgress(b"", False)


class LiveRequest:
    """One request of a client, from its submission until its outputs have ended. It survives restarts of the scheduler.

    Fields:
        request: as it was checked; ``submission`` adds the fields that each submission has of its own.
        arrival_time: seconds of the monotonic clock.
        prompts: state of the request's prompts. num_outputs: n for each; output j of prompt i has the index i * n + j.
        outputs: by index, from their first token on.
        stop_strings: of the request, if it has any; its outputs share them.
        stream: its first stream number under the current epoch; None while it waits to be submitted.
        submissions: how often it was submitted. submission_time, waiting_since: seconds of the monotonic clock.
        refusal: the error of the last submission, if an earlier one had been accepted.
        num_taken: output tokens so far. num_cached_tokens: prompt tokens that were found in a prefix cache.
        counted_as: the request without prompts whose place it takes when it is submitted, if there is one.
        ended: whether nothing more comes. ``on_end`` is called once then.

    A frame from the scheduler brings tokens of many outputs, but its client should be woken once. So ``on_news`` is
    called with the first change since the client read, and ``deliver`` once the whole frame has been applied.
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
        """``held``: the memory that is reserved for the answer; without it, only ``MOST_UNREAD`` bounds unread tokens.
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
        self._may_wait = max(_UNCOUNTED_BYTES, reserved) // self.token_bytes  # tokens, before more memory is reserved
        self._bounded = request.params.beam is None and not options.whole
        self._admitted = False
        self._error: Exception | None = None
        self._follower: Callable[[], bool] | None = None
        self._interrupted = False
        self._waiter: asyncio.Future[None] | None = None

    # ---- for the client ------------------------------------------------------------------------------

    async def next(self) -> list[SequenceDelta]:
        """Wait for new deltas, at most one for each output. Returns an empty list once all outputs have ended, for a
        request without prompts when the scheduler admits it, and after ``interrupt``.

        Raises:
            GenerationError: the request was not accepted, or failed; deltas from before have been returned.
            Exception: a follower has raised it.
        """
        self._release_memory()
        while not self._changed:
            if self._error is not None:
                raise self._error
            if self.ended or self._admitted:
                return []
            if self._interrupted:
                self._interrupted = False
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._follower, self._interrupted = None, False
        return self.take_deltas()

    def interrupt(self) -> None:
        """Let ``next`` return if it waits. Followers stay."""
        if self._waiter is not None:
            self._interrupted = True
            self._wake()

    async def outcome(self) -> Iterator[SequenceDelta]:
        """Wait until all outputs have ended. Returns an iterator over one delta for each output, in order.

        Raises:
            GenerationError: the request was not accepted, or failed.
            Exception: there was not enough memory for its answer.
        """
        while not self.ended:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        return (self.output(index).take_delta() for index in range(self.num_outputs))

    def take_deltas(self) -> list[SequenceDelta]:
        """Return the deltas of all outputs that have changed, without waiting."""
        changed, self._changed = self._changed, []
        self._unread = 0
        return [output.take_delta() for output in changed]

    def follow(self, follower: Callable[[], bool]) -> None:
        """Call ``follower`` when there are new deltas, until ``next`` returns some.

        It takes them and returns true, or returns false and leaves them to ``next``. The last deltas always come from
        ``next``.
        """
        self._follower = follower

    def abort(self) -> None:
        """Stop all outputs that have not ended, because the client reads no more.

        This also breaks the reference cycles of the request, which the garbage collector would find only much later.
        """
        if not self.ended:
            self._end("abort")
        self.prompts, self.outputs, self._changed = [], {}, []
        self._follower = self._error = None

    @property
    def unfinished(self) -> bool:
        """Whether a scheduler that has this request still works for it."""
        return self._unfinished_prompts > 0 or not self.request.prompts

    @property
    def resumed(self) -> bool:
        """Whether an earlier scheduler may have accepted it. For a request without prompts this is certain, because it
        was admitted."""
        return self.submissions > 1 and (self._admitted or bool(self.request.prompts))

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far; 0 if ``max_tokens`` is 0, although the executor may have computed one."""
        return self.num_taken if self.request.prompts and self.request.prompts[0].max_tokens else 0

    @property
    def few_unread(self) -> bool:
        """Whether the unread tokens and ends of outputs are few enough to be encoded without a pause."""
        return len(self._changed) + self._unread <= _FEW

    def finish_reasons(self) -> list[FinishReason]:
        """Return the finish reason of each output of a request that has ended."""
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
        if again:  # outputs without tokens have an entry too, because they were accepted once
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
        """Return an output. It is made at the first call: of thousands, few run at a time, and the scheduler may refuse
        the request."""
        if (output := self.outputs.get(index)) is None:
            prompt = self.prompts[index // self.request.params.n]
            output = self.outputs[index] = Output(prompt, index, self._tokenizer)
        return output

    def start(self) -> None:
        """Note that the scheduler has admitted this request without prompts."""
        self._admitted = True
        self._wake()

    def prompt_computed(self, prompt: LivePrompt) -> None:
        """Note that the KV of a prompt has been computed."""
        self.num_cached_tokens += prompt.cached_tokens
        adapter, salt = self.request.params.adapter, self.request.params.cache_salt
        self._on_prompt(
            self.request.prompts[prompt.number].token_ids,
            salt if adapter is None else adapter_salt(adapter.content, salt),
        )

    def changed(self, output: Output) -> None:
        """Note that an output has changed for the first time since the client read."""
        if not self._changed:
            self._on_news(self)
        self._changed.append(output)

    def deliver(self) -> None:
        """Have the follower take the new deltas, or wake the task that waits for them."""
        if self.options.whole or self.ended or not self._changed:
            return  # the end of a whole request wakes the waiting task
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
            self._reserve_memory()

    def output_finished(self, output: Output, reason: FinishReason, now: float) -> None:
        """Count an output that has ended, and end the request with its last output."""
        if self.ended:  # an earlier token of the same frame has stopped the request
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
        """End a request that the scheduler does not accept. It appears in no metric of requests."""
        if not self.ended:
            self._error = error
            self._close()

    def fail(self, error: Exception) -> None:
        """End the whole request with an error."""
        if not self.ended:
            self._error = error
            self._end("error")

    def cut_off(self, error: AdmissionError) -> None:
        """End all outputs with the finish reason "abort", because this gateway stops.

        A request whose client has seen no tokens fails with ``error`` instead, so that it can be sent again elsewhere.
        """
        if self.ended:
            return
        if self.options.whole or not self.num_output_tokens:
            self.fail(error)
            return
        self.ended = True  # before its outputs end, so that they do not end it: ``_end`` counts them together
        now = monotonic()
        for index in range(self.num_outputs):
            if not (output := self.output(index)).finished:
                output.finish("abort", -1, now)
        self._end("abort")

    def _reserve_memory(self) -> None:
        """Reserve memory for the unread tokens and a few more. The request ends if there is not enough."""
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
            extra = about(self.request.request_id, self.request.traceparent)
            log.info("request %s is stopped: %s", self.request.request_id, error, extra=extra)
            self._error = error
            self._end("abort")
            self._changed.clear()

    def _release_memory(self) -> None:
        # The client has read all tokens for which more memory than that of the repeated prompts was reserved.
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
