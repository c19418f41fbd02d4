"""The answer to a request for a response: its items, and the events that tell of them."""

import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET

from pagewise_gateway.generation import SequenceDelta
from pagewise_gateway.http.chat_run import ChatRun
from pagewise_gateway.http.responses_api.schema import (
    IncompleteDetails,
    InputDetails,
    OutputDetails,
    OutputItem,
    OutputText,
    Response,
    ResponseEvent,
    ResponsesRequest,
    ResponseUsage,
)
from pagewise_gateway.http.sse import encode, stream_events
from pagewise_gateway.text.output_parsing import Delta

_KINDS = {"content": "message", "reasoning": "reasoning", "call": "function_call", "arguments": "function_call"}
_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ResponseAnswer:
    """Turns the output of a chat into a response: one JSON body, or events."""

    cheap = True
    end = b""

    def __init__(self, run: ChatRun, body: ResponsesRequest, response_id: str) -> None:
        self._run, self._body = run, body
        self._parser = run.parser()
        self._sequence = 0
        self._begun = False
        self._text: list[str] = []  # of the item that is open
        self._open: OutputItem | None = None
        self._response = Response(
            response_id,
            int(time.time()),
            body.model or run.service.limits.model_name,
            [],
            "in_progress",
            body.parallel_tool_calls is not False,
            msgspec.to_builtins(body.tool_choice) if body.tool_choice is not None else "auto",
            msgspec.to_builtins(body.tools or []),
            msgspec.to_builtins(body.text) if body.text and body.text.format else {"format": {"type": "text"}},
            msgspec.to_builtins(body.reasoning) if body.reasoning else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            temperature=body.temperature,
            top_p=body.top_p,
        )

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Answer ``request`` with a stream of events if its body asks for one, else with one JSON body."""
        if self._body.stream:
            return await stream_events(request, self._run.generation, self)
        for delta in await self._run.generation.outcome():
            for _ in self._events_of(delta):
                pass
        return web.Response(body=encode(self._response), content_type="application/json")

    # ---- for ``stream_events`` -----------------------------------------------------------------------

    def quick(self) -> bool:
        """All events are made at once."""
        return True

    def events(self, news: list[SequenceDelta]) -> bytes:
        """Return the events for these deltas."""
        return b"".join(
            b"event: %b\ndata: %b\n\n" % (event.type.encode(), encode(event))
            for delta in news
            for event in self._events_of(delta)
        )

    def pieces(self, news: Iterable[SequenceDelta]) -> Iterator[bytes]:
        """Yield the same."""
        yield self.events(list(news))

    def last(self) -> bytes:
        """The last event tells that the response is complete, so nothing is left."""
        return b""

    # ---- items ---------------------------------------------------------------------------------------

    def _events_of(self, delta: SequenceDelta) -> Iterator[ResponseEvent]:
        if not self._begun:
            self._begun = True
            yield self._event("response.created", response=self._response)
            yield self._event("response.in_progress", response=self._response)
        news = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            news += self._parser.finish()
        for new in news:
            yield from self._take(new)
        if delta.finish_reason is not None:
            yield from self._finish(delta.finish_reason)

    def _take(self, new: Delta) -> Iterator[ResponseEvent]:
        text, kind = new.text, _KINDS[new.kind]
        if new.kind == "call" or self._open is None or self._open.type != kind:
            yield from self._close("completed")
            if new.kind != "call":
                text = text.removeprefix("\n") if self._response.output else text
            yield from self._begin(kind, text)
        if new.kind == "call" or not text:
            return
        assert self._open is not None
        self._text.append(text)
        names = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
        fields: dict[str, Any] = {} if kind == "function_call" else {"content_index": 0}
        if kind == "message":
            fields["logprobs"] = []
        yield self._of_item(f"response.{names[kind]}.delta", delta=text, **fields)

    def _begin(self, kind: str, name: str) -> Iterator[ResponseEvent]:
        item = OutputItem(f"{_IDS[kind]}_{uuid.uuid4().hex}", kind)  # type: ignore[arg-type]
        if kind == "function_call":
            item.call_id, item.name, item.arguments = self._run.new_id(), name, ""
        else:
            item.content = []
            item.role = "assistant" if kind == "message" else UNSET
            item.summary = [] if kind == "reasoning" else UNSET
        self._response.output.append(item)
        self._open, self._text = item, []
        yield self._event("response.output_item.added", output_index=self._index, item=item)
        if kind != "function_call":
            yield self._of_item("response.content_part.added", content_index=0, part=self._part(""))

    def _close(self, status: str) -> Iterator[ResponseEvent]:
        item = self._open
        if item is None:
            return
        text, item.status = "".join(self._text), status
        if item.type == "function_call":
            item.arguments = text
            yield self._of_item("response.function_call_arguments.done", name=item.name, arguments=text)
        else:
            part = self._part(text)
            item.content = [part]
            name = "output_text" if item.type == "message" else "reasoning_text"
            fields: dict[str, Any] = {"logprobs": []} if item.type == "message" else {}
            yield self._of_item(f"response.{name}.done", content_index=0, text=text, **fields)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=self._index, item=item)
        self._open = None

    def _finish(self, reason: str) -> Iterator[ResponseEvent]:
        complete = reason == "stop"
        yield from self._close("completed" if complete else "incomplete")
        response, usage = self._response, self._run.generation.usage()
        response.status = "completed" if complete else "incomplete"
        if not complete:
            response.incomplete_details = IncompleteDetails("max_output_tokens" if reason == "length" else reason)
        response.usage = ResponseUsage(
            usage.prompt_tokens,
            InputDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputDetails(),
            usage.total_tokens,
        )
        yield self._event(f"response.{response.status}", response=response)

    @property
    def _index(self) -> int:
        return len(self._response.output) - 1

    def _part(self, text: str) -> OutputText:
        assert self._open is not None
        if self._open.type == "reasoning":
            return OutputText(text, "reasoning_text")
        return OutputText(text, annotations=[], logprobs=[])

    def _of_item(self, kind: str, **fields: Any) -> ResponseEvent:
        assert self._open is not None
        return self._event(kind, output_index=self._index, item_id=self._open.id, **fields)

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        self._sequence += 1
        return ResponseEvent(kind, self._sequence - 1, **fields)
