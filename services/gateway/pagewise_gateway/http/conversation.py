"""Turns the messages and tools of a conversation into what a chat template renders, and checks them."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pagewise_gateway.http.errors import InvalidRequestError
from pagewise_gateway.http.schema import MAX_TEMPLATE_KWARGS_DEPTH, ChatMessage, ChatRequest, TokenizeRequest
from pagewise_gateway.http.tool_schema import Tool
from pagewise_gateway.text.template import Dialect

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
    content: object = message.content
    if isinstance(message.content, list):
        content = [{"type": "text", "text": part.text} for part in message.content]
    elif content is None and (dialect.empty_content or not message.tool_calls):
        content = ""
    fields: dict[str, Any] = {"role": message.role, "content": content}
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
