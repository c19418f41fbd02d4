"""Requests of OpenAI's Responses API, as chats."""

from typing import Any, cast

import msgspec
from msgspec import Struct, structs

from pagewise_gateway.http import responses_schema as schema
from pagewise_gateway.http.errors import InvalidRequestError, UnsupportedParameterError
from pagewise_gateway.http.hints_schema import ReuseFields
from pagewise_gateway.http.parsing import explain
from pagewise_gateway.http.schema import (
    ChatMessage,
    ChatRequest,
    ContentPart,
    JSONObjectFormat,
    JSONSchema,
    JSONSchemaFormat,
    ResponseFormat,
)
from pagewise_gateway.http.tools_schema import (
    AssistantToolCall,
    CalledFunction,
    ChosenFunction,
    NamedToolChoice,
    ToolChoice,
    function_tools,
)
from pagewise_gateway.metrics import LeftOutTool

FIELD_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "thinking_token_budget": "reasoning.max_tokens",  # nosec B105 # no secret
}
"""The fields of a chat that have other names in this API."""
_ITEMS: dict[str, type[Struct]] = {
    "message": schema.MessageItem,
    "reasoning": schema.ReasoningItem,
    "function_call": schema.FunctionCallItem,
    "function_call_output": schema.FunctionOutputItem,
}


def chat_request(body: schema.ResponsesRequest) -> ChatRequest:
    """Translate a request for a response into a chat. All its tools are functions (see ``drop_other_tools``).

    Raises:
        InvalidRequestError: an item is invalid, or the request asks for stored responses.
    """
    _check_stateless(body)
    return ChatRequest(
        messages=_messages(body),
        model=body.model,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        tools=function_tools(tool for tool in body.tools or () if isinstance(tool, schema.FunctionTool)),
        tool_choice=_tool_choice(body),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        thinking_token_budget=body.reasoning.max_tokens if body.reasoning is not None else None,
        response_format=_format(body),
        stream=body.stream,
        chat_template_kwargs=body.chat_template_kwargs,
        cache_salt=body.cache_salt,
        **{name: getattr(body, name) for name in ReuseFields.__struct_fields__},
    )


def drop_other_tools(body: schema.ResponsesRequest) -> set[LeftOutTool]:
    """Drop the tools that are not functions, and return their types.

    Agents offer such tools beside their functions to every server, and work without them if the model never calls one.

    Raises:
        UnsupportedParameterError: there are other tools and no functions, so the request needs such a tool.
    """
    tools = body.tools or []
    functions: list[schema.ResponseTool] = [tool for tool in tools if isinstance(tool, schema.FunctionTool)]
    others = [
        cast(LeftOutTool, tool.__struct_config__.tag) for tool in tools if not isinstance(tool, schema.FunctionTool)
    ]
    if others and not functions:
        raise UnsupportedParameterError(
            f"tools: {others[0]} is not supported by Pagewise, only functions are", "tools[0].type"
        )
    body.tools = functions or None
    return set(others)


def _check_stateless(body: schema.ResponsesRequest) -> None:
    for name in ("store", "previous_response_id", "background"):
        if getattr(body, name):
            raise UnsupportedParameterError(f"{name} is not supported by Pagewise, which stores no responses", name)
    for wanted in body.include or ():
        if wanted != "reasoning.encrypted_content":  # stateless clients always ask for it; the answer has none
            raise UnsupportedParameterError(f"include: {wanted!r} is not supported by Pagewise", "include")


def _messages(body: schema.ResponsesRequest) -> list[ChatMessage]:
    """Return the messages of the chat. Consecutive reasoning, text and calls of the model become one message."""
    given = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    if not given:
        raise InvalidRequestError("input must not be empty", "input")
    if len(given) > schema.MAX_ITEMS:
        raise InvalidRequestError(f"input: {len(given)} items are too many, at most {schema.MAX_ITEMS}", "input")
    messages = [ChatMessage("system", body.instructions)] if body.instructions else []
    for number, item in enumerate(given):
        message = _message(_item(item, number))
        if messages and _continues(messages[-1], message):
            message = _joined(messages.pop(), message)
        messages.append(message)
    messages = [message for message in messages if message != ChatMessage("assistant")]
    if not messages:
        raise InvalidRequestError("input contains nothing that is a part of the prompt", "input")
    return messages


def _message(item: Struct) -> ChatMessage:
    match item:
        case schema.ReasoningItem():
            return ChatMessage("assistant", reasoning="\n".join(part.text for part in item.content or ()) or None)
        case schema.FunctionCallItem():
            call = AssistantToolCall(item.call_id, CalledFunction(item.name, item.arguments))
            return ChatMessage("assistant", tool_calls=[call])
        case schema.FunctionOutputItem():
            return ChatMessage("tool", _content(item.output), tool_call_id=item.call_id)
        case _:
            assert isinstance(item, schema.MessageItem)
            return ChatMessage(item.role, _content(item.content))


def _continues(last: ChatMessage, message: ChatMessage) -> bool:
    """Return whether a message of the model continues its last message. Calls always do. Reasoning and text do only if
    the last message has no text and no calls."""
    belongs = bool(message.tool_calls) or not (last.content or last.tool_calls)
    return belongs and last.role == message.role == "assistant"


def _joined(last: ChatMessage, message: ChatMessage) -> ChatMessage:
    return structs.replace(
        last,
        content=last.content if message.content is None else message.content,
        reasoning="\n".join(filter(None, (last.reasoning, message.reasoning))) or None,
        tool_calls=[*(last.tool_calls or ()), *(message.tool_calls or ())] or None,
    )


def _item(given: dict[str, Any], number: int) -> Struct:
    location = f"input[{number}]"
    kind = given.get("type") or "message"
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise UnsupportedParameterError(f"{location}: items of type {kind!r} are not supported by Pagewise", location)
    kept = _without_nulls(given)
    kept.pop("encrypted_content", None)
    try:
        return msgspec.convert(kept, _ITEMS[kind])
    except msgspec.ValidationError as error:
        raised = explain(error, given)
        raise type(raised)(
            f"{location}: {raised}", f"{location}.{raised.param}" if raised.param else location
        ) from None


def _without_nulls(value: Any) -> Any:
    """Return an item without its null fields, which clients add to the items and parts that they repeat."""
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    if isinstance(value, dict):
        return {
            name: _without_nulls(inner) if isinstance(inner, list) else inner
            for name, inner in value.items()
            if inner is not None
        }
    return value


def _content(content: str | list[schema.InputText]) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    return [ContentPart("text", part.text, prompt_cache_breakpoint=part.prompt_cache_breakpoint) for part in content]


def _tool_choice(body: schema.ResponsesRequest) -> ToolChoice | None:
    choice = body.tool_choice
    if isinstance(choice, schema.NamedFunction):
        return NamedToolChoice("function", ChosenFunction(choice.name))
    return choice


def _format(body: schema.ResponsesRequest) -> ResponseFormat | None:
    wanted = body.text.format if body.text is not None else None
    if isinstance(wanted, schema.JSONObject):
        return JSONObjectFormat()
    if isinstance(wanted, schema.JSONSchemaText):
        return JSONSchemaFormat(JSONSchema(wanted.name, wanted.schema))
    return None
