"""The bodies of ``/v1/messages``: Anthropic's shapes."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from pagewise_gateway.http.hints_schema import CacheHints, CacheSalt, ConversationParams, NvExt, SessionId
from pagewise_gateway.http.schema import MAX_MESSAGES, MAX_STOP_STRINGS, SCHEMAS, StopString, TemplateKwargs
from pagewise_gateway.http.tools_schema import MAX_TOOLS, FunctionName, Id

_IgnoredObject = Annotated[dict[str, Any], Meta(max_length=16, description="Accepted, and without any effect.")]


class CacheControl(Struct, forbid_unknown_fields=True):
    """A cache breakpoint: the prefix that ends here is expected to be used again. ``scope`` has no effect.

    All prefixes are cached. With layers that need snapshots (windows, states), one is taken here. ``ttl``: of the last
    breakpoint, how long the KV of the prompt and its answer should be kept.
    """

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = None


class TextBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A text."""

    text: str
    cache_control: CacheControl | None = None
    citations: Any = None


class OnlyText(Struct, forbid_unknown_fields=True):
    """A text where there is nothing else."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Any = None


class ToolUseBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="tool_use"):
    """A tool that the model has called."""

    id: Id
    name: FunctionName
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Any = None


class ToolResultBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="tool_result"):
    """The result of a tool."""

    tool_use_id: Id
    content: str | list[OnlyText] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class ThinkingBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="thinking"):
    """The model's reasoning. Its signature has no effect."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Struct, forbid_unknown_fields=True, tag_field="type", tag="redacted_thinking"):
    """Reasoning that another server has kept secret; it is left out."""

    data: str


Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock


class InputMessage(Struct, forbid_unknown_fields=True):
    """A message. Results of tools are blocks of the user; the system's are texts."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessageTool(Struct, forbid_unknown_fields=True):
    """A tool that the model may use. ``parameters``: the JSON schema of its input.

    The last four fields have no effect: the model sees every tool, and its input is always streamed as it is written.
    """

    name: FunctionName
    parameters: dict[str, Any] = field(name="input_schema")
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[Any] | None = None
    allowed_callers: list[str] | None = None


class MessageToolChoice(Struct, forbid_unknown_fields=True):
    """Whether tools are used; ``name``: of the tool that the type "tool" requires."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, forbid_unknown_fields=True):
    """Whether the model thinks: the variables ``enable_thinking`` and ``thinking`` of the chat template.

    ``budget_tokens``: with "enabled", the maximum number of thinking tokens, if --reasoning-parser is set.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    display: str | None = None


class JSONOutput(Struct, forbid_unknown_fields=True):
    """A JSON text that matches a schema."""

    type: Literal["json_schema"]
    schema: Annotated[dict[str, Any], Meta(description=SCHEMAS)]


class OutputConfig(Struct, forbid_unknown_fields=True):
    """The format of the answer's text. ``effort``: the variable ``reasoning_effort`` of the chat template."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JSONOutput | None = None


class CountRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/messages/count_tokens``."""

    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    system: str | list[OnlyText] | None = None
    tools: Annotated[list[MessageTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: _IgnoredObject | None = None


class MessagesRequest(CountRequest, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/messages``."""

    max_tokens: Annotated[int, Meta(ge=1)]
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    metadata: (
        Annotated[
            dict[str, Any],
            Meta(max_length=16, description="user_id names the session as Claude Code does; the rest has no effect."),
        ]
        | None
    ) = None
    diagnostics: Annotated[dict[str, Any], Meta(description="Accepted, and without any effect.")] | None = None
    cache_salt: CacheSalt | None = None
    session_id: SessionId | None = None
    cache_hints: CacheHints | None = None
    nvext: NvExt | None = None
    conversation_params: ConversationParams | None = None


class MessageUsage(Struct):
    """Token counts. Cached tokens of the input are counted apart."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class OutputBlock(Struct):
    """A block of the answer."""

    type: Literal["text", "tool_use", "thinking"]
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: dict[str, Any] | UnsetType = UNSET


class Message(Struct):
    """Answer of ``/v1/messages``."""

    id: str
    model: str
    content: list[OutputBlock]
    usage: MessageUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    stop_reason: str | None = None
    stop_sequence: str | None = None


class BlockDelta(Struct):
    """The new part of a block, or of the message."""

    type: Literal["text_delta", "input_json_delta", "thinking_delta"] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    stop_reason: str | UnsetType | None = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessageErrorDetail(Struct):
    """An error. ``param`` and ``code`` are OpenAI's. ``details``: a hint for clients."""

    type: str
    message: str
    param: str | None = None
    code: str | None = None
    details: dict[str, Any] | UnsetType = UNSET


class MessageError(Struct):
    """The body of error responses."""

    error: MessageErrorDetail
    request_id: str
    type: Literal["error"] = "error"


class MessageEvent(Struct):
    """An event of a stream; which fields it has depends on its type."""

    type: str
    error: MessageErrorDetail | UnsetType = UNSET
    message: Message | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: OutputBlock | UnsetType = UNSET
    delta: BlockDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET


class TokenCount(Struct):
    """Answer of ``/v1/messages/count_tokens``."""

    input_tokens: int
