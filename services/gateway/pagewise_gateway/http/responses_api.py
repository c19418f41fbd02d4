"""``POST /v1/responses`` of OpenAI's Responses API: its answers, made of the answers of chats."""

import logging
import time
import uuid
from collections.abc import Iterator, Mapping
from functools import cache
from io import StringIO
from typing import Any, ClassVar

from aiohttp import web
from msgspec import UNSET, Raw
from pagewise_shared.config.sampling_defaults import SamplingDefaults

from pagewise_gateway.generation import SequenceDelta
from pagewise_gateway.http import responses_schema as schema
from pagewise_gateway.http.answers import ChatRun
from pagewise_gateway.http.answers import usage as usage_of
from pagewise_gateway.http.chat import run_chat
from pagewise_gateway.http.context import CLIENT, REQUEST_ID, Service
from pagewise_gateway.http.errors import APIError, InvalidRequestError
from pagewise_gateway.http.event_answers import EventAnswer, as_bytes, ended_early
from pagewise_gateway.http.intake import UNCOUNTED_BYTES, Reservation
from pagewise_gateway.http.parsing import read_request
from pagewise_gateway.http.responses_request import FIELD_NAMES, chat_request, drop_other_tools
from pagewise_gateway.http.writing import encode
from pagewise_gateway.text.output_parsing.deltas import Delta, DeltaKind

log = logging.getLogger(__name__)


async def create_response(request: web.Request) -> web.StreamResponse:
    """Continue a conversation that consists of items.

    Raises:
        APIError: the request is invalid, or cannot be served now.
        GenerationError: the request was not accepted, or failed before the response began.
    """
    service, key = request.app[Service.KEY], request[CLIENT].name
    body, intake = await read_request(request, schema.ResponsesRequest)
    for kind in drop_other_tools(body):
        _warn_once(kind)
        service.metrics.requests_without_tools(kind).inc()
    chat = chat_request(body)
    model = body.model or service.limits.model_name
    response, num_bytes = new_response(f"resp_{request[REQUEST_ID]}", model, body, service.generation.defaults)
    del body  # this frame lives until the response has ended
    try:
        return await run_chat(
            request,
            chat,
            intake,
            lambda run: ResponseAnswer(run, response, Reservation(service.answer_memory, key)),
            repeated=num_bytes,
        )
    except InvalidRequestError as error:
        error.rename(FIELD_NAMES)
        raise


@cache
def _warn_once(kind: str) -> None:
    log.warning("tools of type %s are left out of requests that have functions, too", kind)


_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_DELTAS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
_FIELDS: dict[str, dict[str, Any]] = {
    "message": {"content_index": 0, "logprobs": []},
    "reasoning": {"content_index": 0},
    "function_call": {},
}
"""Type of an item -> the fields that the events of its text have besides the text."""
_CHARACTER_BYTES = 4
"""The most bytes of a character in a text that is not ASCII."""
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""HTTP status of an error -> OpenAI's code of the failed response; others are server_error."""


def new_response(
    response_id: str, model: str, body: schema.ResponsesRequest, defaults: SamplingDefaults
) -> tuple[schema.Response, int]:
    """Return the response to a request before it has any output, and the bytes of the fields that it repeats of the
    request. ``defaults``: values for parameters that it does not give.

    These fields are kept as JSON, because they live as long as the response, and objects would take ten times as much.
    """
    choice = encode(body.tool_choice) if body.tool_choice is not None else b'"auto"'
    text = encode(body.text) if body.text and body.text.format else b'{"format":{"type":"text"}}'
    tools, instructions, metadata = encode(body.tools or []), encode(body.instructions), encode(body.metadata or {})
    response = schema.Response(
        response_id,
        int(time.time()),
        model,
        [],
        "in_progress",
        body.parallel_tool_calls is not False,
        Raw(choice),
        Raw(tools),
        Raw(text),
        Raw(encode(body.reasoning)),
        Raw(instructions),
        Raw(metadata),
        max_output_tokens=body.max_output_tokens,
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
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
        """``response``: as ``new_response`` returns it. ``memory``: for the texts that a stream has sent."""
        super().__init__(run)
        self._memory, self._num_sent = memory, 0
        self._sequence = 0
        self._text = StringIO()  # of the item that is open
        self._open: schema.OutputItem | None = None
        self._response = response

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Answer ``request`` with a stream of events if its body asks for one, else with one JSON body."""
        try:
            return await super().respond(request)
        finally:
            self._memory.release()

    def error(self, error: APIError) -> bytes:
        """Return the event that ends a stream which has failed."""
        begin = () if self._begun else self._begin()  # a stream may have begun with a comment only
        return b"".join(as_bytes(one) for one in (*begin, self._failed(error)))

    def _begin(self) -> Iterator[schema.ResponseEvent]:
        yield self._event("response.created", response=self._response)
        yield self._event("response.in_progress", response=self._response)

    def _response_body(self) -> schema.Response:
        return self._response

    def _extend(self, kind: str, text: str) -> schema.ResponseEvent:
        self._text.write(text)
        if self._body.stream:  # else the output counts
            self._num_sent += len(text) * (1 if text.isascii() else _CHARACTER_BYTES)
            if self._num_sent > self._memory.size + UNCOUNTED_BYTES:
                self._memory.grow_to(self._num_sent)
        return self._of_item(f"response.{_DELTAS[kind]}.delta", delta=text, **_FIELDS[kind])

    def _open_item(self, kind: str, new: Delta) -> Iterator[schema.ResponseEvent]:
        item = schema.OutputItem(f"{_IDS[kind]}_{uuid.uuid4().hex}", kind)  # type: ignore[arg-type]
        if kind == "function_call":
            item.call_id, item.name, item.arguments = self._run.call_id(new.call_id), new.text, ""
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
        """Set the text of the open item, and return it."""
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
        """Return the last event of a response that has failed. The open item gets no event of its end, because a client
        might call a function with arguments that are cut off."""
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
