"""A Gateway in memory: it generates by repeating the prompt."""

import asyncio
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from pagewise_gateway.core.inspection import MemoryReport, RequestReport
from pagewise_gateway.generation import (
    AdmissionError,
    Capacity,
    GenerationError,
    GenerationRequest,
    GenerationStats,
    SequenceDelta,
)
from pagewise_gateway.text.detokenizer import IncrementalDetokenizer
from pagewise_gateway.text.tokenizer import Tokenizer
from pagewise_shared.protocol import TokenLogprobs


@dataclass
class FakeGateway:
    """Sequence j of a request yields the prompt's tokens over and over, from the j-th on.

    Fields:
        model: what is ready; None: nothing yet.
        refuse: what ``submit`` raises. refuse_after: requests taken before it does.
        fail_after, crash_after: tokens after which a stream raises GenerationError, or something unforeseen.
        step_seconds: time between two deltas. tokens_per_delta: how many come at once.
        requests: what was submitted. running: streams that neither ended nor were aborted.
    """

    tokenizer: Tokenizer
    model: Capacity | None = field(default_factory=lambda: Capacity(1, 512, 400))
    refuse: AdmissionError | None = None
    refuse_after: int = 0
    fail_after: int | None = None
    crash_after: int | None = None
    step_seconds: float = 0.0
    tokens_per_delta: int = 1
    requests: list[GenerationRequest] = field(default_factory=list)
    running: set["FakeStream"] = field(default_factory=set)
    aborted: int = 0

    def capacity(self) -> Capacity | None:
        return self.model

    def submit(self, request: GenerationRequest) -> "FakeStream":
        if self.refuse is not None and len(self.requests) >= self.refuse_after:
            raise self.refuse
        assert request.prompt_token_ids.typecode == "i"
        assert request.request_id not in {known.request_id for known in self.requests}
        self.requests.append(request)
        stream = FakeStream(self, request)
        self.running.add(stream)
        return stream

    def memory_reports(self, limit: int) -> list[MemoryReport]:
        return []

    def request_report(self, request_id: str, limit: int) -> RequestReport | None:
        return None

    @property
    def last(self) -> GenerationRequest:
        return self.requests[-1]

    async def until_idle(self) -> None:
        """Wait until nothing runs any more."""
        async with asyncio.timeout(10):
            while self.running:
                await asyncio.sleep(0.005)


class FakeStream:
    def __init__(self, gateway: FakeGateway, request: GenerationRequest) -> None:
        self.stats = GenerationStats(prompt_tokens=len(request.prompt_token_ids), cached_tokens=1)
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.gateway, self.request = gateway, request
        if (wanted := request.sampling.prompt_logprobs) is not None:
            prompt = request.prompt_token_ids
            self.prompt_logprobs = [logprobs_of(token, i, wanted) for i, token in enumerate(prompt) if i]

    @property
    def num_drawn_tokens(self) -> int:
        return self.stats.output_tokens

    def abort(self) -> None:
        if self in self.gateway.running:
            self.gateway.running.discard(self)
            self.gateway.aborted += 1

    async def __aiter__(self) -> AsyncIterator[list[SequenceDelta]]:
        request, gateway = self.request, self.gateway
        texts = [
            IncrementalDetokenizer(
                gateway.tokenizer,
                request.prompt_token_ids,
                request.skip_special_tokens,
                request.stop,
                request.include_stop_str_in_output,
            )
            for _ in range(request.n)
        ]
        unfinished = set(range(request.n))
        if request.max_tokens == 0:
            self.gateway.running.discard(self)
            yield [SequenceDelta(i, "", [], finish_reason="length") for i in unfinished]
            return
        for position in range(request.max_tokens):
            if gateway.step_seconds and position % gateway.tokens_per_delta == 0:
                await asyncio.sleep(gateway.step_seconds)
            if position == gateway.fail_after:
                raise GenerationError("the executor caught fire")
            if position == gateway.crash_after:
                raise RuntimeError("a secret that clients must not see")
            deltas = [self._step(i, position, texts[i]) for i in sorted(unfinished)]
            unfinished -= {delta.index for delta in deltas if delta.finish_reason}
            if not unfinished:
                gateway.running.discard(self)
            yield deltas
            if not unfinished:
                return

    def _step(self, index: int, position: int, text: IncrementalDetokenizer) -> SequenceDelta:
        request = self.request
        prompt: array[int] = request.prompt_token_ids
        token = prompt[(position + index) % len(prompt)]
        self.stats.output_tokens += 1
        wanted = request.sampling.logprobs
        delta = SequenceDelta(index, "", [token], [] if wanted is None else [logprobs_of(token, 0, wanted)])
        if token in request.sampling.stop_token_ids and position >= request.sampling.min_tokens:
            delta.finish_reason = "stop"
            delta.stop_reason = None if token in self.gateway.tokenizer.eos_token_ids else token
        else:
            delta.text = text.push([token])
            if text.stopped_by is not None:
                delta.finish_reason, delta.stop_reason = "stop", text.stopped_by
            elif position + 1 == request.max_tokens:
                delta.finish_reason = "length"
        if delta.finish_reason is not None:
            delta.text += text.finish()
        return delta


def logprobs_of(token: int, index: int, wanted: int) -> TokenLogprobs:
    """The token itself is always the second best."""
    tops = [(token + 1, -0.25), (token, -0.5), *((token + i, -float("inf")) for i in range(2, 20))][:wanted]
    return TokenLogprobs(index, token, -0.5, 2, tuple(i for i, _ in tops), tuple(p for _, p in tops))
