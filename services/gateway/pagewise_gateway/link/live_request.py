"""A request that is being served, and the news that its client reads."""

import asyncio
import logging
from collections.abc import Callable
from time import monotonic

from pagewise_shared.protocol import FinishReason

from pagewise_gateway.generation import (
    AdmissionError,
    GenerationRequest,
    SequenceDelta,
    SlowReaderError,
)
from pagewise_gateway.link.output import LivePrompt, Output
from pagewise_gateway.metrics import Metrics
from pagewise_gateway.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MOST_UNREAD = 32_768
"""Entries (a token, or a candidate of one) per prompt that may wait for the client before its request is stopped."""


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
