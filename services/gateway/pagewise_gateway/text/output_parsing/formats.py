"""The formats in which models write reasoning and tool calls, by the names of vLLM's parsers."""

from dataclasses import dataclass
from functools import cache
from typing import Literal

from pagewise_gateway.text.output_parsing import harmony
from pagewise_gateway.text.output_parsing.gemma import QUOTE, gemma_call
from pagewise_gateway.text.output_parsing.json_calls import deepseek_call, json_calls, kimi_call, mistral_calls
from pagewise_gateway.text.output_parsing.pythonic import pythonic_calls
from pagewise_gateway.text.output_parsing.reader import Read
from pagewise_gateway.text.output_parsing.tagged import DSML_TAGS, GLM_TAGS, MINIMAX_TAGS, QWEN_TAGS, TaggedCall, Tags

Start = Literal["main", "ended", "reasoning", "implied"]
"""The state in which an output begins. "main": it may open reasoning; "ended": the prompt has ended the reasoning;
"reasoning": the prompt has begun it; "implied": it begins with reasoning, and may open it nevertheless."""


@dataclass(slots=True, frozen=True)
class ToolFormat:
    """The format of a model's tool calls.

    Fields:
        read: reads the calls after a marker.
        opening, closing: the markers before and after a call; closing empty: the next marker ends it.
        group: the markers around several calls, each with its opening and closing. inner: delimiters within calls.
        bare: if a text begins with one of these characters, it is read as calls without a marker.
        id_length: characters of the ids of calls; 0: any number.
    """

    read: Read
    opening: str = ""
    closing: str = ""
    group: tuple[str, str] | None = None
    inner: tuple[str, ...] = ()
    bare: str = ""
    id_length: int = 0

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may begin calls."""
        return tuple(filter(None, (self.opening, self.group and self.group[0])))


@dataclass(slots=True, frozen=True)
class ReasoningFormat:
    """The delimiters of a model's reasoning.

    Fields:
        opening, closing: the texts before and after reasoning. tokens: special tokens that are parts of them.
        implied: the text begins with reasoning even without the opening.
        ended_by: texts that end reasoning without the closing, because calls begin there.
    """

    opening: str
    closing: str
    implied: bool = False
    tokens: tuple[str, ...] = ()
    ended_by: tuple[str, ...] = ()


def _tagged(tags: Tags, opening: str, closing: str, group: tuple[str, str] | None, *tokens: str) -> ToolFormat:
    """Return a format whose parameters have tags. ``tokens``: special tokens that are parts of delimiters."""
    borders = (opening, closing, *(group or ()))
    return ToolFormat(TaggedCall(tags, borders), opening, closing, group, (*tags.inner, *tokens))


_THINK = ReasoningFormat("<think>", "</think>")
_QWEN = _tagged(QWEN_TAGS, "<function=", "</function>", ("<tool_call>", "</tool_call>"))
_GLM = _tagged(GLM_TAGS, "<tool_call>", "</tool_call>", None)
_KIMI_SECTION = "<|tool_calls_section_begin|>"
_GEMMA_CALL = "<|tool_call>"
_DEEPSEEK = ToolFormat(
    deepseek_call,
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
    ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"),
    ("<\uff5ctool\u2581sep\uff5c>",),
)

NO_TOOLS = ToolFormat(lambda source, _: json_calls(source))
"""The output has no calls."""
HARMONY_TOOLS, HARMONY_REASONING = "openai", "openai_gptoss"

TOOL_FORMATS: dict[str, ToolFormat] = {
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "deepseek_v32": _tagged(
        DSML_TAGS,
        "<\uff5cDSML\uff5cinvoke name=",
        "</\uff5cDSML\uff5cinvoke>",
        ("<\uff5cDSML\uff5cfunction_calls>", "</\uff5cDSML\uff5cfunction_calls>"),
        "\uff5cDSML\uff5c",
    ),
    "gemma4": ToolFormat(gemma_call, _GEMMA_CALL, "<tool_call|>", inner=(QUOTE,)),
    "glm45": _GLM,
    "glm47": _GLM,
    "hermes": ToolFormat(lambda source, _: json_calls(source), "<tool_call>", "</tool_call>"),
    "kimi_k2": ToolFormat(
        kimi_call,
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        (_KIMI_SECTION, "<|tool_calls_section_end|>"),
        ("<|tool_call_argument_begin|>",),
    ),
    "llama3_json": ToolFormat(json_calls, "<|python_tag|>", bare="{"),
    "minimax_m2": _tagged(MINIMAX_TAGS, "<invoke name=", "</invoke>", ("<minimax:tool_call>", "</minimax:tool_call>")),
    "mistral": ToolFormat(mistral_calls, "[TOOL_CALLS]", inner=("[ARGS]", "[CALL_ID]"), id_length=9),
    "nemotron_json": ToolFormat(lambda source, _: json_calls(source), "<TOOLCALL>", "</TOOLCALL>"),
    HARMONY_TOOLS: NO_TOOLS,  # the scanner of harmony finds its calls
    "pythonic": ToolFormat(pythonic_calls, bare="[`"),
    "qwen3_coder": _QWEN,
    "qwen3_xml": _QWEN,
}
"""By the names of vLLM's ``--tool-call-parser``."""

REASONING_FORMATS: dict[str, ReasoningFormat | None] = {
    "deepseek_r1": ReasoningFormat("<think>", "</think>", implied=True),
    "deepseek_v3": _THINK,
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>", tokens=("<|channel>",), ended_by=(_GEMMA_CALL,)),
    "glm45": _THINK,
    "glm47": _THINK,
    "kimi_k2": ReasoningFormat("<think>", "</think>", implied=True, ended_by=(_KIMI_SECTION,)),
    "minimax_m2": ReasoningFormat("<think>", "</think>", implied=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "nemotron_v3": _THINK,
    HARMONY_REASONING: None,
    "qwen3": _THINK,
}
"""By the names of vLLM's ``--reasoning-parser``."""


@dataclass(slots=True, frozen=True)
class OutputFormat:
    """The format of an output, as far as it is parsed.

    Fields:
        tools, reasoning: the formats of these parts; NO_TOOLS or None: they are content.
        harmony: whether headers announce the kind of the text after them.
    """

    tools: ToolFormat = NO_TOOLS
    reasoning: ReasoningFormat | None = None
    harmony: bool = False

    @property
    def delimiters(self) -> tuple[str, ...]:
        """Texts that the parser needs, also if they are special tokens."""
        found = list(harmony.DELIMITERS) if self.harmony else []
        if self.reasoning is not None:
            found += self.reasoning.opening, self.reasoning.closing, *self.reasoning.tokens, *self.reasoning.ended_by
        found += *self.tools.markers, *(self.tools.group or ()), *self.tools.inner, self.tools.closing
        return tuple(dict.fromkeys(filter(None, found)))

    def start(self, prompt: str, continued: str | None) -> Start:
        """Return the start of an output. Chat templates may begin the reasoning, or begin and end it.

        ``prompt``: its end. ``continued``: the ``last_border`` of the message that the output continues; None: it
        begins a message.
        """
        prompt, reasoning = prompt.rstrip(), self.reasoning
        if reasoning is None:
            return "main"
        if continued is not None:
            return "reasoning" if continued == reasoning.opening else "main"
        if prompt.endswith(reasoning.closing):
            return "ended"
        if prompt.endswith(reasoning.opening):
            return "reasoning"
        return "implied" if reasoning.implied else "main"

    def last_border(self, message: str) -> str:
        """Return the last delimiter of reasoning in the beginning of a message; an empty text: there is none."""
        if self.reasoning is None:
            return ""
        if self.reasoning.closing in message:
            return self.reasoning.closing
        return self.reasoning.opening if message.lstrip().startswith(self.reasoning.opening) else ""


@cache
def make_format(tool_parser: str | None, reasoning_parser: str | None) -> OutputFormat | None:
    """Return the format of these parsers; None if neither is given.

    Raises:
        KeyError: there is no parser of that name.
    """
    if tool_parser is None and reasoning_parser is None:
        return None
    tools = TOOL_FORMATS[tool_parser] if tool_parser is not None else NO_TOOLS
    reasoning = REASONING_FORMATS[reasoning_parser] if reasoning_parser is not None else None
    if tool_parser == HARMONY_TOOLS or reasoning_parser == HARMONY_REASONING:
        return OutputFormat(tools, harmony=True)
    return OutputFormat(tools, reasoning)
