"""Splits the text of an output into reasoning, content and tool calls, while it arrives.

``parser`` finds reasoning, content and calls in a text, and ``harmony`` in the outputs of gpt-oss; ``deltas`` has the
resulting message. ``formats`` lists the formats of models by the names of vLLM's parsers. ``json_calls``, ``tagged``,
``gemma`` and ``pythonic`` are the readers of calls, which ``reader`` runs.
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
