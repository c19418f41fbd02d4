"""``POST /v1/chat/completions``."""

import time
from contextlib import aclosing

import msgspec
from aiohttp import web
from msgspec import UNSET

from pagewise_gateway.generation import SequenceDelta
from pagewise_gateway.http.context import CLIENT, REQUEST_ID, Service
from pagewise_gateway.http.errors import InvalidRequestError
from pagewise_gateway.http.generate import Generations, Prompt, one_of
from pagewise_gateway.http.logprobs import chat_logprobs
from pagewise_gateway.http.params import (
    check_common,
    output_budget,
    sampling_params,
    truncated,
)
from pagewise_gateway.http.parsing import read_request
from pagewise_gateway.http.prompts import encode_chat
from pagewise_gateway.http.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatResponse,
)
from pagewise_gateway.http.schema import ChatRequest
from pagewise_gateway.http.sse import stream_events


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """Continue a conversation.

    Raises:
        APIError: the request is wrong, or cannot be served now.
        GenerationError: it failed before anything was answered.
    """
    service = request.app[Service.KEY]
    body = await read_request(request, ChatRequest)
    n = check_common(body, service.limits)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    capacity = service.require_capacity()
    sampling = sampling_params(
        body,
        service.tokenizer,
        capacity,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=None,
    )
    given = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    wanted: int | None = getattr(body, given)
    if wanted is not None and wanted < 1:
        raise InvalidRequestError(f"{given} must be at least 1", given)
    tokens = truncated(await encode_chat(service, body, capacity), body, wanted, capacity)
    budget = output_budget(body, wanted, None, len(tokens), capacity, prompt="messages", output=given)
    prompt = Prompt(tokens, budget)
    chat = _Chat(service, body, prompt, f"chatcmpl-{request[REQUEST_ID]}")
    with Generations(service.gateway, body, [prompt], sampling, n, request[REQUEST_ID], request[CLIENT]) as generations:
        if not body.stream:
            return await chat.answer(generations)
        return await stream_events(
            request, service, generations, lambda news: chat.chunks(news, generations), lambda: chat.last(generations)
        )


class _Chat:
    """How a chat completion is told."""

    def __init__(self, service: Service, body: ChatRequest, prompt: Prompt, completion_id: str) -> None:
        self._service = service
        self._body = body
        self._prompt_token_ids = list(prompt.tokens) if body.return_token_ids else UNSET
        self._id = completion_id
        self._created = int(time.time())
        self._started: set[int] = set()
        options = body.stream_options
        self._usage = bool(options and options.include_usage)
        self._continuous = bool(self._usage and options and options.continuous_usage_stats)

    def chunks(self, news: list[SequenceDelta], generations: Generations) -> list[object]:
        """The chunks that tell the news."""
        chunks: list[object] = []
        for delta in news:
            index = delta.index
            if index not in self._started:
                self._started.add(index)
                opening = ChatChunkChoice(index, ChatDelta("assistant", ""))
                chunk = self._chunk([opening], generations)
                chunk.prompt_token_ids = self._prompt_token_ids
                chunks.append(chunk)
            logprobs = self._logprobs(delta)
            token_ids = delta.token_ids if self._body.return_token_ids else UNSET
            # Tokens whose text is held back need no chunk, unless there is more to tell of them.
            if delta.text or logprobs is not None or token_ids:
                choice = ChatChunkChoice(index, ChatDelta(content=delta.text), logprobs, token_ids=token_ids)
                chunks.append(self._chunk([choice], generations))
            if delta.finish_reason is not None:
                ending = ChatChunkChoice(
                    index, ChatDelta(), finish_reason=delta.finish_reason, stop_reason=delta.stop_reason
                )
                chunks.append(self._chunk([ending], generations))
        return chunks

    def last(self, generations: Generations) -> list[object]:
        """The chunk with the usage, if it is wanted."""
        if not self._usage:
            return []
        chunk = self._chunk([], generations)
        chunk.usage = generations.usage()
        return [chunk]

    async def answer(self, generations: Generations) -> web.Response:
        """The whole, in one answer."""
        parts: list[list[SequenceDelta]] = [[] for _ in range(generations.n)]
        async with aclosing(generations.deltas()) as deltas:
            async for news in deltas:
                for delta in news:
                    parts[delta.index].append(delta)
        choices = []
        for delta in map(one_of, parts):
            choice = ChatChoice(
                delta.index,
                AssistantMessage(delta.text),
                self._logprobs(delta),
                delta.finish_reason,
                delta.stop_reason,
                delta.token_ids if self._body.return_token_ids else UNSET,
            )
            choices.append(choice)
        answer = ChatResponse(
            self._id,
            self._created,
            self._service.limits.model_name,
            choices,
            generations.usage(),
            prompt_token_ids=self._prompt_token_ids,
        )
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    def _chunk(self, choices: list[ChatChunkChoice], generations: Generations) -> ChatChunk:
        chunk = ChatChunk(self._id, self._created, self._service.limits.model_name, choices)
        if self._usage:
            chunk.usage = generations.usage() if self._continuous else None
        return chunk

    def _logprobs(self, delta: SequenceDelta) -> ChatLogprobs | None:
        if not self._body.logprobs or not delta.logprobs:
            return None
        return chat_logprobs(self._service.tokenizer, delta.logprobs)
