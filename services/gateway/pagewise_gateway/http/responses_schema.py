"""The bodies of ``/v1/responses``: OpenAI's shapes, without the fields that need a store of earlier responses."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from pagewise_gateway.http.hints_schema import CacheSalt, PromptCacheBreakpoint, ReuseFields
from pagewise_gateway.http.schema import MAX_SCHEMA_NAME, SCHEMAS, Ignored, TemplateKwargs
from pagewise_gateway.http.thinking_schema import ReasoningEffort, ThinkingTokens
from pagewise_gateway.http.tools_schema import MAX_TOOLS, FunctionName, Id

MAX_ITEMS = 4096
_ITEMS = (
    "A text, or items of the types message, reasoning, function_call and function_call_output. An item without a type "
    f"is a message. At most {MAX_ITEMS}."
)

_TOOLS = "Functions. Tools of the other types are left out if there are functions beside them; alone, they are refused."


class InputText(Struct, forbid_unknown_fields=True):
    """A text in an item. ``annotations`` and ``logprobs``, which earlier answers had, have no effect."""

    text: str
    type: Literal["input_text", "output_text", "reasoning_text", "text"]
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class MessageItem(Struct, forbid_unknown_fields=True):
    """A message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class ReasoningItem(Struct, forbid_unknown_fields=True):
    """The model's reasoning. Its summary has no effect."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Any] | None = None
    content: list[InputText] | None = None
    status: str | None = None


class FunctionCallItem(Struct, forbid_unknown_fields=True):
    """A function that the model has called."""

    type: Literal["function_call"]
    call_id: Id
    name: FunctionName
    arguments: str
    id: str | None = None
    status: str | None = None


class FunctionOutputItem(Struct, forbid_unknown_fields=True):
    """The result of a function."""

    type: Literal["function_call_output"]
    call_id: Id
    output: str | list[InputText]
    id: str | None = None
    status: str | None = None


class FunctionTool(Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """A function that the model may call. ``strict``: whether its arguments have to follow ``parameters``.

    The last three fields have no effect: the model sees every function, and calls it itself.
    """

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: dict[str, Any] | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None


class WebSearchTool(Struct, tag_field="type", tag="web_search"):
    """A search that OpenAI's server runs. It is left out if there are functions, and so are the next four."""


class ImageGenerationTool(Struct, tag_field="type", tag="image_generation"):
    """Images that OpenAI's server makes."""


class ToolSearchTool(Struct, tag_field="type", tag="tool_search"):
    """A search for tools whose loading is deferred."""


class NamespaceTool(Struct, tag_field="type", tag="namespace"):
    """Functions below a common name."""


class CustomTool(Struct, tag_field="type", tag="custom"):
    """A tool whose input is free text."""


ResponseTool = FunctionTool | WebSearchTool | ImageGenerationTool | ToolSearchTool | NamespaceTool | CustomTool


class NamedFunction(Struct, forbid_unknown_fields=True):
    """The one function that has to be called."""

    type: Literal["function"]
    name: FunctionName


class PlainText(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text."""


class JSONObject(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JSONSchemaText(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """A JSON text that matches a schema."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_SCHEMA_NAME)]
    schema: Annotated[dict[str, Any], Meta(description=SCHEMAS)]
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct, forbid_unknown_fields=True):
    """The format of the answer's text. ``verbosity`` has no effect."""

    format: PlainText | JSONObject | JSONSchemaText | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Struct, forbid_unknown_fields=True):
    """``effort``: a variable of the chat template. There are no summaries, and the template decides how much reasoning
    is kept."""

    effort: ReasoningEffort | None = None
    max_tokens: ThinkingTokens | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None


class ResponseStreamOptions(Struct, forbid_unknown_fields=True):
    """Options of a stream, which contains nothing besides its text."""

    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(ReuseFields, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/responses``. Nothing is stored: ``store`` is false by default."""

    input: Annotated[str | list[dict[str, Any]], Meta(description=_ITEMS)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS, description=_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: Annotated[bool, Meta(description="Only false: nothing is stored.")] | None = None
    previous_response_id: Annotated[str, Meta(description="Not supported: nothing is stored.")] | None = None
    background: Annotated[bool, Meta(description="Only false.")] | None = None
    include: (
        Annotated[list[str], Meta(max_length=16, description="Accepted if empty or reasoning.encrypted_content.")]
        | None
    ) = None
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=16, description="Returned as it is."),
        ]
        | None
    ) = None
    chat_template_kwargs: TemplateKwargs | None = None
    cache_salt: CacheSalt | None = None
    user: Ignored | None = None
    safety_identifier: Ignored | None = None
    client_metadata: (
        Annotated[dict[str, Any], Meta(max_length=64, description="Accepted, and without any effect.")] | None
    ) = None


class InputDetails(Struct):
    """The number of input tokens that were found in the cache."""

    cached_tokens: int


class OutputDetails(Struct):
    """The number of reasoning tokens of the output, which are not counted separately."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Struct):
    """Why a response is incomplete."""

    reason: str


class OutputText(Struct):
    """A text of the answer."""

    text: str
    type: Literal["output_text", "reasoning_text"] = "output_text"
    annotations: list[Any] | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET


class OutputItem(Struct):
    """An item of the answer: a message, a call, or reasoning."""

    id: str
    type: Literal["message", "function_call", "reasoning"]
    status: str = "in_progress"
    role: str | UnsetType = UNSET
    content: list[OutputText] | UnsetType = UNSET
    summary: list[Any] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ResponseError(Struct):
    """Why a response has failed."""

    code: str
    message: str


class Response(Struct):
    """Answer of ``/v1/responses``. The fields that it repeats of the request are JSON already."""

    id: str
    created_at: int
    model: str
    output: list[OutputItem]
    status: str
    parallel_tool_calls: bool
    tool_choice: Raw
    tools: Raw
    text: Raw
    reasoning: Raw
    instructions: Raw
    metadata: Raw
    object: Literal["response"] = "response"
    usage: ResponseUsage | None = None
    incomplete_details: IncompleteDetails | None = None
    error: ResponseError | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    store: bool = False
    background: bool = False
    previous_response_id: str | None = None
    truncation: str = "disabled"


class ResponseEvent(Struct):
    """An event of a stream; which fields it has depends on its type."""

    type: str
    sequence_number: int
    response: Response | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET
