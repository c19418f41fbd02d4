"""Cuts the text of an output into reasoning, content and tool calls, while it arrives.

``parser`` finds where reasoning, content and calls begin and end, and ``harmony`` does in the outputs of gpt-oss;
``message`` makes deltas of them. ``formats`` has the formats of models, by the names of vLLM's parsers. ``json_calls``,
``glm`` and ``pythonic`` read calls, and ``reader`` runs them.
"""

from pagewise_gateway.text.output_parsing.deltas import Delta, Tools, joined
from pagewise_gateway.text.output_parsing.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    OutputFormat,
    Start,
    make_format,
)
from pagewise_gateway.text.output_parsing.parser import MessageParser, make_plain

__all__ = [
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "Delta",
    "MessageParser",
    "OutputFormat",
    "Start",
    "Tools",
    "joined",
    "make_format",
    "make_plain",
]
