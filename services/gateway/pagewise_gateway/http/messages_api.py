"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: a translation of Anthropic's API to and from chats."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import msgspec
from aiohttp import web

from pagewise_gateway.generation import SequenceDelta
from pagewise_gateway.http import messages_schema as schema
from pagewise_gateway.http.answers import ChatRun, finish_reason
from pagewise_gateway.http.answers import usage as usage_of
from pagewise_gateway.http.chat import run_chat
from pagewise_gateway.http.context import CLIENT, CLIENT_REQUEST_ID, REQUEST_ID, Service, is_messages
from pagewise_gateway.http.errors import APIError, InvalidRequestError, UnknownParameterError
from pagewise_gateway.http.event_answers import Event, EventAnswer, as_bytes, ended_early
from pagewise_gateway.http.hints import MOST_BREAKPOINTS, session_of, session_of_user
from pagewise_gateway.http.hints_schema import PromptCacheBreakpoint
from pagewise_gateway.http.params import check_model
from pagewise_gateway.http.parsing import read_request
from pagewise_gateway.http.prompts import encode_chat
from pagewise_gateway.http.schema import ChatMessage, ChatRequest, ContentPart, JSONSchema, JSONSchemaFormat
from pagewise_gateway.http.thinking_schema import thinking_variables
from pagewise_gateway.http.tools_schema import (
    AssistantToolCall,
    CalledFunction,
    ChosenFunction,
    NamedToolChoice,
    ToolChoice,
    function_tools,
)
from pagewise_gateway.text.output_parsing import Delta
from pagewise_gateway.text.output_parsing.deltas import DeltaKind


async def create_message(request: web.Request) -> web.StreamResponse:
    """Continue a conversation of Anthropic's API.

    Raises:
        APIError: the request is invalid, or cannot be served now.
        GenerationError: the request was not accepted, or failed before the response began.
    """
    body, intake = await read_request(request, schema.MessagesRequest)
    chat = chat_request(body)
    chat.session_id = body.session_id
    chat.session_id = session_of(request, chat) or session_of_user(body.metadata)
    del body  # this frame lives until the response has ended
    request.app[Service.KEY].formats.budgets.drop_impossible(chat)
    return await run_chat(request, chat, intake, lambda run: MessageAnswer(run, f"msg_{request[REQUEST_ID]}"))


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """Count the tokens of a prompt of Anthropic's API.

    Raises:
        APIError: the request is invalid.
        GenerationError: the API key is over one of its limits.
    """
    service = request.app[Service.KEY]
    body, _ = await read_request(request, schema.CountRequest)
    check_model(body.model, service.limits)
    chat = chat_request(body)
    service.formats.check(chat)
    encoded = await encode_chat(service, chat, service.scheduler_client.capacity(), request[CLIENT].name)
    counted = schema.TokenCount(len(encoded.tokens))
    return web.Response(body=msgspec.json.encode(counted), content_type="application/json")


# ---- the request ----

_BILLING = "x-anthropic-billing-header"
"""The beginning of a line that some clients put into the system text. The line changes with every request, so no prefix
behind it would be found in the cache, and it has no meaning for the model."""

_ALLOWED: dict[str, tuple[type[schema.Block], ...]] = {
    "user": (schema.TextBlock, schema.ToolResultBlock, schema.RedactedThinkingBlock),
    "assistant": (schema.TextBlock, schema.ToolUseBlock, schema.ThinkingBlock, schema.RedactedThinkingBlock),
    "system": (schema.TextBlock, schema.RedactedThinkingBlock),
}
"""The blocks that a message of each role may have. ``redacted_thinking`` is left out of the prompt."""

_FIELDS = {
    "cache_hints": "cache_hints",
    "cache_salt": "cache_salt",
    "conversation_params": "conversation_params",
    "max_completion_tokens": "max_tokens",
    "nvext": "nvext",
    "stop": "stop_sequences",
    "stream": "stream",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
}
"""Fields of a chat -> the fields of a request for a message with the same meaning. A request to count tokens has none
of them."""


def chat_request(body: schema.CountRequest) -> ChatRequest:
    """Return the chat that a request for a message asks for.

    Raises:
        InvalidRequestError: a block does not fit the role of its message, a choice has no name, or there are too many
            cache breakpoints.
    """
    ttl = _breakpoint_ttl(body)
    conversation = _conversation(body)
    config = body.output_config or schema.OutputConfig()
    chat = ChatRequest(
        messages=[*_system(body), *conversation],
        model=body.model,
        tools=function_tools(body.tools or ()),
        tool_choice=_tool_choice(body),
        chat_template_kwargs=_template_kwargs(body),
        include_reasoning=body.thinking is None or body.thinking.type != "disabled",
        reasoning_effort=config.effort,
        thinking_token_budget=_budget(body),
        prompt_cache_retention=ttl,
        **{ours: getattr(body, theirs, None) for ours, theirs in _FIELDS.items()},
    )
    if body.tool_choice is not None:
        chat.parallel_tool_calls = not body.tool_choice.disable_parallel_tool_use
    if config.format is not None:
        chat.response_format = JSONSchemaFormat(JSONSchema("output", config.format.schema))
    # If the assistant has the last message, the answer continues it.
    if conversation[-1].role == "assistant" and not conversation[-1].tool_calls:
        chat.continue_final_message = True
    return chat


def _breakpoint_ttl(body: schema.CountRequest) -> str | None:
    """Return for how long the prefix up to the last cache breakpoint should be kept; None: it names no time.

    Raises:
        InvalidRequestError: there are too many. The one of the whole request, at the end of the prompt, does not count.
    """
    blocks: list[Any] = [*(body.tools or ()), *(body.system if isinstance(body.system, list) else ())]
    for message in body.messages:
        for block in message.content if isinstance(message.content, list) else ():
            inner = block.content if isinstance(block, schema.ToolResultBlock) else None
            blocks += [*(inner if isinstance(inner, list) else ()), block]
    found = [block.cache_control for block in blocks if getattr(block, "cache_control", None) is not None]
    if len(found) > MOST_BREAKPOINTS:
        raise InvalidRequestError(
            f"A maximum of {MOST_BREAKPOINTS} blocks with cache_control may be provided. Found {len(found)}.",
            "cache_control",
        )
    last = body.cache_control or (found[-1] if found else None)
    return last.ttl if last is not None else None


def _part(text: str, cache_control: schema.CacheControl | None) -> ContentPart:
    mark = PromptCacheBreakpoint(ttl=cache_control.ttl) if cache_control is not None else None
    return ContentPart("text", text, prompt_cache_breakpoint=mark)


def _content(parts: list[ContentPart]) -> str | list[ContentPart] | None:
    plain = len(parts) == 1 and parts[0].prompt_cache_breakpoint is None
    return parts[0].text if plain else parts or None


def _system(body: schema.CountRequest) -> list[ChatMessage]:
    given = body.system or []
    blocks = [schema.OnlyText("text", given)] if isinstance(given, str) else given
    parts = [_part(_without_billing(block.text), block.cache_control) for block in blocks]
    content = _content([part for part in parts if part.text.strip()])
    return [ChatMessage("system", content)] if content else []


def _without_billing(text: str) -> str:
    if _BILLING not in text:
        return text
    return "\n".join(line for line in text.split("\n") if not line.startswith(_BILLING))


def _conversation(body: schema.CountRequest) -> list[ChatMessage]:
    messages = [one for number, given in enumerate(body.messages) for one in _messages(given, f"messages[{number}]")]
    if not messages:
        raise InvalidRequestError("messages contain nothing that is a part of the prompt", "messages")
    return messages


def _messages(message: schema.InputMessage, location: str) -> list[ChatMessage]:
    """Return the messages of a chat for one message: each result of a tool is a message of its own."""
    if isinstance(message.content, str):
        return [ChatMessage(message.role, message.content)]
    texts: list[ContentPart] = []
    thoughts: list[str] = []
    calls: list[AssistantToolCall] = []
    results: list[ChatMessage] = []
    for number, block in enumerate(message.content):
        if not isinstance(block, _ALLOWED[message.role]):
            where, kind = f"{location}.content[{number}]", block.__struct_config__.tag
            raise InvalidRequestError(f"{where}: blocks of type {kind} are not for the {message.role}", where)
        match block:
            case schema.TextBlock():
                texts.append(_part(block.text, block.cache_control))
            case schema.ToolUseBlock():
                arguments = msgspec.json.encode(block.input).decode()
                calls.append(AssistantToolCall(block.id, CalledFunction(block.name, arguments)))
            case schema.ThinkingBlock():
                thoughts.append(block.thinking)
            case schema.ToolResultBlock():
                results.append(ChatMessage("tool", _result(block), tool_call_id=block.tool_use_id))
    if any((texts, calls, thoughts)):
        reasoning = "\n".join(thoughts) or None
        results.append(ChatMessage(message.role, _content(texts), tool_calls=calls or None, reasoning=reasoning))
    return results


def _result(block: schema.ToolResultBlock) -> str | list[ContentPart]:
    given = [schema.OnlyText("text", block.content)] if isinstance(block.content, str) else block.content or []
    parts = [_part(part.text, part.cache_control) for part in given]
    if parts:
        parts[-1] = _part(parts[-1].text, block.cache_control or given[-1].cache_control)
    return _content(parts) or ""


def _tool_choice(body: schema.CountRequest) -> ToolChoice | None:
    choice = body.tool_choice
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequestError("tool_choice.name is required with the type tool", "tool_choice.name")
        return NamedToolChoice("function", ChosenFunction(choice.name))
    return "required" if choice.type == "any" else "none" if choice.type == "none" else "auto"


def _budget(body: schema.CountRequest) -> int | None:
    return body.thinking.budget_tokens if body.thinking is not None and body.thinking.type == "enabled" else None


def _template_kwargs(body: schema.CountRequest) -> dict[str, object] | None:
    if body.thinking is None or body.thinking.type == "adaptive":
        return body.chat_template_kwargs
    return thinking_variables(body.thinking.type == "enabled") | (body.chat_template_kwargs or {})


# ---- the answer ----

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_EMPTY: dict[str, dict[str, str]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {},
}
"""The first texts of a block of each type."""
_DELTAS: dict[str, tuple[Literal["text_delta", "thinking_delta", "input_json_delta"], str]] = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""The type of the delta that continues a block of each type, and the field of its text."""


class MessageAnswer(EventAnswer):
    """Turns the output of a chat into a message: one JSON body, or events. The texts of events are not kept."""

    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'
    kinds: ClassVar[Mapping[DeltaKind, str]] = {
        "content": "text",
        "reasoning": "thinking",
        "call": "tool_use",
        "arguments": "tool_use",
    }

    def __init__(self, run: ChatRun, message_id: str) -> None:
        super().__init__(run)
        self._text: list[str] = []  # of the block that is open
        self._open: schema.OutputBlock | None = None
        self._streams = bool(run.body.stream)
        self._message = schema.Message(
            message_id, run.body.model or run.service.limits.model_name, [], schema.MessageUsage(0, 0)
        )

    def error(self, error: APIError) -> bytes:
        """Return the event that ends a stream which has failed."""
        return as_bytes(schema.MessageEvent("error", error=error_detail(error)))

    def _begin(self) -> Iterator[schema.MessageEvent]:
        self._message.usage = self._usage()
        yield schema.MessageEvent("message_start", message=self._message)

    def _response_body(self) -> schema.Message:
        return self._message

    def _take(self, new: Delta) -> Iterator[Event]:
        if new.kind != "reasoning" or self._run.body.include_reasoning:
            yield from super()._take(new)

    def _open_item(self, kind: str, new: Delta) -> Iterator[schema.MessageEvent]:
        block = schema.OutputBlock(kind, **_EMPTY[kind])  # type: ignore[arg-type]
        if kind == "tool_use":
            block.id, block.name, block.input = self._run.call_id(new.call_id), new.text, {}
        if not self._streams:
            self._message.content.append(block)
        self._open, self._text = block, []
        yield schema.MessageEvent("content_block_start", index=self._num_items - 1, content_block=block)

    def _extend(self, kind: str, text: str) -> schema.MessageEvent:
        if not self._streams:
            self._text.append(text)
        delta, field = _DELTAS[kind]
        return schema.MessageEvent(
            "content_block_delta", index=self._num_items - 1, delta=schema.BlockDelta(delta, **{field: text})
        )

    def _close(self) -> Iterator[schema.MessageEvent]:
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
        yield schema.MessageEvent("content_block_stop", index=self._num_items - 1)

    def _finish(self, delta: SequenceDelta) -> Iterator[schema.MessageEvent]:
        if delta.finish_reason == "abort":  # Anthropic's API has no such stop reason, and the message is not complete
            yield schema.MessageEvent("error", error=error_detail(ended_early()))
            return
        yield from self._close()
        message, reason = self._message, finish_reason(delta, self._parser) or ""
        message.stop_reason, message.usage = _REASONS.get(reason, "end_turn"), self._usage()
        if reason == "stop" and isinstance(delta.stop_reason, str):
            message.stop_reason, message.stop_sequence = "stop_sequence", delta.stop_reason
        ending = schema.BlockDelta(stop_reason=message.stop_reason, stop_sequence=message.stop_sequence)
        yield schema.MessageEvent("message_delta", delta=ending, usage=message.usage)
        yield schema.MessageEvent("message_stop")

    def _usage(self) -> schema.MessageUsage:
        usage = usage_of(self._run.live)
        cached = usage.prompt_tokens_details.cached_tokens
        return schema.MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)


def _input(arguments: str) -> dict[str, object]:
    """Return the arguments of a call as an object, which is empty if they were cut off."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {}


# ---- errors ----

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's types of errors by status; others below 500 are invalid_request_error, the rest api_error."""

_NAMES = {"max_completion_tokens": "max_tokens", "response_format": "output_config.format"}
"""The fields of a chat that have other names in this API."""


def error_detail(error: APIError) -> schema.MessageErrorDetail:
    """Return the detail of an error in Anthropic's shape, which has OpenAI's fields as well."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    if not isinstance(error, UnknownParameterError):  # which names the field that the client sent
        error.rename(_NAMES)
    detail = schema.MessageErrorDetail(kind, str(error), error.param, error.code)
    # This makes the tool runner of Anthropic's SDK send all messages each time.
    if error.param == "thread":
        detail.details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return detail


def error_response(request: web.Request, error: APIError) -> web.Response:
    """Return the response for an error, in the shape of the API that the request is for."""
    response = error.response()
    if is_messages(request):
        response.body = msgspec.json.encode(schema.MessageError(error_detail(error), request[CLIENT_REQUEST_ID]))
    return response
