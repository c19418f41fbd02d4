"""Runs the generations of one HTTP request: submits them, merges their streams, and writes server-sent events."""

import asyncio
import uuid
from array import array
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from time import monotonic

import msgspec
from aiohttp import web
from pagewise_shared.sampling import SamplingParams

from pagewise_scheduler.generation import (
    AdmissionError,
    Gateway,
    GenerationError,
    GenerationRequest,
    GenerationStats,
    GenerationStream,
    SequenceDelta,
)
from pagewise_scheduler.http.errors import APIError, from_admission
from pagewise_scheduler.http.params import stop_texts
from pagewise_scheduler.http.schema import GenerationFields
from pagewise_scheduler.metrics import Metrics

DONE = b"data: [DONE]\n\n"


@dataclass(slots=True, frozen=True)
class Prompt:
    """One prompt of a request: its tokens, and its text if the client sent text."""

    tokens: "array[int]"
    max_tokens: int
    text: str | None = None


@dataclass(slots=True, frozen=True)
class ChoiceDelta:
    """A sequence's news, with the prompt it belongs to and the choice's index in the response."""

    prompt: int
    choice: int
    delta: SequenceDelta


class Generations:
    """The running generations of one HTTP request, one per prompt. Leaving the context aborts what still runs."""

    def __init__(
        self,
        gateway: Gateway,
        body: GenerationFields,
        prompts: list[Prompt],
        sampling: SamplingParams,
        n: int,
        request_id: str,
    ) -> None:
        self._gateway = gateway
        self._prompts = prompts
        self._n = n
        self.streams: list[GenerationStream] = []
        self._requests = [
            GenerationRequest(
                request_id=f"{request_id}-{uuid.uuid4().hex[:8]}",
                prompt_token_ids=prompt.tokens,
                max_tokens=prompt.max_tokens,
                sampling=sampling,
                n=n,
                stop=stop_texts(body),
                include_stop_str_in_output=bool(body.include_stop_str_in_output),
                skip_special_tokens=body.skip_special_tokens is not False,
                priority=body.priority or 0,
                arrival_time=monotonic(),
            )
            for prompt in prompts
        ]

    def __enter__(self) -> "Generations":
        try:
            for request in self._requests:
                self.streams.append(self._gateway.submit(request))
        except AdmissionError as error:
            self.__exit__()
            raise from_admission(error) from error
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self.streams:
            stream.abort()

    async def deltas(self) -> AsyncGenerator[list[ChoiceDelta], None]:
        """News of all choices as they come, several at once where several have come.

        Raises:
            GenerationError: one of the generations failed.
        """
        if len(self.streams) == 1:
            async for deltas in self.streams[0]:
                yield [ChoiceDelta(0, delta.index, delta) for delta in deltas]
            return
        news: asyncio.Queue[list[ChoiceDelta] | BaseException | None] = asyncio.Queue()

        async def follow(number: int, stream: GenerationStream) -> None:
            try:
                async for deltas in stream:
                    news.put_nowait([ChoiceDelta(number, number * self._n + d.index, d) for d in deltas])
            except GenerationError as error:
                news.put_nowait(error)
            else:
                news.put_nowait(None)

        tasks = [asyncio.create_task(follow(number, stream)) for number, stream in enumerate(self.streams)]
        try:
            running = len(tasks)
            while running:
                item = await news.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()

    def usage(self) -> dict[str, object]:
        """Token counts so far, in OpenAI's shape."""
        return usage_of(stream.stats for stream in self.streams)


def usage_of(stats: Iterable[GenerationStats]) -> dict[str, object]:
    """Token counts in OpenAI's shape."""
    every = list(stats)
    prompt = sum(s.prompt_tokens for s in every)
    output = sum(s.output_tokens for s in every)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(s.cached_tokens for s in every)},
    }


@dataclass(slots=True)
class EventWriter:
    """Server-sent events to one client. A client that stops reading is cut off after ``patience`` seconds."""

    request: web.Request
    response: web.StreamResponse
    metrics: Metrics
    patience: float

    async def send(self, events: Iterable[object]) -> None:
        """Write events in one go.

        Raises:
            ConnectionError: the client is gone, or reads too slowly.
        """
        data = b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events)
        if data:
            await self.write(data)

    async def write(self, data: bytes) -> None:
        """Write raw bytes, under the same rule."""
        try:
            await asyncio.wait_for(self.response.write(data), self.patience)
        except TimeoutError as error:
            self.metrics.slow_readers.inc()
            if self.request.transport is not None:
                self.request.transport.abort()
            raise ConnectionResetError("the client stopped reading") from error


async def stream_events(
    request: web.Request,
    generations: Generations,
    metrics: Metrics,
    patience: float,
    headers: dict[str, str],
    first: Callable[[], list[object]],
    chunks: Callable[[list[ChoiceDelta]], list[object]],
    last: Callable[[], list[object]],
) -> web.StreamResponse:
    """Answer with a stream: ``first`` events, ``chunks`` of each piece of news, ``last`` events, ``[DONE]``.

    The response starts with the first news, so that a request that fails at once still gets a proper status.
    """
    response = web.StreamResponse(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"} | headers)
    response.content_type = "text/event-stream"
    response.charset = "utf-8"
    writer = EventWriter(request, response, metrics, patience)
    started = False
    try:
        async with aclosing(generations.deltas()) as news:
            async for deltas in news:
                events = chunks(deltas)
                if not started:
                    started = True
                    await response.prepare(request)
                    events = first() + events
                await writer.send(events)
    except GenerationError as error:
        failure = APIError(str(error))
        if not started:
            raise failure from error
        await writer.write(b"data: " + failure.body() + b"\n\n")
        await response.write_eof()
        return response
    if not started:
        await response.prepare(request)
        await writer.send(first())
    await writer.send(last())
    await writer.write(DONE)
    await response.write_eof()
    return response
