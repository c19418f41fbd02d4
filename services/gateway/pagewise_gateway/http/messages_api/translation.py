"""Turns a request for a message into the chat that it is."""

import msgspec

from pagewise_gateway.http.errors import InvalidRequestError
from pagewise_gateway.http.messages_api.schema import (
    Block,
    CountRequest,
    InputMessage,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from pagewise_gateway.http.schema import ChatMessage, ChatRequest, ContentPart, JSONSchema, JSONSchemaFormat
from pagewise_gateway.http.tool_schema import (
    AssistantToolCall,
    CalledFunction,
    ChosenFunction,
    FunctionDefinition,
    NamedToolChoice,
    Tool,
    ToolChoice,
)

_BILLING = "x-anthropic-billing-header"
"""Begins a line that some clients put into the system text. It changes with every request, so no prefix would be found
again from there on, and it says nothing to the model."""

_ALLOWED: dict[str, tuple[type[Block], ...]] = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ToolUseBlock, ThinkingBlock),
    "system": (TextBlock,),
}
"""The blocks that a message of each role may have; others have ``redacted_thinking``, which is left out anyway."""


def chat_request(body: CountRequest) -> ChatRequest:
    """Return the chat that a request for a message is.

    Raises:
        InvalidRequestError: a block is where it may not be, or a choice has no name.
    """
    messages = _system(body)
    for number, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{number}]")
    if not messages or messages == _system(body):
        raise InvalidRequestError("messages contain nothing that is a part of the prompt", "messages")
    choice = body.tool_choice
    chat = ChatRequest(
        messages=messages,
        model=body.model,
        tools=[
            Tool("function", FunctionDefinition(tool.name, tool.description, tool.input_schema, tool.strict))
            for tool in body.tools or ()
        ]
        or None,
        tool_choice=_tool_choice(body),
        parallel_tool_calls=not choice.disable_parallel_tool_use if choice is not None else None,
        chat_template_kwargs=_template_kwargs(body),
        include_reasoning=body.thinking is None or body.thinking.type != "disabled",
        reasoning_effort=body.output_config.effort if body.output_config is not None else None,
    )
    # An answer goes on with a last message of the assistant.
    if messages[-1].role == "assistant" and not messages[-1].tool_calls:
        chat.continue_final_message = True
    if isinstance(body, MessagesRequest):
        chat.max_completion_tokens = body.max_tokens
        chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
        chat.stop, chat.stream, chat.cache_salt = body.stop_sequences, body.stream, body.cache_salt
        if body.output_config is not None and body.output_config.format is not None:
            chat.response_format = JSONSchemaFormat(JSONSchema("output", body.output_config.format.schema))
    return chat


def _system(body: CountRequest) -> list[ChatMessage]:
    given = body.system or []
    blocks = [given] if isinstance(given, str) else [block.text for block in given]
    kept = [
        "\n".join(line for line in text.split("\n") if not line.startswith(_BILLING)) if _BILLING in text else text
        for text in blocks
    ]
    text = "\n".join(text for text in kept if text.strip())
    return [ChatMessage("system", text)] if text else []


def _messages(message: InputMessage, place: str) -> list[ChatMessage]:
    """The messages of a chat that one message is: results of tools have messages of their own."""
    if isinstance(message.content, str):
        return [ChatMessage(message.role, message.content)]
    texts: list[ContentPart] = []
    thoughts: list[str] = []
    calls: list[AssistantToolCall] = []
    results: list[ChatMessage] = []
    allowed = _ALLOWED[message.role]
    for number, block in enumerate(message.content):
        if isinstance(block, TextBlock):
            texts.append(ContentPart("text", block.text))
        elif not isinstance(block, allowed):
            if isinstance(block, ToolUseBlock | ToolResultBlock | ThinkingBlock):
                where = f"{place}.content[{number}]"
                kind = block.__struct_config__.tag
                raise InvalidRequestError(f"{where}: blocks of type {kind} are not for the {message.role}", where)
        elif isinstance(block, ToolUseBlock):
            arguments = msgspec.json.encode(block.input).decode()
            calls.append(AssistantToolCall(block.id, CalledFunction(block.name, arguments)))
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolResultBlock):
            results.append(ChatMessage("tool", _result(block), tool_call_id=block.tool_use_id))
    if not (texts or calls or thoughts):
        return results
    content = texts[0].text if len(texts) == 1 else texts or None
    said = ChatMessage(message.role, content, tool_calls=calls or None, reasoning="\n".join(thoughts) or None)
    return [*results, said]


def _result(block: ToolResultBlock) -> str | list[ContentPart]:
    if isinstance(block.content, list):
        return [ContentPart("text", part.text) for part in block.content] or ""
    return block.content or ""


def _tool_choice(body: CountRequest) -> ToolChoice | None:
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequestError("tool_choice.name is required with the type tool", "tool_choice.name")
        return NamedToolChoice("function", ChosenFunction(choice.name))
    return "required" if choice.type == "any" else "none" if choice.type == "none" else "auto"


def _template_kwargs(body: CountRequest) -> dict[str, object] | None:
    if body.thinking is None or body.thinking.type == "adaptive":
        return body.chat_template_kwargs
    thinks = body.thinking.type == "enabled"
    return {"enable_thinking": thinks, "thinking": thinks, **(body.chat_template_kwargs or {})}
