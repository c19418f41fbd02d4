"""The answer to a request for a response: its items, and the events of a stream of them."""

import time
import uuid
from collections.abc import Iterator, Mapping
from io import StringIO
from typing import Any, ClassVar

import msgspec
from aiohttp import web
from msgspec import UNSET

from pagewise_gateway.generation import SequenceDelta
from pagewise_gateway.http.chat import ChatRun
from pagewise_gateway.http.errors import APIError
from pagewise_gateway.http.event_answer import EventAnswer, as_bytes, ended_early
from pagewise_gateway.http.intake import UNCOUNTED_BYTES, Reservation
from pagewise_gateway.http.responder import usage as usage_of
from pagewise_gateway.http.responses_api import schema
from pagewise_gateway.http.writing import encode
from pagewise_gateway.text.output_parsing.deltas import DeltaKind

_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_DELTAS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
_FIELDS: dict[str, dict[str, Any]] = {
    "message": {"content_index": 0, "logprobs": []},
    "reasoning": {"content_index": 0},
    "function_call": {},
}
"""The fields that events of the text of an item have besides it, by the type of the item."""
_MOST_CHARACTER = 4
"""Bytes of a character, in a text that has any characters but those of ASCII."""
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""OpenAI's codes of failed responses by the status that the error would have had; others are server_error."""


def begun(response_id: str, model: str, body: schema.ResponsesRequest) -> tuple[schema.Response, int]:
    """Return the response to a request before it has any output, and the bytes of the fields that it repeats of the
    request.

    That is kept as JSON, because it lives as long as the response, and as objects it would take ten times as much.
    """
    choice = encode(body.tool_choice) if body.tool_choice is not None else b'"auto"'
    tools = encode(body.tools or [])
    text = encode(body.text) if body.text and body.text.format else b'{"format":{"type":"text"}}'
    instructions, metadata = encode(body.instructions), encode(body.metadata or {})
    response = schema.Response(
        response_id,
        int(time.time()),
        model,
        [],
        "in_progress",
        body.parallel_tool_calls is not False,
        msgspec.Raw(choice),
        msgspec.Raw(tools),
        msgspec.Raw(text),
        msgspec.Raw(encode(body.reasoning)),
        msgspec.Raw(instructions),
        msgspec.Raw(metadata),
        max_output_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
    )
    return response, sum(map(len, (choice, tools, text, instructions, metadata)))


class ResponseAnswer(EventAnswer):
    """Turns the output of a chat into a response: one JSON body, or events.

    The last event has all of the response, so a stream takes memory for the texts that it has sent.
    """

    kinds: ClassVar[Mapping[DeltaKind, str]] = {
        "content": "message",
        "reasoning": "reasoning",
        "call": "function_call",
        "arguments": "function_call",
    }

    def __init__(self, run: ChatRun, response: schema.Response, memory: Reservation) -> None:
        """``response``: as ``begun`` returns it. ``memory``: of answers, for the texts that a stream has sent."""
        super().__init__(run)
        self._memory, self._num_sent = memory, 0
        self._sequence = 0
        self._text = StringIO()  # of the item that is open
        self._open: schema.OutputItem | None = None
        self._response = response

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Answer ``request``, as ``EventAnswer`` does."""
        try:
            return await super().respond(request)
        finally:
            self._memory.release()

    def error(self, error: APIError) -> bytes:
        """Return the event that ends a stream which has failed."""
        return as_bytes(self._failed(error))

    def _begin(self) -> Iterator[schema.ResponseEvent]:
        yield self._event("response.created", response=self._response)
        yield self._event("response.in_progress", response=self._response)

    def _whole(self) -> schema.Response:
        return self._response

    # ---- items ---------------------------------------------------------------------------------------

    def _extend(self, kind: str, text: str) -> schema.ResponseEvent:
        self._keep(text)
        return self._of_item(f"response.{_DELTAS[kind]}.delta", delta=text, **_FIELDS[kind])

    def _keep(self, text: str) -> None:
        self._text.write(text)
        if self._run.body.stream:  # else the output counts
            self._num_sent += len(text) * (1 if text.isascii() else _MOST_CHARACTER)
            if self._num_sent > self._memory.size + UNCOUNTED_BYTES:
                self._memory.grow_to(self._num_sent)

    def _open_item(self, kind: str, name: str) -> Iterator[schema.ResponseEvent]:
        item = schema.OutputItem(f"{_IDS[kind]}_{uuid.uuid4().hex}", kind)  # type: ignore[arg-type]
        if kind == "function_call":
            item.call_id, item.name, item.arguments = self._run.new_id(), name, ""
        else:
            item.content = []
            item.role = "assistant" if kind == "message" else UNSET
            item.summary = [] if kind == "reasoning" else UNSET
        self._response.output.append(item)
        self._open, self._text = item, StringIO()
        yield self._event("response.output_item.added", output_index=self._index, item=item)
        if kind != "function_call":
            yield self._of_item("response.content_part.added", content_index=0, part=self._part(""))

    def _close(self, status: str = "completed") -> Iterator[schema.ResponseEvent]:
        item = self._open
        if item is None:
            return
        text, done = self._complete(item, status), f"response.{_DELTAS[item.type]}.done"
        if item.type == "function_call":
            yield self._of_item(done, name=item.name, arguments=text)
        else:
            yield self._of_item(done, text=text, **_FIELDS[item.type])
            yield self._of_item("response.content_part.done", content_index=0, part=self._part(text))
        yield self._event("response.output_item.done", output_index=self._index, item=item)
        self._open = None

    def _complete(self, item: schema.OutputItem, status: str) -> str:
        """Give the open item its text, which is returned."""
        text, item.status = self._text.getvalue(), status
        self._text = StringIO()
        if item.type == "function_call":
            item.arguments = text
        else:
            item.content = [self._part(text)]
        return text

    def _finish(self, delta: SequenceDelta) -> Iterator[schema.ResponseEvent]:
        if delta.finish_reason == "abort":
            yield self._failed(ended_early())
            return
        complete = delta.finish_reason == "stop"
        cut_off = self._open is not None and self._open.type == "function_call" and not self._parser.whole
        yield from self._close("completed" if complete and not cut_off else "incomplete")
        response = self._response
        response.status = "completed" if complete else "incomplete"
        if not complete:
            response.incomplete_details = schema.IncompleteDetails("max_output_tokens")
        response.usage = self._usage()
        yield self._event(f"response.{response.status}", response=response)

    def _failed(self, error: APIError) -> schema.ResponseEvent:
        """Return the last event of a response that has failed. No event says that the open item is done, because a
        client might call a function with arguments that are cut off."""
        response = self._response
        if self._open is not None:
            self._complete(self._open, "incomplete")
        response.status, response.usage = "failed", self._usage()
        response.error = schema.ResponseError(_CODES.get(error.status, "server_error"), str(error))
        return self._event("response.failed", response=response)

    def _usage(self) -> schema.ResponseUsage:
        usage = usage_of(self._run.live)
        return schema.ResponseUsage(
            usage.prompt_tokens,
            schema.InputDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            schema.OutputDetails(),
            usage.total_tokens,
        )

    @property
    def _index(self) -> int:
        return len(self._response.output) - 1

    def _part(self, text: str) -> schema.OutputText:
        assert self._open is not None
        if self._open.type == "reasoning":
            return schema.OutputText(text, "reasoning_text")
        return schema.OutputText(text, annotations=[], logprobs=[])

    def _of_item(self, kind: str, **fields: Any) -> schema.ResponseEvent:
        assert self._open is not None
        return self._event(kind, output_index=self._index, item_id=self._open.id, **fields)

    def _event(self, kind: str, **fields: Any) -> schema.ResponseEvent:
        self._sequence += 1
        return schema.ResponseEvent(kind, self._sequence - 1, **fields)
