"""``POST /v1/chat/completions``."""

from collections.abc import Generator, Iterator
from typing import cast

from aiohttp import web
from msgspec import UNSET

from pagewise_gateway.generation import Prompt, SequenceDelta
from pagewise_gateway.http.answer_memory import AnswerSize
from pagewise_gateway.http.context import CLIENT, REQUEST_ID, Service
from pagewise_gateway.http.errors import InvalidRequestError
from pagewise_gateway.http.generate import Generation
from pagewise_gateway.http.logprobs import chat_logprobs
from pagewise_gateway.http.params import (
    check_common,
    check_priority,
    output_budget,
    sampling_params,
    truncated,
)
from pagewise_gateway.http.parsing import read_request
from pagewise_gateway.http.prompts import encode_bad_words, encode_chat
from pagewise_gateway.http.responder import Responder
from pagewise_gateway.http.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatResponse,
)
from pagewise_gateway.http.schema import ChatRequest, strip
from pagewise_gateway.http.segments import check_segments, prompt_segments
from pagewise_gateway.http.sse import EventTemplate, event
from pagewise_gateway.http.structured import request_grammar


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """Continue a conversation.

    Raises:
        APIError: the request is invalid, or cannot be served now.
        GenerationError: the request was not accepted, or failed before the response began.
    """
    service = request.app[Service.KEY]
    body, intake = await read_request(request, ChatRequest)
    n = check_common(body, service.limits)
    check_priority(body, request[CLIENT])
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    check_segments(body)
    capacity = await service.link.wait_for_capacity()
    sampling = sampling_params(
        body,
        service.tokenizer,
        capacity,
        bad_words=await encode_bad_words(service, body.bad_words or [], request[CLIENT].name),
        grammar=await request_grammar(service, body, capacity, request[CLIENT].name),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=None,
    )
    given = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    wanted: int | None = getattr(body, given)
    if wanted is not None and wanted < 1:
        raise InvalidRequestError(f"{given} must be at least 1", given)
    encoded = await encode_chat(service, body, capacity, request[CLIENT].name)
    tokens = truncated(encoded.tokens, body, wanted, capacity)
    size = AnswerSize.of(n, body.stream, service.answer_memory, logprobs=sampling.logprobs, echo=False, ids=False)
    default = size.default_tokens(len(tokens))
    budget = output_budget(body, wanted, default, len(tokens), capacity, prompt="messages", output=given)
    prompt = Prompt(tokens, budget, segments=prompt_segments(body, encoded))
    strip(body)
    intake.memory.release()
    prompt_bytes = size.reserve([prompt], intake.answer)
    with Generation(service.link, body, [prompt], sampling, n, request, intake, prompt_bytes) as generation:
        return await _Chat(f"chatcmpl-{request[REQUEST_ID]}", service, body, prompt, generation).respond(request)


class _Chat(Responder[ChatChunk, ChatChunkChoice]):
    """The response to a chat completion."""

    def __init__(
        self, completion_id: str, service: Service, body: ChatRequest, prompt: Prompt, generation: Generation
    ) -> None:
        super().__init__(ChatChunk, completion_id, service, body, generation, logprobs=bool(body.logprobs))
        self._logprobs_wanted = bool(body.logprobs)
        self._token_ids_wanted = bool(body.return_token_ids)
        self._prompt_token_ids = list(prompt.tokens) if body.return_token_ids else UNSET
        self._templates: dict[int, EventTemplate] = {}

    def _answer(self) -> ChatResponse:
        return ChatResponse(
            self._id, self._created, self._model, [], self._generation.usage(), prompt_token_ids=self._prompt_token_ids
        )

    def _whole_choice(self, delta: SequenceDelta) -> Generator[bytes, None, ChatChoice]:
        return ChatChoice(
            delta.index,
            AssistantMessage(delta.text),
            (yield from self._logprobs(delta)),
            delta.finish_reason,
            delta.stop_reason,
            delta.token_ids if self._token_ids_wanted else UNSET,
        )

    def _event(self, delta: SequenceDelta) -> bytes:
        template = self._templates.get(delta.index)
        if template is not None and self._only_text and delta.finish_reason is None:
            return template.event(delta.text) if delta.text else b""
        return b"".join(self._event_pieces(delta))

    def _event_pieces(self, delta: SequenceDelta) -> Iterator[bytes]:
        index = delta.index
        if index not in self._templates:
            self._templates[index] = EventTemplate(
                lambda text: self._chunk([ChatChunkChoice(index, ChatDelta(content=text))])
            )
            chunk = self._chunk([ChatChunkChoice(index, ChatDelta("assistant", ""))])
            chunk.prompt_token_ids = self._prompt_token_ids
            yield event(chunk)
        logprobs = yield from self._logprobs(delta)
        token_ids = delta.token_ids if self._token_ids_wanted else UNSET
        # Tokens whose text is held back get no chunk of their own, unless the client wants their ids or logprobs.
        if delta.text or logprobs is not None or token_ids:
            choice = ChatChunkChoice(index, ChatDelta(content=delta.text), logprobs, token_ids=token_ids)
            yield event(self._chunk([choice]))
        if delta.finish_reason is not None:
            ending = ChatChunkChoice(
                index, ChatDelta(), finish_reason=delta.finish_reason, stop_reason=delta.stop_reason
            )
            yield event(self._chunk([ending]))

    def _logprobs(self, delta: SequenceDelta) -> Generator[bytes, None, ChatLogprobs | None]:
        if not self._logprobs_wanted or delta.logprobs is None:
            return None
        return cast("ChatLogprobs", (yield from chat_logprobs(self._service.tokenizer, delta.logprobs)))
