"""A chat that runs, for whatever makes an answer of its output."""

import secrets
import string
from collections.abc import Iterator
from dataclasses import dataclass

from pagewise_gateway.generation import SequenceDelta
from pagewise_gateway.http.chat_formats import Parsing
from pagewise_gateway.http.context import Service
from pagewise_gateway.http.schema import ChatRequest
from pagewise_gateway.link import LiveRequest
from pagewise_gateway.text.output_parsing import MessageParser, Start, make_plain

_ID_CHARACTERS = string.ascii_letters + string.digits
_PIECE = 1024
"""Characters of an output that are parsed at a time; other tasks may run in between."""


@dataclass(slots=True, frozen=True)
class ChatRun:
    """A chat that was submitted.

    Fields:
        body: without what may be large.
        parsing: how its outputs are parsed; None: they are content as they are.
        start, continues: where an output begins, as a ``MessageParser`` takes it.
    """

    service: Service
    body: ChatRequest
    live: LiveRequest
    parsing: Parsing | None
    start: Start
    continues: bool

    def parser(self) -> MessageParser:
        """Return a parser of one output."""
        if self.parsing is None:
            return make_plain()
        return self.parsing.parser(self.start, self.continues)

    def new_id(self) -> str:
        """Return an id for a tool call."""
        if self.parsing is not None and (length := self.parsing.id_length) > 0:
            return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(length))
        return f"call_{secrets.token_hex(12)}"

    def quick(self) -> bool:
        """Whether what has arrived may be parsed and told at once."""
        return self.live.few_unread and self.service.slices.room()


def cut(text: str) -> Iterator[str]:
    """Yield the pieces in which a text is parsed."""
    for start in range(0, len(text), _PIECE):
        yield text[start : start + _PIECE]


def finish_reason(delta: SequenceDelta, parser: MessageParser) -> str | None:
    """Return why an output has ended. One that ends in a call, with whatever cut it off, has not ended with tool calls.

    ``delta``: the last one. ``parser``: of the output.
    """
    if delta.finish_reason != "stop" or not parser.num_calls:
        return delta.finish_reason
    return "tool_calls" if parser.whole else "stop"
