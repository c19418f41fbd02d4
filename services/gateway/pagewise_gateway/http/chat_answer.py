"""The response to a chat completion."""

from collections.abc import Generator, Iterator
from typing import cast

from msgspec import UNSET

from pagewise_gateway.generation import SequenceDelta
from pagewise_gateway.http.chat_run import ChatRun
from pagewise_gateway.http.generate import usage
from pagewise_gateway.http.logprobs import chat_logprobs
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
from pagewise_gateway.http.sse import EventTemplate, event


class ChatAnswer(Responder[ChatChunk, ChatChunkChoice]):
    """The response whose content is the text of the output as it is."""

    def __init__(self, completion_id: str, run: ChatRun) -> None:
        body = run.body
        super().__init__(ChatChunk, completion_id, run.service, body, run.live, logprobs=bool(body.logprobs))
        self._logprobs_wanted = bool(body.logprobs)
        self._token_ids_wanted = bool(body.return_token_ids)
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._prompt_token_ids = list(run.live.request.prompts[0].token_ids) if body.return_token_ids else UNSET
        self._templates: dict[int, EventTemplate] = {}

    def _answer(self) -> ChatResponse:
        return ChatResponse(
            self._id, self._created, self._model, [], usage(self._live), prompt_token_ids=self._prompt_token_ids
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
            yield self._opening(index)
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

    def _opening(self, index: int) -> bytes:
        """Return the first event of an output."""
        chunk = self._chunk([ChatChunkChoice(index, ChatDelta("assistant", ""))])
        chunk.prompt_token_ids = self._prompt_token_ids
        return event(chunk)

    def _logprobs(self, delta: SequenceDelta) -> Generator[bytes, None, ChatLogprobs | None]:
        if not self._logprobs_wanted or delta.logprobs is None:
            return None
        return cast("ChatLogprobs", (yield from chat_logprobs(self._service.tokenizer, delta.logprobs, self._as_ids)))
