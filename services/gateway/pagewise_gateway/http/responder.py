"""What the responses of ``/v1/completions`` and ``/v1/chat/completions`` have in common."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar, cast

from aiohttp import web
from msgspec import Raw

from pagewise_gateway.generation import SequenceDelta
from pagewise_gateway.http.context import Service
from pagewise_gateway.http.generate import Generation
from pagewise_gateway.http.responses import ChatChunk, ChatResponse, CompletionResponse
from pagewise_gateway.http.schema import GenerationFields
from pagewise_gateway.http.sse import encode, event, stream_events

ChunkT = TypeVar("ChunkT", bound=ChatChunk | CompletionResponse)
ChoiceT = TypeVar("ChoiceT")
WholeT = TypeVar("WholeT")

_AT_A_TIME_SECONDS = 0.01
"""How long choices of a whole answer are made before others run: with log-probabilities, each may take 0.1 s."""


async def encoded_choices(choices: Iterable[WholeT]) -> list[WholeT]:
    """Return the choices of a whole answer as they are made, each encoded already. Others run in between."""
    encoded: list[Raw] = []
    began = time.monotonic()
    for choice in choices:
        encoded.append(Raw(encode(choice)))
        if time.monotonic() - began > _AT_A_TIME_SECONDS:
            await asyncio.sleep(0)
            began = time.monotonic()
    return cast("list[WholeT]", encoded)  # the encoder copies them into the answer


class Responder(ABC, Generic[ChunkT, ChoiceT]):
    """Turns what a generation brings into the response to its request: a stream of events, or one JSON body."""

    def __init__(
        self,
        chunk_type: Callable[[str, int, str, list[ChoiceT]], ChunkT],
        completion_id: str,
        service: Service,
        body: GenerationFields,
        generation: Generation,
        *,
        logprobs: bool,
    ) -> None:
        """``chunk_type`` makes a chunk of the stream from its id, creation time, model and choices. ``logprobs``:
        whether the client asked for log-probabilities."""
        self._chunk_type = chunk_type
        self._service, self._body, self._generation = service, body, generation
        self._id, self._created, self._model = completion_id, int(time.time()), service.limits.model_name
        options = body.stream_options
        self._usage_wanted = bool(options and options.include_usage)
        self._usage_in_every_chunk = bool(self._usage_wanted and options and options.continuous_usage_stats)
        # Most chunks carry nothing but text, and are made from a template.
        self._only_text = not (self._usage_in_every_chunk or body.return_token_ids or logprobs)

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Answer ``request`` with a stream of events if its body asks for one, else with one JSON body."""
        if self._body.stream:
            return await stream_events(request, self._generation, self.events, self.last)
        return web.Response(body=encode(await self.answer()), content_type="application/json")

    def events(self, news: list[SequenceDelta]) -> bytes:
        """Return the events for these deltas."""
        if len(news) == 1:
            return self._event(news[0])
        return b"".join([self._event(delta) for delta in news])

    def last(self) -> bytes:
        """Return the event with the token counts that ends a stream, or nothing if the client did not ask for it."""
        if not self._usage_wanted:
            return b""
        chunk = self._chunk([])
        chunk.usage = self._generation.usage()
        return event(chunk)

    @abstractmethod
    async def answer(self) -> ChatResponse | CompletionResponse:
        """Wait until all outputs have ended, and return the one body that has them all."""

    @abstractmethod
    def _event(self, delta: SequenceDelta) -> bytes:
        """Return the events for this delta; there may be none."""

    def _chunk(self, choices: list[ChoiceT]) -> ChunkT:
        """Return a chunk of the stream with these choices."""
        chunk = self._chunk_type(self._id, self._created, self._model, choices)
        if self._usage_wanted:  # then OpenAI's chunks have a usage of null, except for the last one
            chunk.usage = self._generation.usage() if self._usage_in_every_chunk else None
        return chunk
