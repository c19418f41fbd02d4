"""The answer to a request for a message: its blocks, and the events of a stream of them."""

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

import msgspec

from pagewise_gateway.generation import SequenceDelta
from pagewise_gateway.http.chat import ChatRun, finish_reason
from pagewise_gateway.http.errors import APIError
from pagewise_gateway.http.event_answer import Event, EventAnswer, as_bytes, ended_early
from pagewise_gateway.http.messages_api.errors import error_detail
from pagewise_gateway.http.messages_api.schema import BlockDelta, Message, MessageEvent, MessageUsage, OutputBlock
from pagewise_gateway.http.responder import usage as usage_of
from pagewise_gateway.text.output_parsing import Delta
from pagewise_gateway.text.output_parsing.deltas import DeltaKind

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_EMPTY: dict[str, dict[str, str]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {},
}
"""The texts that a block of each type begins with."""
_DELTAS: dict[str, tuple[Literal["text_delta", "thinking_delta", "input_json_delta"], str]] = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""The type of the delta that continues a block of each type, and the field of its text."""


class MessageAnswer(EventAnswer):
    """Turns the output of a chat into a message: one JSON body, or events, whose texts are not kept."""

    kinds: ClassVar[Mapping[DeltaKind, str]] = {
        "content": "text",
        "reasoning": "thinking",
        "call": "tool_use",
        "arguments": "tool_use",
    }

    def __init__(self, run: ChatRun, message_id: str) -> None:
        super().__init__(run)
        self._text: list[str] = []  # of the block that is open
        self._open: OutputBlock | None = None
        self._streams = bool(run.body.stream)
        self._message = Message(message_id, run.body.model or run.service.limits.model_name, [], MessageUsage(0, 0))

    def error(self, error: APIError) -> bytes:
        """Return the event that ends a stream which has failed."""
        return as_bytes(MessageEvent("error", error=error_detail(error)))

    def _begin(self) -> Iterator[MessageEvent]:
        self._message.usage = self._usage()
        yield MessageEvent("message_start", message=self._message)

    def _whole(self) -> Message:
        return self._message

    def _take(self, new: Delta) -> Iterator[Event]:
        if new.kind != "reasoning" or self._run.body.include_reasoning:
            yield from super()._take(new)

    def _open_item(self, kind: str, name: str) -> Iterator[MessageEvent]:
        block = OutputBlock(kind, **_EMPTY[kind])  # type: ignore[arg-type]
        if kind == "tool_use":
            block.id, block.name, block.input = self._run.new_id(), name, {}
        if not self._streams:
            self._message.content.append(block)
        self._open, self._text = block, []
        yield MessageEvent("content_block_start", index=self._num_items - 1, content_block=block)

    def _extend(self, kind: str, text: str) -> MessageEvent:
        if not self._streams:
            self._text.append(text)
        delta, field = _DELTAS[kind]
        return MessageEvent("content_block_delta", index=self._num_items - 1, delta=BlockDelta(delta, **{field: text}))

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
        yield MessageEvent("content_block_stop", index=self._num_items - 1)

    def _finish(self, delta: SequenceDelta) -> Iterator[MessageEvent]:
        if delta.finish_reason == "abort":  # there is no such reason here, and the message is not complete
            yield MessageEvent("error", error=error_detail(ended_early()))
            return
        yield from self._close()
        message, reason = self._message, finish_reason(delta, self._parser) or ""
        message.stop_reason, message.usage = _REASONS.get(reason, "end_turn"), self._usage()
        if reason == "stop" and isinstance(delta.stop_reason, str):
            message.stop_reason, message.stop_sequence = "stop_sequence", delta.stop_reason
        ending = BlockDelta(stop_reason=message.stop_reason, stop_sequence=message.stop_sequence)
        yield MessageEvent("message_delta", delta=ending, usage=message.usage)
        yield MessageEvent("message_stop")

    def _usage(self) -> MessageUsage:
        usage = usage_of(self._run.live)
        cached = usage.prompt_tokens_details.cached_tokens
        return MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)


def _input(arguments: str) -> dict[str, object]:
    """The arguments of a call as an object. If they were cut off there is none; streams have the text of them."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {}
