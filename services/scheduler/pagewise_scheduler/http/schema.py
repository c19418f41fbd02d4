"""Request bodies: OpenAI's fields and vLLM's additions. A field that is not here is refused by name."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from pagewise_shared.sampling import MAX_LOGPROBS

MAX_STOPS = 16
MAX_BAD_WORDS = 64
MAX_PROMPTS = 256
MAX_TOKEN_LIST = 65_536

Natural = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
StopTexts = Annotated[list[StopText], Meta(max_length=MAX_STOPS)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """What a stream contains beside text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """Only plain text is produced."""

    type: str


class GenerationFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that both endpoints have. ``null`` means not given."""

    model: str | None = None
    max_tokens: Natural | None = None
    min_tokens: Natural | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: int | None = None
    n: Count | None = None
    stop: StopText | StopTexts | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_TOKEN_LIST)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Annotated[list[StopText], Meta(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_TOKEN_LIST)] | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] | None = None
    user: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None


TokenIds = Annotated[list[TokenId], Meta(min_length=1)]


class CompletionRequest(GenerationFields):
    """Body of ``/v1/completions``."""

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: Logprobs | None = None
    add_special_tokens: bool | None = None


class ContentPart(Struct, forbid_unknown_fields=True):
    """A part of a message's content."""

    type: str
    text: str | None = None


class ChatMessage(Struct, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[ContentPart] | None = None
    name: str | None = None


class ChatRequest(GenerationFields):
    """Body of ``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Natural | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``/tokenize``: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``/detokenize``."""

    model: str | None = None
    tokens: list[TokenId]


HARMLESS: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none",),
    "parallel_tool_calls": (True, False),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1.0, 1),
    "spaces_between_special_tokens": (True,),
    "stop_sequences": ([],),
}
"""Fields that are not supported, with values that ask for nothing: clients send them, so these are let through."""


def decode(kind: type[Any], body: bytes) -> Any:
    """A request body as ``kind``, fields in ``HARMLESS`` and nulls left out.

    Raises:
        msgspec.DecodeError, msgspec.ValidationError: it is no JSON, or not of that shape.
    """
    fields = msgspec.json.decode(body)
    if isinstance(fields, dict):
        known = {field.name for field in msgspec.structs.fields(kind)}
        fields = {
            name: value
            for name, value in fields.items()
            if name in known or not (value is None or value in HARMLESS.get(name, ()))
        }
    return msgspec.convert(fields, kind)
