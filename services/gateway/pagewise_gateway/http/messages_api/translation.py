"""Translates a request for a message into a request for a chat."""

import msgspec

from pagewise_gateway.http.errors import InvalidRequestError
from pagewise_gateway.http.messages_api import schema
from pagewise_gateway.http.schema import ChatMessage, ChatRequest, ContentPart, JSONSchema, JSONSchemaFormat
from pagewise_gateway.http.tool_schema import (
    AssistantToolCall,
    CalledFunction,
    ChosenFunction,
    NamedToolChoice,
    ToolChoice,
    function_tools,
)

_BILLING = "x-anthropic-billing-header"
"""Begins a line that some clients put into the system text. It changes with every request, so no prefix would be found
again from there on, and it says nothing to the model."""

_ALLOWED: dict[str, tuple[type[schema.Block], ...]] = {
    "user": (schema.TextBlock, schema.ToolResultBlock, schema.RedactedThinkingBlock),
    "assistant": (schema.TextBlock, schema.ToolUseBlock, schema.ThinkingBlock, schema.RedactedThinkingBlock),
    "system": (schema.TextBlock, schema.RedactedThinkingBlock),
}
"""The blocks that a message of each role may have. ``redacted_thinking`` is left out of the prompt."""

_FIELDS = {
    "cache_salt": "cache_salt",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "stream": "stream",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
}
"""The fields of a chat, and the fields of a request for a message that mean the same. A request to count tokens has
none of them."""


def chat_request(body: schema.CountRequest) -> ChatRequest:
    """Return the chat that a request for a message asks for.

    Raises:
        InvalidRequestError: a block is where it may not be, or a choice has no name.
    """
    said = _conversation(body)
    config = body.output_config or schema.OutputConfig()
    chat = ChatRequest(
        messages=[*_system(body), *said],
        model=body.model,
        tools=function_tools(body.tools or ()),
        tool_choice=_tool_choice(body),
        chat_template_kwargs=_template_kwargs(body),
        include_reasoning=body.thinking is None or body.thinking.type != "disabled",
        reasoning_effort=config.effort,
        **{ours: getattr(body, theirs, None) for ours, theirs in _FIELDS.items()},
    )
    if body.tool_choice is not None:
        chat.parallel_tool_calls = not body.tool_choice.disable_parallel_tool_use
    if config.format is not None:
        chat.response_format = JSONSchemaFormat(JSONSchema("output", config.format.schema))
    # An answer goes on with a last message of the assistant.
    if said[-1].role == "assistant" and not said[-1].tool_calls:
        chat.continue_final_message = True
    return chat


def _system(body: schema.CountRequest) -> list[ChatMessage]:
    given = body.system or []
    blocks = [given] if isinstance(given, str) else [block.text for block in given]
    kept = [
        "\n".join(line for line in text.split("\n") if not line.startswith(_BILLING)) if _BILLING in text else text
        for text in blocks
    ]
    text = "\n".join(text for text in kept if text.strip())
    return [ChatMessage("system", text)] if text else []


def _conversation(body: schema.CountRequest) -> list[ChatMessage]:
    said = [one for number, message in enumerate(body.messages) for one in _messages(message, f"messages[{number}]")]
    if not said:
        raise InvalidRequestError("messages contain nothing that is a part of the prompt", "messages")
    return said


def _messages(message: schema.InputMessage, place: str) -> list[ChatMessage]:
    """Return the messages of a chat for one message: each result of a tool is a message of its own."""
    if isinstance(message.content, str):
        return [ChatMessage(message.role, message.content)]
    texts: list[ContentPart] = []
    thoughts: list[str] = []
    calls: list[AssistantToolCall] = []
    results: list[ChatMessage] = []
    for number, block in enumerate(message.content):
        if not isinstance(block, _ALLOWED[message.role]):
            where, kind = f"{place}.content[{number}]", block.__struct_config__.tag
            raise InvalidRequestError(f"{where}: blocks of type {kind} are not for the {message.role}", where)
        match block:
            case schema.TextBlock():
                texts.append(ContentPart("text", block.text))
            case schema.ToolUseBlock():
                arguments = msgspec.json.encode(block.input).decode()
                calls.append(AssistantToolCall(block.id, CalledFunction(block.name, arguments)))
            case schema.ThinkingBlock():
                thoughts.append(block.thinking)
            case schema.ToolResultBlock():
                results.append(ChatMessage("tool", _result(block), tool_call_id=block.tool_use_id))
    content = texts[0].text if len(texts) == 1 else texts or None
    if any((texts, calls, thoughts)):
        said = ChatMessage(message.role, content, tool_calls=calls or None, reasoning="\n".join(thoughts) or None)
        results.append(said)
    return results


def _result(block: schema.ToolResultBlock) -> str | list[ContentPart]:
    if isinstance(block.content, list):
        return [ContentPart("text", part.text) for part in block.content] or ""
    return block.content or ""


def _tool_choice(body: schema.CountRequest) -> ToolChoice | None:
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequestError("tool_choice.name is required with the type tool", "tool_choice.name")
        return NamedToolChoice("function", ChosenFunction(choice.name))
    return "required" if choice.type == "any" else "none" if choice.type == "none" else "auto"


def _template_kwargs(body: schema.CountRequest) -> dict[str, object] | None:
    if body.thinking is None or body.thinking.type == "adaptive":
        return body.chat_template_kwargs
    thinks = body.thinking.type == "enabled"
    return {"enable_thinking": thinks, "thinking": thinks, **(body.chat_template_kwargs or {})}
