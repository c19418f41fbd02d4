"""The bodies of requests: OpenAI's parameters, extended by vLLM's.

A field that is null counts as not given. The constraints declared here also appear in ``/openapi.json``. Constraints
that depend on the model (its length, its vocabulary) are checked in ``params`` and ``prompts``.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from pagewise_shared.config.sampling_defaults import Probability, RepetitionPenalty, Temperature, TopK
from pagewise_shared.sampling import MAX_GRAMMAR_BYTES, MAX_LOGIT_BIASES, MAX_LOGPROBS
from pagewise_shared.segments import MAX_SEGMENTS

from pagewise_gateway.http.hints_schema import CacheSalt, PromptCacheBreakpoint, ReuseFields
from pagewise_gateway.http.thinking_schema import (
    ReasoningEffort,
    ReasoningOptions,
    ThinkingTokens,
    thinking_variables,
)
from pagewise_gateway.http.tools_schema import MAX_TOOL_CALLS, AssistantToolCall, Id, ToolChoice, ToolList

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 128
MAX_BAD_WORDS = 128
MAX_PROMPTS = 2048
MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 1024
MAX_TEMPLATE_KWARGS_BYTES = 65_536
MAX_TEMPLATE_KWARGS_DEPTH = 64
MAX_IGNORED_CHARACTERS = 1024
MAX_SCHEMA_NAME = 64
MAX_STRUCTURES = 128
MAX_CHOICES = 16_384
SCHEMAS = (
    f"A JSON schema that takes at most {MAX_GRAMMAR_BYTES} bytes. Keywords that cannot be honoured are refused by name."
)

CHARACTERS_PER_TOKEN = 16
ALWAYS_TOKENIZED_CHARACTERS = 65_536
DETOKENIZED_CONTEXTS = 4
ALWAYS_DETOKENIZED_TOKENS = 65_536
LONGEST_TEXT = (
    f"The text may have {CHARACTERS_PER_TOKEN} characters for each token of the model's context length, "
    f"but always {ALWAYS_TOKENIZED_CHARACTERS}."
)

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Ignored = Annotated[str, Meta(max_length=MAX_IGNORED_CHARACTERS, description="Accepted, and without any effect.")]
Stop = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
Alternatives = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
PromptType = Annotated[
    str | list[str | TokenId | list[TokenId]],
    Meta(
        description=f"A text, token ids, or a list of at most {MAX_PROMPTS} texts or lists of token ids.",
    ),
]
_SEGMENT_TEXTS = (
    "They are in the prompt, or in the conversation as the chat template renders it, one behind the other. In "
    "conversations, parts of messages can be marked as segments instead."
)


class StreamOptions(Struct, forbid_unknown_fields=True, frozen=True):
    """Options of a stream.

    ``include_usage``: a last chunk with token counts. ``continuous_usage_stats``: the counts so far in every chunk.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class TextFormat(Struct, forbid_unknown_fields=True, frozen=True, tag_field="type", tag="text"):
    """Any text."""


class JSONObjectFormat(Struct, forbid_unknown_fields=True, frozen=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JSONSchema(Struct, forbid_unknown_fields=True, frozen=True):
    """A JSON schema. The output always matches it, also without ``strict``."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_SCHEMA_NAME)]
    schema: Annotated[dict[str, Any] | bool, Meta(description=SCHEMAS)]
    description: Annotated[str, Meta(max_length=MAX_IGNORED_CHARACTERS)] | None = None
    strict: bool | None = None


class JSONSchemaFormat(Struct, forbid_unknown_fields=True, frozen=True, tag_field="type", tag="json_schema"):
    """A JSON text that matches a schema."""

    json_schema: JSONSchema


class Structure(Struct, forbid_unknown_fields=True, frozen=True):
    """A JSON text that matches a schema, between two texts."""

    begin: Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
    schema: Annotated[dict[str, Any] | bool, Meta(description=SCHEMAS)]
    end: Annotated[str, Meta(max_length=MAX_STOP_CHARACTERS)]


class StructuralTag(Struct, forbid_unknown_fields=True, frozen=True, tag_field="type", tag="structural_tag"):
    """Any text, in which each of ``triggers`` begins one of the structures."""

    structures: Annotated[list[Structure], Meta(min_length=1, max_length=MAX_STRUCTURES)]
    triggers: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]],
        Meta(min_length=1, max_length=MAX_STRUCTURES),
    ]


ResponseFormat = TextFormat | JSONObjectFormat | JSONSchemaFormat | StructuralTag


class StructuredOutputs(Struct, forbid_unknown_fields=True, frozen=True):
    """The format of the output: exactly one of the first six; the others are options of JSON."""

    json: Annotated[dict[str, Any] | bool | str, Meta(description=f"{SCHEMAS} It may be a text.")] | None = None
    json_object: bool | None = None
    regex: (
        Annotated[str, Meta(max_length=MAX_GRAMMAR_BYTES, description="It matches the whole output; no look-around.")]
        | None
    ) = None
    choice: (
        Annotated[
            list[str], Meta(min_length=1, max_length=MAX_CHOICES, description="The output is one of these texts.")
        ]
        | None
    ) = None
    grammar: (
        Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_BYTES, description="In Lark's form, or in GBNF.")]
        | None
    ) = None
    structural_tag: Annotated[
        StructuralTag | str | None, Meta(description="It may be a text that contains the JSON object.")
    ] = None
    disable_any_whitespace: Annotated[
        bool | None, Meta(description="Whether there is no whitespace between the tokens of JSON.")
    ] = None
    disable_additional_properties: Annotated[
        bool | None, Meta(description="Whether objects whose schemas name properties have no others.")
    ] = None
    whitespace_pattern: (
        Annotated[
            str,
            Meta(max_length=MAX_STOP_CHARACTERS, description="A regular expression: whitespace that JSON may have."),
        ]
        | None
    ) = None


class Segments(Struct, forbid_unknown_fields=True, frozen=True):
    """Stretches of the prompt whose KV is computed without the text before them, and reused at any position."""

    texts: (
        Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=MAX_SEGMENTS, description=_SEGMENT_TEXTS)]
        | None
    ) = None
    ranges: (
        Annotated[
            list[tuple[TokenId, TokenId]],
            Meta(max_length=MAX_SEGMENTS, description="Of a prompt of token ids: first token, and first one behind."),
        ]
        | None
    ) = None
    root: (
        Annotated[
            bool | Annotated[int, Meta(ge=0, le=2**31 - 1)] | str,
            Meta(
                description="The beginning of the prompt that they attend to as well: true for all before the first of "
                "them, which is the default; false for none; a text; or a number of tokens, with ranges."
            ),
        ]
        | None
    ) = None
    boundary: (
        Annotated[
            int,
            Meta(ge=0, le=2**20, description="So many first tokens of each attend to everything before them."),
        ]
        | None
    ) = None


class GenerationFields(ReuseFields, forbid_unknown_fields=True, kw_only=True):
    """The parameters that text completions and chat completions share."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Annotated[TopK, Meta(description="-1 and 0 keep the whole vocabulary.")] | None = None
    min_p: Probability | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    best_of: Annotated[int, Meta(ge=1, description="If it is given, it is n.")] | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Meta(ge=-10, le=10, description="Of beam search; more favours length.")] | None = (
        None
    )
    early_stopping: bool | Literal["never"] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKENS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_LOGIT_BIASES)] | None
    ) = None
    bad_words: Annotated[list[StopString], Meta(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: (
        Annotated[
            int,
            Meta(
                ge=-1,
                description=f"Keep only that many last tokens of the prompt; -1: as many as fit. {LONGEST_TEXT}",
            ),
        ]
        | None
    ) = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: Annotated[
        bool | None, Meta(description="Whether log-probabilities name tokens as token_id:ID instead of their text.")
    ] = None
    priority: (
        Annotated[int, Meta(ge=-(2**31), le=2**31 - 1, description="Lower runs earlier; API keys have a lowest one.")]
        | None
    ) = None
    cache_salt: CacheSalt | None = None
    segments: Segments | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Annotated[
        ResponseFormat | None, Meta(description="The format of the output, as structured_outputs.")
    ] = None
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: ThinkingTokens | None = None
    user: Ignored | None = None
    safety_identifier: Ignored | None = None


class CompletionRequest(GenerationFields, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: PromptType
    echo: bool | None = None
    logprobs: Alternatives | None = None


class ContentPart(Struct, forbid_unknown_fields=True):
    """A part of a message's content."""

    type: Literal["text"]
    text: str
    segment: Annotated[bool | None, Meta(description="Whether its text is a segment of the prompt.")] = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class ChatMessage(Struct, forbid_unknown_fields=True):
    """A message of a conversation. Messages of the assistant may have tool calls instead of a content.

    ``tool_call_id``: of a message of role tool, the call that it answers. ``reasoning`` and ``reasoning_content``: of
    the assistant; they are the same, and the chat template decides whether it is kept. ``parsed``: added by OpenAI's
    SDK, without any effect.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_CONTENT_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[AssistantToolCall], Meta(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: Id | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    parsed: Any = None


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
TemplateKwargs = Annotated[
    dict[str, Any],
    Meta(
        description=f"Variables of the chat template, at most {MAX_TEMPLATE_KWARGS_BYTES} bytes as JSON, and "
        f"{MAX_TEMPLATE_KWARGS_DEPTH} levels deep."
    ),
]


class ChatRequest(GenerationFields, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    tools: ToolList | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Annotated[
        bool | None, Meta(description="Whether one answer may have several calls; true by default.")
    ] = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: Annotated[
        bool | None, Meta(description="Whether the answer has its reasoning; true by default.")
    ] = None
    reasoning: ReasoningOptions | None = None

    def __post_init__(self) -> None:
        """Set the fields that the client gave by the names of ``reasoning``.

        Raises:
            ValueError: the client gave other values for these fields.
        """
        if self.reasoning is None:
            return
        for name, value in self.reasoning.fields().items():
            if getattr(self, name) not in (None, value):
                raise ValueError(f"{name} and reasoning contradict each other")
            setattr(self, name, value)
        if (thinks := self.reasoning.enabled) is not None:
            self.chat_template_kwargs = thinking_variables(thinks) | (self.chat_template_kwargs or {})


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /tokenize``: a prompt or messages."""

    model: str | None = None
    prompt: Annotated[str, Meta(description=LONGEST_TEXT)] | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    tools: ToolList | None = None
    reasoning_effort: ReasoningEffort | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /detokenize``."""

    tokens: Annotated[
        list[TokenId],
        Meta(
            description=f"At most {DETOKENIZED_CONTEXTS} times the model's context length, but always "
            f"{ALWAYS_DETOKENIZED_TOKENS}."
        ),
    ]
    model: str | None = None
