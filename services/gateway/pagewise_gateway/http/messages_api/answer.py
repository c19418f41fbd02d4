"""The answer to a request for a message: its blocks, and the events that tell of them."""

from collections.abc import Iterator

import msgspec

from pagewise_gateway.generation import SequenceDelta
from pagewise_gateway.http.chat import ChatRun, finish_reason
from pagewise_gateway.http.errors import APIError
from pagewise_gateway.http.event_answer import EventAnswer, as_bytes, ended_early
from pagewise_gateway.http.messages_api.errors import error_detail
from pagewise_gateway.http.messages_api.schema import BlockDelta, Message, MessageEvent, MessageUsage, OutputBlock
from pagewise_gateway.http.responder import usage as usage_of
from pagewise_gateway.text.output_parsing import Delta

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageAnswer(EventAnswer):
    """Turns the output of a chat into a message: one JSON body, or events. Of what events tell nothing is kept."""

    def __init__(self, run: ChatRun, message_id: str) -> None:
        super().__init__(run)
        self._text: list[str] = []  # of the block that is open
        self._open: OutputBlock | None = None
        self._num_blocks = 0
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

    def _take(self, new: Delta) -> Iterator[MessageEvent]:
        if new.kind == "reasoning" and not self._run.body.include_reasoning:
            return
        text = new.text
        kind = {"content": "text", "reasoning": "thinking"}.get(new.kind, "tool_use")
        if new.kind == "call" or self._open is None or self._open.type != kind:
            yield from self._close()
            if self._num_blocks and new.kind != "call":
                text = text.removeprefix("\n")
            block = OutputBlock("tool_use", id=self._run.new_id(), name=text, input={})
            if kind == "text":
                block = OutputBlock("text", text="")
            elif kind == "thinking":
                block = OutputBlock("thinking", thinking="", signature="")
            self._num_blocks += 1
            if not self._streams:
                self._message.content.append(block)
            self._open, self._text = block, []
            yield MessageEvent("content_block_start", index=self._index, content_block=block)
        if new.kind == "call" or not text:
            return
        if not self._streams:
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

    @property
    def _index(self) -> int:
        return self._num_blocks - 1

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
