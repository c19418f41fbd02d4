"""The formats in which models write tool calls, for grammars. A grammar allows only the text that the model has learnt.

The parsers in ``text.output_parsing.formats`` read more variants of a format.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from pagewise_gateway.text.output_parsing.formats import HARMONY_TOOLS


class Pair(NamedTuple):
    """The format of a parameter: ``before``, which contains NAME, the value, ``closing`` and ``after``.

    Fields:
        before: STRING in it is replaced by "true" or "false": whether the value is a string.
        padding: the text after values that are no free text.
    """

    before: str
    closing: str
    after: str = ""
    padding: str = ""


@dataclass(slots=True, frozen=True)
class Shape:
    """The format of calls: ``before``, which contains NAME and may contain NUMBER, then the arguments, and ``after``.

    Fields:
        between: the text between two calls. opening, closing: the texts around all calls.
        trigger: the text that begins calls in free text. If it is empty, calls are the whole text, and begin with
            ``begins``.
        arguments: the format of the arguments: JSON, keyword arguments of Python, Gemma's objects, or names and values.
    """

    before: str
    after: str
    between: str
    opening: str = ""
    closing: str = ""
    trigger: str = ""
    begins: str = ""
    arguments: Literal["json", "python", "gemma"] | Pair = "json"

    def without_trigger(self) -> "Shape":
        """Return the format of the text after the trigger."""
        if self.opening:
            return replace(self, opening=self.opening.removeprefix(self.trigger))
        return replace(self, before=self.before.removeprefix(self.trigger))


MISTRAL_LIST = Shape('{"name": "NAME", "arguments": ', "}", ", ", "[TOOL_CALLS][", "]", trigger="[TOOL_CALLS]")
_BEGINS = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
_ENDS = "<\uff5ctool\u2581calls\u2581end\uff5c>"
_BEGIN, _END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
_DSML = "\uff5cDSML\uff5c"
_GLM_45 = Pair("<arg_key>NAME</arg_key>\n<arg_value>", "</arg_value>", "\n")
_GLM_47 = Pair("<arg_key>NAME</arg_key><arg_value>", "</arg_value>")
_QWEN = Pair("<parameter=NAME>\n", "</parameter>", "\n", "\n")
_MINIMAX = Pair('<parameter name="NAME">', "</parameter>", "\n")
_DEEPSEEK = Pair(f'<{_DSML}parameter name="NAME" string="STRING">', f"</{_DSML}parameter>", "\n")
_CODER = Shape(
    "<function=NAME>\n",
    "</function>",
    "\n</tool_call>\n<tool_call>\n",
    "<tool_call>\n",
    "\n</tool_call>",
    trigger="<tool_call>",
    arguments=_QWEN,
)
SHAPES = {
    "deepseek_v3": Shape(
        f"{_BEGIN}function{_SEPARATOR}NAME\n```json\n", f"\n```{_END}", "\n", _BEGINS, _ENDS, trigger=_BEGINS
    ),
    "deepseek_v31": Shape(f"{_BEGIN}NAME{_SEPARATOR}", _END, "", _BEGINS, _ENDS, trigger=_BEGINS),
    "deepseek_v32": Shape(
        f'<{_DSML}invoke name="NAME">\n',
        f"</{_DSML}invoke>\n",
        "",
        f"<{_DSML}function_calls>\n",
        f"</{_DSML}function_calls>",
        trigger=f"<{_DSML}function_calls>",
        arguments=_DEEPSEEK,
    ),
    "gemma4": Shape("<|tool_call>call:NAME{", "}<tool_call|>", "", trigger="<|tool_call>", arguments="gemma"),
    "glm45": Shape("<tool_call>NAME\n", "</tool_call>", "\n", trigger="<tool_call>", arguments=_GLM_45),
    "glm47": Shape("<tool_call>NAME", "</tool_call>", "", trigger="<tool_call>", arguments=_GLM_47),
    "hermes": Shape('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "\n", trigger="<tool_call>"),
    "kimi_k2": Shape(
        "<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        trigger="<|tool_calls_section_begin|>",
    ),
    "llama3_json": Shape('{"name": "NAME", "parameters": ', "}", "; ", begins="{"),
    "mistral": Shape("[TOOL_CALLS]NAME[ARGS]", "", "", trigger="[TOOL_CALLS]"),
    "minimax_m2": Shape(
        '<invoke name="NAME">\n',
        "</invoke>\n",
        "",
        "<minimax:tool_call>\n",
        "</minimax:tool_call>",
        trigger="<minimax:tool_call>",
        arguments=_MINIMAX,
    ),
    "nemotron_json": Shape(
        '{"name": "NAME", "arguments": ', "}", ", ", "<TOOLCALL>[", "]</TOOLCALL>", trigger="<TOOLCALL>"
    ),
    HARMONY_TOOLS: Shape("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "", ""),
    "pythonic": Shape("NAME(", ")", ", ", "[", "]", begins="[", arguments="python"),
    "qwen3_coder": _CODER,
    "qwen3_xml": _CODER,
}
"""By the names of parsers. gpt-oss makes one call at a time."""
