"""What tables of transcripts share: their rows, and the tools that these call."""

from typing import NamedTuple

from pagewise_gateway.text.output_parsing import Tools
from pagewise_gateway.text.output_parsing.deltas import ParsedCall, ParsedMessage

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "note": {"type": ["string", "null"]},
}
TOOLS = Tools({"get_weather": {"type": "object", "properties": PROPERTIES}, "get_time": None, "save": {}})


class Transcript(NamedTuple):
    """A text, and the message in it. ``calls``: names, arguments, and ids if the model writes them. ``prompt``: how the
    prompt ends."""

    name: str
    tool_parser: str | None
    reasoning_parser: str | None
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, ...], ...] = ()
    prompt: str = "<|im_start|>assistant\n"

    @property
    def message(self) -> ParsedMessage:
        return ParsedMessage(self.content, self.reasoning, [ParsedCall(*call) for call in self.calls])


QUOTED = (
    '{"text": "a </tool_call>\\\\", "more": "\\"<tool_call> <think> </think> </tool_call>", '
    '"</tool_call>": ["</tool_call>"]}'
)
"""Arguments that have the delimiters of calls and reasoning inside of strings."""
