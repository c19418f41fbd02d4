"""Checks conversations, turns them into the input of a chat template, and says how their outputs are parsed."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from pagewise_shared.config import GatewayConfig
from pagewise_shared.errors import ConfigError

from pagewise_gateway.http.errors import APIError, InvalidRequestError
from pagewise_gateway.http.schema import (
    MAX_TEMPLATE_KWARGS_DEPTH,
    ChatMessage,
    ChatRequest,
    NamedToolChoice,
    TokenizeRequest,
    Tool,
)
from pagewise_gateway.text.output_parsing import MessageParser, OutputFormat, Start, Tools, make_format
from pagewise_gateway.text.template import RESERVED_NAMES, Dialect
from pagewise_gateway.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_OF_ASSISTANT = ("tool_calls", "reasoning", "reasoning_content")


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Check that each message has what its role needs, and nothing that belongs to another role.

    Raises:
        InvalidRequestError: one has not.
    """
    for number, message in enumerate(messages):
        place = f"messages[{number}]"
        if message.role != "assistant":
            for name in _OF_ASSISTANT:
                if getattr(message, name):
                    raise InvalidRequestError(
                        f"{place}.{name} is only for messages of the assistant", f"{place}.{name}"
                    )
            if message.content is None:
                raise InvalidRequestError(f"{place}.content is required", f"{place}.content")
        if message.role == "tool" and message.tool_call_id is None:
            raise InvalidRequestError(
                f"{place}.tool_call_id is required: the id of the call that the message answers",
                f"{place}.tool_call_id",
            )
        if message.role != "tool" and message.tool_call_id is not None:
            raise InvalidRequestError(
                f"{place}.tool_call_id is only for messages of role tool", f"{place}.tool_call_id"
            )


def check_depth(value: Any, name: str) -> None:
    """Check that JSON of a client is not nested so deeply that a template could not render it.

    Raises:
        InvalidRequestError: it is.
    """
    level: list[Any] = [value] if value else []
    for _ in range(MAX_TEMPLATE_KWARGS_DEPTH):
        if not level:
            return
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
    if level:
        raise InvalidRequestError(
            f"{name} is nested too deeply, the limit is {MAX_TEMPLATE_KWARGS_DEPTH}", name.partition("[")[0]
        )


def check_tool_list(tools: Sequence[Tool] | None) -> None:
    """Check the tools of a request.

    Raises:
        InvalidRequestError: two have the same name, or a schema is nested too deeply.
    """
    names: set[str] = set()
    for number, tool in enumerate(tools or ()):
        check_depth(tool.function.parameters, f"tools[{number}].function.parameters")
        if tool.function.name in names:
            raise InvalidRequestError(f"tools: there are two functions {tool.function.name!r}", "tools")
        names.add(tool.function.name)


def template_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Return tools as templates expect them: in the order that was given, and the same bytes for the same tools."""
    if not tools:
        return None
    return [{"type": "function", "function": _described(tool)} for tool in tools]


def template_message(message: ChatMessage, dialect: Dialect) -> dict[str, Any]:
    """Return a message as templates expect it."""
    fields: dict[str, Any] = {"role": message.role, "content": _content(message, dialect)}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if reasoning := message.reasoning or message.reasoning_content:
        fields["reasoning"] = fields["reasoning_content"] = reasoning
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, dialect),
                },
            }
            for call in message.tool_calls
        ]
    return fields


def _content(message: ChatMessage, dialect: Dialect) -> str | list[dict[str, str]] | None:
    if isinstance(message.content, list):
        return [{"type": "text", "text": part.text} for part in message.content]
    empty = message.content is None and (dialect.empty_content or not message.tool_calls)
    return "" if empty else message.content


def template_kwargs(body: ChatRequest | TokenizeRequest, default: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the variables of the chat template: those of the request, and the server's that it does not set."""
    kwargs = {**default, **(body.chat_template_kwargs or {})}
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    return kwargs or None


def _described(tool: Tool) -> dict[str, Any]:
    function = tool.function
    fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {name: value for name, value in fields.items() if value is not None}


def _arguments(text: str, dialect: Dialect) -> dict[str, Any] | str:
    """The arguments of a call. A model may have written what is no JSON object: its conversation goes on with that."""
    text = text.strip() or "{}"
    if dialect.arguments_as_text:
        return text
    try:
        arguments = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        arguments = None
    if isinstance(arguments, dict):
        return arguments
    return text if dialect.broken_as_text else {}


@dataclass(slots=True, frozen=True)
class Parsing:
    """How the outputs of one request are parsed.

    Fields:
        format: of the text. tool_parser: the name of the parser of its calls.
        shown: special tokens that the parser has to see.
        tools: that may be called. parallel: whether one answer may have several calls.
        reasoning: whether the answer has the reasoning.
        calls_first: whether calls are the whole answer or none of it, as where a grammar says what the answer is.
    """

    format: OutputFormat
    tool_parser: str
    shown: frozenset[int]
    tools: Tools
    parallel: bool = True
    reasoning: bool = True
    calls_first: bool = False

    def parser(self, start: Start, continues: bool) -> MessageParser:
        """Return a parser of one output. ``start``, ``continues``: as ``MessageParser`` takes them."""
        return MessageParser(
            self.format,
            start,
            self.tools,
            continues=continues,
            parallel=self.parallel,
            calls_first=self.calls_first,
        )

    @property
    def id_length(self) -> int:
        """How many characters the ids of calls have; 0: any number."""
        return self.format.tools.id_length if self.format.tools is not None else 0


class ChatFormats:
    """The options of conversations.

    Fields:
        template_kwargs: variables of the chat template that requests need not give.
        tool_parser: the name of the format in which the model calls tools; None: it is not known.
    """

    def __init__(self, config: GatewayConfig, tokenizer: Tokenizer) -> None:
        """Raises:
        ConfigError: the options contradict each other.
        """
        if config.enable_auto_tool_choice and config.tool_call_parser is None:
            raise ConfigError("--enable-auto-tool-choice requires --tool-call-parser")
        self.template_kwargs = _template_kwargs(config.default_chat_template_kwargs)
        self.tool_parser = config.tool_call_parser
        self._told = False
        self._auto = config.enable_auto_tool_choice
        self._with_tools = make_format(config.tool_call_parser, config.reasoning_parser)
        self._without_tools = make_format(None, config.reasoning_parser)
        self._special_tokens = tokenizer.special_tokens
        self._writes_tools = tokenizer.chat_template.writes_tools
        if config.tool_call_parser is not None and not self._writes_tools:
            log.warning("the chat template never writes tools, so the model does not see those of requests")

    def leaves_out(self, tools: Sequence[Tool] | None) -> bool:
        """Whether the chat template does not write these tools. A warning says so, once."""
        if not tools or self._writes_tools:
            return False
        if not self._told:
            self._told = True
            log.warning("a request has tools that the chat template never writes: the model does not see them")
        return True

    def check(self, body: ChatRequest) -> None:
        """Check the fields about tools.

        Raises:
            InvalidRequestError: they contradict each other, or need an option that is not set.
        """
        check_tool_list(body.tools)
        choice = body.tool_choice
        if not body.tools:
            if choice not in (None, "none", "auto"):
                raise InvalidRequestError("tool_choice needs tools to choose from: tools is empty", "tool_choice")
            return
        if isinstance(choice, NamedToolChoice):
            name = choice.function.name
            if all(tool.function.name != name for tool in body.tools):
                raise InvalidRequestError(f"tool_choice: there is no function {name!r} in tools", "tool_choice")
        if choice == "none":
            return
        if choice in (None, "auto") and not self._auto:
            raise InvalidRequestError(
                '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set', "tool_choice"
            )
        if self.tool_parser is None:
            raise InvalidRequestError("tool_choice requires --tool-call-parser to be set", "tool_choice")

    def parsing(self, body: ChatRequest) -> Parsing | None:
        """Return how the outputs of a request are parsed; None: they are content as they are."""
        calls = bool(body.tools) and body.tool_choice != "none"
        chosen = self._with_tools if calls else self._without_tools
        if chosen is None:
            return None
        delimiters = chosen.delimiters
        shown = frozenset(self._special_tokens[text] for text in delimiters if text in self._special_tokens)
        tools = Tools({tool.function.name: tool.function.parameters for tool in (body.tools or ()) if calls})
        return Parsing(
            chosen,
            self.tool_parser or "",
            shown,
            tools,
            parallel=body.parallel_tool_calls is not False,
            reasoning=body.include_reasoning is not False,
        )


def _template_kwargs(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
        check_depth(given, "it")
        if reserved := RESERVED_NAMES & given.keys():
            raise ConfigError(f"--default-chat-template-kwargs may not set {min(reserved)}")
    except (msgspec.MsgspecError, APIError) as error:
        raise ConfigError(f"--default-chat-template-kwargs is no JSON object that can be used: {error}") from error
    return given
