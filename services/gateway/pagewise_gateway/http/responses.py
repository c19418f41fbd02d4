"""The bodies of responses: OpenAI's shapes, extended by vLLM's fields.

A field that is UNSET is left out of the JSON; one that is None becomes null, as in OpenAI's API.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from pagewise_shared.config.sampling_defaults import SamplingDefaults


class PromptTokensDetails(Struct):
    """The number of the prompt's tokens that were found in the cache."""

    cached_tokens: int


class Usage(Struct):
    """Token counts of a request, summed over its prompts and outputs."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(Struct):
    """Log-probabilities of text completions: one entry per token in each list.

    ``text_offset``: the position in the choice's text at which the token starts, in characters.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    """One output of a text completion, or a part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionResponse(Struct):
    """Answer of ``/v1/completions``, and every chunk of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | UnsetType | None = UNSET


class TokenLogprob(Struct):
    """A token's log-probability. ``bytes``: the token's UTF-8, which may be part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenTokenLogprob(TokenLogprob):
    """A token of the output, its log-probability, and the most likely alternatives, best first."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Struct):
    """Log-probabilities of chat completions."""

    content: list[ChosenTokenLogprob]


class FunctionCall(Struct):
    """A function that the model calls. ``arguments``: a JSON object as text, unless it was cut off."""

    name: str
    arguments: str


class ToolCall(Struct):
    """A call of a tool."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class AssistantMessage(Struct):
    """The reply. ``reasoning`` and ``reasoning_content`` are the same: vLLM's name for it, and vLLM's former name."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: str | None = None
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    """One output of a chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatResponse(Struct):
    """Answer of ``/v1/chat/completions``."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET


class FunctionCallDelta(Struct):
    """A part of a call: first its name, then its arguments in pieces."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """A part of the call with this index. The first part has its id and type."""

    index: int
    function: FunctionCallDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Struct):
    """A part of the reply."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """A part of one output."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct):
    """A chunk of a stream of ``/v1/chat/completions``."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Model(Struct):
    """A model that is served, or an adapter of it.

    ``max_model_len``: null until an executor has joined. ``root``: for operators its folder or hub id, for others its
    name. ``parent``: of an adapter, the name of the model. ``sampling_defaults``: values for parameters
    that requests do not give (``--generation-config``). ``tool_call_parser``, ``reasoning_parser``: the formats of tool
    calls and reasoning; null: the format is unknown, or is not parsed.
    """

    id: str
    created: int
    max_model_len: int | None
    root: str
    sampling_defaults: SamplingDefaults
    tool_call_parser: str | None
    reasoning_parser: str | None
    parent: str | None = None
    object: Literal["model"] = "model"
    owned_by: str = "pagewise"


class ModelList(Struct):
    """Answer of ``/v1/models``."""

    data: list[Model]
    object: Literal["list"] = "list"


class TokenizeResponse(Struct):
    """Answer of ``/tokenize``."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class RenderResponse(Struct):
    """Answer of ``/v1/chat/completions/render``: the rendered conversation, and its tokens."""

    prompt: str
    prompt_token_ids: list[int]


class DetokenizeResponse(Struct):
    """Answer of ``/detokenize``."""

    prompt: str


class Health(Struct):
    """Answer of ``/health``: the number of ready executors, and whether the scheduler answers.

    ``problems``: a sentence for each process of the server that restarts repeatedly and does not become ready.
    """

    status: str
    executors: int
    scheduler: bool
    problems: list[str] = []


class Version(Struct):
    """Answer of ``/version``."""

    version: str
