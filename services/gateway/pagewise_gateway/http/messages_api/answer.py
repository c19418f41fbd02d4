"""The answer to a request for a message: its blocks, and the events that tell of them."""

from collections.abc import Iterable, Iterator

import msgspec
from aiohttp import web

from pagewise_gateway.generation import SequenceDelta
from pagewise_gateway.http.chat_run import ChatRun
from pagewise_gateway.http.messages_api.schema import BlockDelta, Message, MessageEvent, MessageUsage, OutputBlock
from pagewise_gateway.http.sse import encode, stream_events
from pagewise_gateway.text.output_parsing import Delta

_REASONS = {"stop": "end_turn", "length": "max_tokens", "abort": "end_turn"}


class MessageAnswer:
    """Turns the output of a chat into a message: one JSON body, or events."""

    cheap = True
    end = b""

    def __init__(self, run: ChatRun, message_id: str) -> None:
        self._run = run
        self._parser = run.parser()
        self._begun = False
        self._text: list[str] = []  # of the block that is open
        self._open: OutputBlock | None = None
        self._message = Message(message_id, run.body.model or run.service.limits.model_name, [], MessageUsage(0, 0))

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Answer ``request`` with a stream of events if its body asks for one, else with one JSON body."""
        if self._run.body.stream:
            return await stream_events(request, self._run.generation, self)
        for delta in await self._run.generation.outcome():
            for _ in self._events_of(delta):
                pass
        return web.Response(body=encode(self._message), content_type="application/json")

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
        """The last event tells that the message is complete, so nothing is left."""
        return b""

    # ---- blocks --------------------------------------------------------------------------------------

    def _events_of(self, delta: SequenceDelta) -> Iterator[MessageEvent]:
        if not self._begun:
            self._begun = True
            self._message.usage = self._usage()
            yield MessageEvent("message_start", message=self._message)
        news = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            news += self._parser.finish()
        for new in news:
            if new.kind != "reasoning" or self._run.body.include_reasoning:
                yield from self._take(new)
        if delta.finish_reason is not None:
            yield from self._finish(delta)

    def _take(self, new: Delta) -> Iterator[MessageEvent]:
        text = new.text
        kind = {"content": "text", "reasoning": "thinking"}.get(new.kind, "tool_use")
        if new.kind == "call" or self._open is None or self._open.type != kind:
            yield from self._close()
            if self._message.content and new.kind != "call":
                text = text.removeprefix("\n")
            block = OutputBlock("tool_use", id=self._run.new_id(), name=text, input={})
            if kind == "text":
                block = OutputBlock("text", text="")
            elif kind == "thinking":
                block = OutputBlock("thinking", thinking="", signature="")
            self._message.content.append(block)
            self._open, self._text = block, []
            yield MessageEvent("content_block_start", index=self._index, content_block=block)
        if new.kind == "call" or not text:
            return
        self._text.append(text)
        delta = BlockDelta("input_json_delta", partial_json=text)
        if kind == "text":
            delta = BlockDelta("text_delta", text=text)
        elif kind == "thinking":
            delta = BlockDelta("thinking_delta", thinking=text)
        yield MessageEvent("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> Iterator[MessageEvent]:
        block = self._open
        if block is None:
            return
        text, self._open = "".join(self._text), None
        if block.type == "text":
            block.text = text
        elif block.type == "thinking":
            block.thinking = text
        else:
            block.input = _input(text)
        yield MessageEvent("content_block_stop", index=self._index)

    def _finish(self, delta: SequenceDelta) -> Iterator[MessageEvent]:
        yield from self._close()
        message, reason = self._message, _REASONS.get(delta.finish_reason or "", "end_turn")
        if delta.finish_reason == "stop" and self._parser.num_calls:
            reason = "tool_use"
        elif isinstance(delta.stop_reason, str):
            reason, message.stop_sequence = "stop_sequence", delta.stop_reason
        message.stop_reason, message.usage = reason, self._usage()
        ending = BlockDelta(stop_reason=reason, stop_sequence=message.stop_sequence)
        yield MessageEvent("message_delta", delta=ending, usage=message.usage)
        yield MessageEvent("message_stop")

    @property
    def _index(self) -> int:
        return len(self._message.content) - 1

    def _usage(self) -> MessageUsage:
        usage = self._run.generation.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)


def _input(arguments: str) -> dict[str, object]:
    """The arguments of a call as an object. If they were cut off there is none; streams have the text of them."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {}
