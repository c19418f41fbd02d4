"""The response to a chat completion whose outputs are parsed into reasoning, content and tool calls."""

from collections.abc import Generator, Iterator

from msgspec import UNSET

from pagewise_gateway.generation import SequenceDelta
from pagewise_gateway.http.chat_answer import ChatAnswer
from pagewise_gateway.http.chat_run import ChatRun, cut, finish_reason
from pagewise_gateway.http.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    FunctionCall,
    FunctionCallDelta,
    ToolCall,
    ToolCallDelta,
)
from pagewise_gateway.http.sse import EventTemplate, event
from pagewise_gateway.text.output_parsing import Delta, MessageParser, joined


class ParsedAnswer(ChatAnswer):
    """The response whose message is parsed from the text of the output."""

    def __init__(self, completion_id: str, run: ChatRun) -> None:
        super().__init__(completion_id, run)
        self._run = run
        self._reasoning = run.parsing is None or run.parsing.reasoning
        self._outputs: dict[int, _Output] = {}

    @property
    def cheap(self) -> bool:
        """Parsing takes too long for what a client has left unread for long."""
        return False

    def _whole_choice(self, delta: SequenceDelta) -> Generator[bytes, None, ChatChoice]:
        parser = self._run.parser()
        news: list[Delta] = []
        for text in cut(delta.text):
            news += parser.push(text)
            yield b""
        parsed = joined([*news, *parser.finish()])
        reasoning = parsed.reasoning or None if self._reasoning else UNSET
        message = AssistantMessage(
            parsed.content or (None if parsed.calls or parsed.reasoning else ""),
            reasoning=reasoning,
            reasoning_content=reasoning,
        )
        if parsed.calls:
            message.tool_calls = [
                ToolCall(self._run.new_id(), FunctionCall(call.name, call.arguments)) for call in parsed.calls
            ]
        return ChatChoice(
            delta.index,
            message,
            (yield from self._logprobs(delta)),
            finish_reason(delta, parser),
            delta.stop_reason,
            delta.token_ids if self._token_ids_wanted else UNSET,
        )

    def _event(self, delta: SequenceDelta) -> bytes:
        output = self._outputs.get(delta.index)
        if output is None or not self._only_text or delta.finish_reason is not None:
            return b"".join(self._event_pieces(delta))
        if not delta.text:
            return b""
        return b"".join([self._delta_event(delta.index, output, new) for new in output.parser.push(delta.text)])

    def _event_pieces(self, delta: SequenceDelta) -> Iterator[bytes]:
        index = delta.index
        if (output := self._outputs.get(index)) is None:
            output = self._outputs[index] = _Output(self._run.parser())
            yield self._opening(index)
        logprobs = yield from self._logprobs(delta)
        token_ids = delta.token_ids if self._token_ids_wanted else UNSET
        if (
            logprobs is not None or token_ids
        ):  # they belong to no piece of the message, so they have a chunk of their own
            yield event(self._chunk([ChatChunkChoice(index, ChatDelta(), logprobs, token_ids=token_ids)]))
        for text in cut(delta.text):
            for new in output.parser.push(text):
                yield self._delta_event(index, output, new)
        if delta.finish_reason is not None:
            for new in output.parser.finish():
                yield self._delta_event(index, output, new)
            reason = finish_reason(delta, output.parser)
            ending = ChatChunkChoice(index, ChatDelta(), finish_reason=reason, stop_reason=delta.stop_reason)
            yield event(self._chunk([ending]))

    def _delta_event(self, index: int, output: "_Output", new: Delta) -> bytes:
        """Return the event for a piece of the message; nothing if the client does not want it."""
        if new.kind == "call":
            output.calls += 1
            output.templates.pop("arguments", None)
            called = FunctionCallDelta(new.text, "")
            call = ToolCallDelta(output.calls - 1, called, self._run.new_id(), "function")
            return event(self._chunk([ChatChunkChoice(index, ChatDelta(tool_calls=[call]))]))
        if new.kind == "reasoning" and not self._reasoning:
            return b""
        if not self._only_text:
            return event(self._piece(index, output, new))
        if (template := output.templates.get(new.kind)) is None:
            template = EventTemplate(lambda text: self._piece(index, output, Delta(new.kind, text)))
            output.templates[new.kind] = template
        return template.event(new.text)

    def _piece(self, index: int, output: "_Output", new: Delta) -> ChatChunk:
        if new.kind == "content":
            delta = ChatDelta(content=new.text)
        elif new.kind == "reasoning":
            delta = ChatDelta(reasoning=new.text, reasoning_content=new.text)
        else:
            delta = ChatDelta(tool_calls=[ToolCallDelta(output.calls - 1, FunctionCallDelta(arguments=new.text))])
        return self._chunk([ChatChunkChoice(index, delta)])


class _Output:
    """One output of a stream. ``calls``: how many were told to the client. ``templates``: of events, by what is new."""

    __slots__ = ("calls", "parser", "templates")

    def __init__(self, parser: MessageParser) -> None:
        self.parser = parser
        self.calls = 0
        self.templates: dict[str, EventTemplate] = {}
