"""Finds the formats in which a model writes tool calls and reasoning, from its chat template and its family.

The chat template writes earlier calls of a conversation as the model has learnt to write them. So the gateway renders
a call, and chooses the parser that reads the same call from the text.
"""

import json
from typing import NamedTuple

from pagewise_gateway.structured.call_shapes import SHAPES
from pagewise_gateway.text.output_parsing import TOOL_FORMATS, MessageParser, OutputFormat, Tools, joined, make_format
from pagewise_gateway.text.output_parsing.formats import HARMONY_REASONING, HARMONY_TOOLS, REASONING_FORMATS
from pagewise_gateway.text.template import PROBE_CALL, ChatTemplate

AUTO, NONE = "auto", "none"
_FAMILIES = {
    "deepseek_v32": "deepseek_v32",
    "gemma4": "gemma4",
    "gemma4_text": "gemma4",
    "glm4_moe": "glm45",
    "gpt_oss": HARMONY_TOOLS,
    "kimi_k2": "kimi_k2",
    "kimi_k25": "kimi_k2",
    "minimax_m2": "minimax_m2",
    "qwen3_5": "qwen3_coder",
    "qwen3_5_moe": "qwen3_coder",
}
"""Parsers of families by the ``model_type`` of their configurations, where the template does not show the format."""
_THINKING = {
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v3",
    "deepseek_v32": "deepseek_v3",
    "glm45": "glm45",
    "glm47": "glm47",
    "kimi_k2": "kimi_k2",
    "minimax_m2": "minimax_m2",
    "nemotron_json": "nemotron_v3",
}
"""Parsers of reasoning between ``<think>`` and ``</think>`` by the parser of calls; qwen3 reads all others."""
_TOOLS = Tools({PROBE_CALL[0]: {"type": "object", "properties": {"probe_key": {"type": "string"}}}})


class Found(NamedTuple):
    """The name of a parser, and the reason for it. ``name``: None if the format is unknown."""

    name: str | None
    reason: str


def find_tool_parser(given: str, template: ChatTemplate, model_type: str) -> Found:
    """Return the parser of tool calls. ``given``: the value of ``--tool-call-parser``."""
    if given != AUTO:
        return Found(None if given == NONE else given, "as --tool-call-parser says")
    if not template.texts:
        return Found(None, "the model has no chat template")
    if found := [name for name in TOOL_FORMATS if any(_reads(name, text) for text in template.written_calls)]:
        return Found(max(found, key=lambda name: _likeness(name, template)), "the chat template writes calls in it")
    if model_type in _FAMILIES:
        return Found(_FAMILIES[model_type], f"it is the format of the family {model_type}")
    return Found(None, "the chat template writes no calls, or in no format that is known here")


def find_reasoning_parser(given: str, tool_parser: str | None, template: ChatTemplate) -> Found:
    """Return the parser of reasoning. ``given``: the value of ``--reasoning-parser``."""
    if given != AUTO:
        return Found(None if given == NONE else given, "as --reasoning-parser says")
    if tool_parser == HARMONY_TOOLS:
        return Found(HARMONY_REASONING, f"it belongs to {HARMONY_TOOLS}")
    text = "".join(template.texts)
    for name in ("gemma4", "mistral", _THINKING.get(tool_parser or "", "qwen3"), "deepseek_r1"):
        reasoning = REASONING_FORMATS[name]
        assert reasoning is not None
        opening, closing = (reasoning.tokens or (reasoning.opening,))[0], reasoning.closing
        if closing in text and (opening in text or name == "deepseek_r1"):  # whose template may leave the opening out
            return Found(name, f"the chat template has {closing}")
    return Found(None, "the chat template has no delimiters of reasoning that are known here")


def _reads(name: str, text: str) -> bool:
    """Whether a parser reads the call from the text that the template writes."""
    output: OutputFormat | None = make_format(name, None)
    assert output is not None
    parser = MessageParser(output, "main", _TOOLS)
    calls = joined([*parser.push(text), *parser.finish()]).calls
    if len(calls) != 1 or calls[0].name != PROBE_CALL[0]:
        return False
    try:
        return bool(json.loads(calls[0].arguments) == json.loads(PROBE_CALL[1]))
    except ValueError:
        return False


def _likeness(name: str, template: ChatTemplate) -> int:
    """Return the number of characters before the arguments of a call that equal the grammar's; -1: they differ."""
    before = SHAPES[name].before.replace("NAME", PROBE_CALL[0]).partition("NUMBER")[0]
    return len(before) if any(before in text for text in template.written_calls) else -1
