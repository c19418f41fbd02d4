"""Turns a request for a response into the chat that it is."""

from typing import Any

import msgspec
from msgspec import Struct

from pagewise_gateway.http.errors import InvalidRequestError, UnsupportedParameterError
from pagewise_gateway.http.parsing import explain
from pagewise_gateway.http.responses_api.schema import (
    MAX_ITEMS,
    CustomTool,
    FunctionCallItem,
    FunctionOutputItem,
    FunctionTool,
    ImageGenerationTool,
    InputText,
    JSONObject,
    JSONSchemaText,
    MessageItem,
    NamedFunction,
    NamespaceTool,
    ReasoningItem,
    ResponsesRequest,
    ResponseTool,
    ToolSearchTool,
    WebSearchTool,
)
from pagewise_gateway.http.schema import (
    ChatMessage,
    ChatRequest,
    ContentPart,
    JSONObjectFormat,
    JSONSchema,
    JSONSchemaFormat,
    ResponseFormat,
)
from pagewise_gateway.http.tool_schema import (
    AssistantToolCall,
    CalledFunction,
    ChosenFunction,
    FunctionDefinition,
    NamedToolChoice,
    Tool,
    ToolChoice,
)
from pagewise_gateway.metrics import LeftOutTool

_ITEMS: dict[str, type[Struct]] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
}

_LEFT_OUT: dict[type[Struct], LeftOutTool] = {
    WebSearchTool: "web_search",
    ImageGenerationTool: "image_generation",
    ToolSearchTool: "tool_search",
    NamespaceTool: "namespace",
    CustomTool: "custom",
}


def chat_request(body: ResponsesRequest) -> ChatRequest:
    """Return the chat that a request for a response is. Its tools are functions (``leave_out_tools``).

    Raises:
        InvalidRequestError: an item is wrong, or the request asks for what would have to be stored.
    """
    _check_stateless(body)
    return ChatRequest(
        messages=_messages(body),
        model=body.model,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        tools=[
            Tool("function", FunctionDefinition(tool.name, tool.description, tool.parameters, tool.strict))
            for tool in body.tools or ()
            if isinstance(tool, FunctionTool)
        ]
        or None,
        tool_choice=_tool_choice(body),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        response_format=_format(body),
        stream=body.stream,
        chat_template_kwargs=body.chat_template_kwargs,
        cache_salt=body.cache_salt,
        prompt_cache_retention=body.prompt_cache_retention,
    )


def leave_out_tools(body: ResponsesRequest) -> set[LeftOutTool]:
    """Leave out the tools that are no functions, and return their types.

    Agents offer such tools beside their functions to every server, and do without them if the model never calls one.

    Raises:
        UnsupportedParameterError: there are no functions, so the request is about such a tool.
    """
    tools = body.tools or []
    functions: list[ResponseTool] = [tool for tool in tools if isinstance(tool, FunctionTool)]
    others = [_LEFT_OUT[type(tool)] for tool in tools if not isinstance(tool, FunctionTool)]
    if others and not functions:
        raise UnsupportedParameterError(
            f"tools: {others[0]} is not supported by Pagewise, only functions are", "tools[0].type"
        )
    body.tools = functions or None
    return set(others)


def _check_stateless(body: ResponsesRequest) -> None:
    for name in ("store", "previous_response_id", "background"):
        if getattr(body, name):
            raise UnsupportedParameterError(f"{name} is not supported by Pagewise, which stores no responses", name)
    for wanted in body.include or ():
        if wanted != "reasoning.encrypted_content":  # which clients without a store ask for; there is none
            raise UnsupportedParameterError(f"include: {wanted!r} is not supported by Pagewise", "include")


def _messages(body: ResponsesRequest) -> list[ChatMessage]:
    messages = [ChatMessage("system", body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, ChatMessage("user", body.input)]
    if not body.input:
        raise InvalidRequestError("input must not be empty", "input")
    if len(body.input) > MAX_ITEMS:
        raise InvalidRequestError(f"input: {len(body.input)} items are too many, at most {MAX_ITEMS}", "input")
    for number, given in enumerate(body.input):
        item = _item(given, number)
        if isinstance(item, MessageItem) and item.role != "assistant":
            messages.append(ChatMessage(item.role, _content(item.content)))
            continue
        if isinstance(item, FunctionOutputItem):
            messages.append(ChatMessage("tool", _content(item.output), tool_call_id=item.call_id))
            continue
        # What the model has thought, said and called, one behind the other, is one message.
        last = messages[-1] if messages and messages[-1].role == "assistant" else None
        begins = isinstance(item, ReasoningItem) and last is not None and (last.content or last.tool_calls)
        if last is None or begins or (isinstance(item, MessageItem) and (last.content or last.tool_calls)):
            last = ChatMessage("assistant")
            messages.append(last)
        if isinstance(item, MessageItem):
            last.content = _content(item.content)
        elif isinstance(item, ReasoningItem):
            thought = "\n".join(part.text for part in item.content or ())
            last.reasoning = f"{last.reasoning}\n{thought}" if last.reasoning else thought or None
        elif isinstance(item, FunctionCallItem):
            called = AssistantToolCall(item.call_id, CalledFunction(item.name, item.arguments))
            last.tool_calls = [*(last.tool_calls or ()), called]
    said = [message for message in messages if message != ChatMessage("assistant")]
    if not said:
        raise InvalidRequestError("input contains nothing that is a part of the prompt", "input")
    return said


def _item(given: dict[str, Any], number: int) -> Struct:
    place = f"input[{number}]"
    kind = given.get("type") or "message"
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise UnsupportedParameterError(f"{place}: items of type {kind!r} are not supported by Pagewise", place)
    kept = {name: value for name, value in given.items() if value is not None and name != "encrypted_content"}
    for name in ("content", "output"):
        if isinstance(parts := kept.get(name), list):
            kept[name] = [_without_nulls(part) for part in parts]
    try:
        item = msgspec.convert(kept, _ITEMS[kind])
    except msgspec.ValidationError as error:
        raised = explain(error, given)
        raise type(raised)(f"{place}: {raised}", f"{place}.{raised.param}" if raised.param else place) from None
    return item


def _without_nulls(part: Any) -> Any:
    return {name: value for name, value in part.items() if value is not None} if isinstance(part, dict) else part


def _content(content: str | list[InputText]) -> str | list[ContentPart]:
    return content if isinstance(content, str) else [ContentPart("text", part.text) for part in content]


def _tool_choice(body: ResponsesRequest) -> ToolChoice | None:
    choice = body.tool_choice
    if isinstance(choice, NamedFunction):
        return NamedToolChoice("function", ChosenFunction(choice.name))
    return choice


def _format(body: ResponsesRequest) -> ResponseFormat | None:
    wanted = body.text.format if body.text is not None else None
    if isinstance(wanted, JSONObject):
        return JSONObjectFormat()
    if isinstance(wanted, JSONSchemaText):
        return JSONSchemaFormat(JSONSchema(wanted.name, wanted.schema))
    return None
