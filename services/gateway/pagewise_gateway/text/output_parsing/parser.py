"""Makes deltas of a message from the text of an output while it arrives."""

from pagewise_gateway.text.output_parsing.deltas import Delta, Tools
from pagewise_gateway.text.output_parsing.formats import OutputFormat, Start
from pagewise_gateway.text.output_parsing.harmony import HarmonyScanner
from pagewise_gateway.text.output_parsing.message import MessageBuilder
from pagewise_gateway.text.output_parsing.scanner import TextScanner


class MessageParser:
    """Parses one output.

    However the text is cut into pieces, the deltas add up to the same message. Nothing of the text is lost but
    delimiters, the text of calls beside their names and arguments, and white space at the borders of content and
    reasoning; parts of these are joined by line breaks. A text without delimiters stays as it is. No text raises an
    error.

    ``start``: where the output begins. ``continues``: whether it goes on with a message of which the prompt has a part.
    ``tools``: of the request. ``parallel``: whether calls after the first one count. ``calls_first``: whether calls
    stand only where the answer begins, as under a grammar for it: then all that follows other text is content.
    """

    __slots__ = ("_message", "_scanner")

    def __init__(
        self,
        output_format: OutputFormat,
        start: Start = "main",
        tools: Tools | None = None,
        *,
        continues: bool = False,
        parallel: bool = True,
        calls_first: bool = False,
    ) -> None:
        self._message = MessageBuilder(parallel)
        self._scanner = (
            HarmonyScanner(self._message, continues=continues)
            if output_format.harmony
            else TextScanner(
                output_format, start, tools or Tools({}), self._message, continues=continues, calls_first=calls_first
            )
        )

    @property
    def num_calls(self) -> int:
        """How many tool calls have begun."""
        return self._message.num_calls

    @property
    def whole(self) -> bool:
        """Whether the arguments of the last call that counts are there to their end."""
        return self._message.whole

    def push(self, text: str) -> list[Delta]:
        """Take text; return what is new in the message."""
        self._scanner.push(text)
        return self._message.take()

    def finish(self) -> list[Delta]:
        """Return what was held back. No more text comes."""
        self._scanner.finish()
        self._message.content.finish()
        return self._message.take()


_PLAIN = OutputFormat()


def make_plain() -> MessageParser:
    """Return a parser of an output that is content as it is."""
    return MessageParser(_PLAIN)
