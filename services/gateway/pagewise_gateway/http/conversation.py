"""Checks conversations, renders them with the chat template, and chooses the parser of their outputs."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec
from pagewise_shared.config import GatewayConfig
from pagewise_shared.errors import ConfigError

from pagewise_gateway.http import schema
from pagewise_gateway.http.errors import APIError, InvalidRequestError
from pagewise_gateway.http.schema import ChatMessage, ChatRequest, TokenizeRequest
from pagewise_gateway.http.thinking import ThinkingBudgets
from pagewise_gateway.http.tools_schema import NamedToolChoice, Tool
from pagewise_gateway.structured.model_formats import AUTO, NONE, find_reasoning_parser, find_tool_parser
from pagewise_gateway.text.output_parsing import MessageParser, OutputFormat, Start, Tools, make_format
from pagewise_gateway.text.template import RESERVED_NAMES, Dialect
from pagewise_gateway.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_OF_ASSISTANT = ("tool_calls", "reasoning", "reasoning_content")


def check_chat(body: ChatRequest | TokenizeRequest) -> None:
    """Check a conversation, and the parameters of the chat template.

    Raises:
        InvalidRequestError: they contradict each other, or are too large.
    """
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt cannot be used together", "continue_final_message"
        )
    kwargs = body.chat_template_kwargs or {}
    _check_depth(kwargs, "chat_template_kwargs")
    if reserved := RESERVED_NAMES & kwargs.keys():
        raise InvalidRequestError(f"chat_template_kwargs may not set {min(reserved)}", "chat_template_kwargs")
    if kwargs and (size := len(msgspec.json.encode(kwargs))) > schema.MAX_TEMPLATE_KWARGS_BYTES:
        raise InvalidRequestError(
            f"chat_template_kwargs takes {size} bytes as JSON, the limit is {schema.MAX_TEMPLATE_KWARGS_BYTES}",
            "chat_template_kwargs",
        )
    for number, message in enumerate(body.messages or ()):
        _check_message(message, f"messages[{number}]")
    if isinstance(body, TokenizeRequest):
        _check_tools(body.tools)


def _check_message(message: ChatMessage, location: str) -> None:
    """Check that a message has the fields that its role needs, and no field of another role."""
    if message.role != "assistant":
        for name in _OF_ASSISTANT:
            if getattr(message, name):
                field = f"{location}.{name}"
                raise InvalidRequestError(f"{field} is only for messages of the assistant", field)
        if message.content is None:
            raise InvalidRequestError(f"{location}.content is required", f"{location}.content")
    field = f"{location}.tool_call_id"
    if message.role == "tool" and message.tool_call_id is None:
        raise InvalidRequestError(f"{field} is required: the id of the call that the message answers", field)
    if message.role != "tool" and message.tool_call_id is not None:
        raise InvalidRequestError(f"{field} is only for messages of role tool", field)


def _check_depth(value: Any, name: str) -> None:
    """Check that a template can render a JSON value, which it cannot if the value is nested too deeply."""
    level: list[Any] = [value] if value else []
    for _ in range(schema.MAX_TEMPLATE_KWARGS_DEPTH):
        if not level:
            return
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
    if level:
        raise InvalidRequestError(
            f"{name} is nested too deeply, the limit is {schema.MAX_TEMPLATE_KWARGS_DEPTH}", name.partition("[")[0]
        )


def _check_tools(tools: Sequence[Tool] | None) -> None:
    names: set[str] = set()
    for number, tool in enumerate(tools or ()):
        _check_depth(tool.function.parameters, f"tools[{number}].function.parameters")
        if tool.function.name in names:
            raise InvalidRequestError(f"tools: there are two functions {tool.function.name!r}", "tools")
        names.add(tool.function.name)


def render_chat(
    tokenizer: Tokenizer,
    body: ChatRequest | TokenizeRequest,
    messages: Sequence[ChatMessage],
    default_kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Return the text of a conversation, rendered with the chat template. ``messages``: replace the body's messages.
    ``default_kwargs``: variables of the template for which the body may give other values.

    Raises:
        ChatTemplateError: the template refuses it, or there is none.
    """
    template = tokenizer.chat_template
    calls = any(message.tool_calls for message in messages)
    dialect = template.choose(body.tools).dialect if calls else Dialect()
    add_prompt = not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    return template.render(
        [_template_message(message, dialect) for message in messages],
        add_generation_prompt=add_prompt,
        continue_final_message=bool(body.continue_final_message),
        # In the given order, so that the same tools render to the same bytes.
        tools=[_template_tool(tool) for tool in body.tools or ()] or None,
        template_kwargs=_variables(body, default_kwargs) or None,
    )


def _variables(body: ChatRequest | TokenizeRequest, default: Mapping[str, Any]) -> dict[str, Any]:
    kwargs = {**default, **(body.chat_template_kwargs or {})}
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    return kwargs


def _template_content(message: ChatMessage, dialect: Dialect) -> str | list[dict[str, str]] | None:
    if isinstance(message.content, list):
        return [{"type": "text", "text": part.text} for part in message.content]
    empty = message.content is None and (dialect.empty_content or not message.tool_calls)
    return "" if empty else message.content


def _template_message(message: ChatMessage, dialect: Dialect) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": _template_content(message, dialect)}
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
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments, dialect)},
            }
            for call in message.tool_calls
        ]
    return fields


def _template_tool(tool: Tool) -> dict[str, Any]:
    function = tool.function
    fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


def _arguments(text: str, dialect: Dialect) -> dict[str, Any] | str:
    """Return the arguments of a call as the template expects them. A model may have written text that is not a JSON
    object, and its conversation has to be able to continue."""
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
    """The options of parsing the outputs of one request.

    Fields:
        format: of the text. tool_parser: the name of the parser of its calls.
        shown: special tokens that the parser has to see.
        tools: that may be called. parallel: whether one answer may have several calls.
        reasoning: whether the answer has the reasoning.
        calls_first: whether an output is either calls or content, because a grammar describes its content.
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


class ChatFormats:
    """The options of conversations.

    Fields:
        template_kwargs: default variables of the chat template.
        tool_parser: the name of the format in which the model calls tools; None: it is not known.
        reasoning_parser: the name of the format of its reasoning; None: the format is unknown.
        budgets: makes the thinking budgets of requests.
    """

    def __init__(self, config: GatewayConfig, tokenizer: Tokenizer) -> None:
        """Raises:
        ConfigError: the options contradict each other.
        """
        self.template_kwargs = _template_kwargs(config.default_chat_template_kwargs)
        template = tokenizer.chat_template
        tools = find_tool_parser(config.tool_call_parser, template, tokenizer.model_type)
        reasoning = find_reasoning_parser(config.reasoning_parser, tools.name, template)
        for what, found in (("tool calls", tools), ("reasoning", reasoning)):
            log.info("parser of %s: %s, %s", what, found.name or "none", found.reason)
        self.tool_parser, self.reasoning_parser = tools.name, reasoning.name
        self._reason = tools.reason
        self._warned = False
        self._auto = config.enable_auto_tool_choice
        self._with_tools = make_format(tools.name, reasoning.name)
        self._without_tools = make_format(None, reasoning.name)
        self.budgets = ThinkingBudgets(config, self._without_tools, tokenizer)
        self._special_tokens = tokenizer.special_tokens
        self._writes_tools = template.writes_tools
        if config.tool_call_parser not in (AUTO, NONE) and not self._writes_tools:
            log.warning("the chat template never writes tools, so the model does not see those of requests")

    def omits(self, tools: Sequence[Tool] | None) -> bool:
        """Return whether the chat template does not write these tools, and warn of it once."""
        if not tools or self._writes_tools:
            return False
        if not self._warned:
            self._warned = True
            log.warning("a request has tools that the chat template never writes: the model does not see them")
        return True

    def check(self, body: ChatRequest) -> None:
        """Check the fields about tools.

        Raises:
            InvalidRequestError: they contradict each other, or need an option that is not set.
        """
        _check_tools(body.tools)
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
        if self.tool_parser is None:
            raise InvalidRequestError(
                f"the format in which this model calls tools is not known: {self._reason}. The server's option "
                '--tool-call-parser names it; with tool_choice "none", the model sees tools and calls none',
                "tools",
            )
        if choice in (None, "auto") and not self._auto:
            raise InvalidRequestError('"auto" tool choice is off: --no-enable-auto-tool-choice is set', "tool_choice")

    def parsing(self, body: ChatRequest) -> Parsing | None:
        """Return the options of parsing the outputs of a request; None: outputs are content as they are."""
        calls = bool(body.tools) and body.tool_choice != "none"
        chosen = self._with_tools if calls else self._without_tools
        if chosen is None:
            return None
        special = self._special_tokens
        return Parsing(
            chosen,
            self.tool_parser or "",
            frozenset(special[text] for text in chosen.delimiters if text in special),
            Tools({tool.function.name: tool.function.parameters for tool in (body.tools or ()) if calls}),
            parallel=body.parallel_tool_calls is not False,
            reasoning=body.include_reasoning is not False,
        )


def _template_kwargs(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
        _check_depth(given, "it")
        if reserved := RESERVED_NAMES & given.keys():
            raise ConfigError(f"--default-chat-template-kwargs may not set {min(reserved)}")
    except (msgspec.MsgspecError, APIError) as error:
        raise ConfigError(f"--default-chat-template-kwargs is no JSON object that can be used: {error}") from error
    return given
