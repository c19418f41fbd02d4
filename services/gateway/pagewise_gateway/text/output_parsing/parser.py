"""Finds reasoning, content and tool calls in a text that arrives in pieces, where texts delimit them.

A delimiter counts only where the format has it: reasoning is opened at the beginning, and closed where it is open, and
a marker of calls is followed by a call. Anything else is content. So the text behind a
marker is held back until a reader has found a call in it, which is when its name is there, or has found that there is
none: then it is looked at once more, without the marker.
"""

from collections.abc import Callable

from pagewise_gateway.text.output_parsing.deltas import Delta, Tools, begins, begun, first_of
from pagewise_gateway.text.output_parsing.formats import OutputFormat, Start
from pagewise_gateway.text.output_parsing.harmony import HarmonyScanner
from pagewise_gateway.text.output_parsing.message import MessageBuilder, Scanner
from pagewise_gateway.text.output_parsing.reader import CallReader

_MOST_HELD = 262_144
"""Characters in which a call has to begin behind its marker. The text that is held is looked at again if it is no
call."""
_MOST_RESCANNED = 65_536
"""Characters that are looked at again in one output. More markers that begin no call are content, with the text behind
them: each of thousands of markers would have all the text behind it looked at again."""
_MOST_SPACE = 256
"""Characters of white space between the marker of a group of calls and that of the first one."""


class TextScanner(Scanner):
    """Scans one output. ``calls_first``: calls are the whole answer, or none of it."""

    def __init__(
        self,
        output: OutputFormat,
        start: Start,
        tools: Tools,
        message: MessageBuilder,
        *,
        continues: bool,
        calls_first: bool,
    ) -> None:
        super().__init__(message, TextScanner._answer)
        self._format, self._tools = output, tools
        self._calls_first = calls_first
        self._implied = start == "implied"
        self._bare = output.tools.bare  # characters that may begin calls without a marker
        # Text that may be calls: its marker, the text behind it until a call has begun, and whether it is in a group.
        self._reader: CallReader | None = None
        self._marker, self._grouped = "", False
        self._raw: list[str] = []
        self._num_raw = self._num_rescanned = 0
        if start == "reasoning":
            self._state = TextScanner._reasoning
            message.content.border()
        elif start == "ended":
            message.content.border()
        elif output.reasoning is not None and not continues:
            self._state = TextScanner._beginning
            if self._implied:
                message.content.border()

    def finish(self) -> None:
        """Add the text that was held back. No more text comes."""
        self._final = True
        while self._pending or self._reader is not None:
            if not self._state(self) and self._reader is not None:
                self._end(self._reader, False, "", "")

    # ---- states ---------------------------------------------------------------------------------------

    def _beginning(self) -> bool:
        """Before any text: reasoning may be opened."""
        reasoning = self._format.reasoning
        assert reasoning is not None
        begin = self._pending.lstrip()
        if begin.startswith(reasoning.opening):
            self._pending = begin[len(reasoning.opening) :]
            self._state = TextScanner._reasoning
            self._message.content.border()
            return True
        if not begin or (reasoning.opening.startswith(begin) and not self._final):
            self._message.content.push(self._pending[: len(self._pending) - len(begin)])  # which holds it back
            self._pending = begin
            return False
        self._state = TextScanner._reasoning if self._implied else TextScanner._answer
        return True

    def _reasoning(self) -> bool:
        """In reasoning, up to its end."""
        assert self._format.reasoning is not None
        closing = (self._format.reasoning.closing,)
        text, found = self._pending, first_of(self._pending, closing)
        if found is None:
            self._pass_on(self._message.reasoning.push, closing)
            return False
        self._message.reasoning.push(text[: found[0]])
        self._message.border()
        self._pending, self._state = text[found[1] :], TextScanner._answer
        return True

    def _answer(self) -> bool:
        """In content, up to a possible call."""
        tools, content = self._format.tools, self._message.content
        if self._calls_first and content.begun:
            self._pass_on(content.push, ())
            return False
        if self._bare and not content.begun:
            begin = self._pending.lstrip()
            content.push(self._pending[: len(self._pending) - len(begin)])  # which holds it back
            self._pending = begin
            if begin.startswith(tuple(self._bare)):
                self._bare = ""  # once: it is content if it is no call
                self._begin("", begin, False)
                return True
        found = first_of(self._pending, tools.markers)
        if found is None:
            self._pass_on(content.push, tools.markers)
            return False
        content.push(self._pending[: found[0]])
        self._pending, marker = self._pending[found[0] :], self._pending[found[0] : found[1]]
        if self._calls_first and content.begun:
            return True
        if marker == tools.opening:
            self._begin(marker, self._pending[len(marker) :], False)
            return True
        return self._group(marker)

    def _group(self, marker: str) -> bool:
        """At a marker that opens a group of calls: the first one has to follow."""
        opening = self._format.tools.opening
        behind = self._pending[len(marker) :]
        begin = behind.lstrip()
        if begin.startswith(opening):
            end = len(self._pending) - len(begin) + len(opening)
            self._begin(self._pending[:end], self._pending[end:], True)
            return True
        if opening.startswith(begin) and not self._final and len(behind) < _MOST_SPACE:
            return False
        self._message.content.push(marker)
        self._pending = behind
        return True

    def _behind_call(self) -> bool:
        """Behind a call of a group: the next one follows, or the end of the group, or it just ends."""
        tools, begin = self._format.tools, self._pending.lstrip()
        assert tools.group is not None
        opening, closing = tools.opening, tools.group[1]
        if begins(begin, (closing, opening)) and not self._final and begin not in (closing, opening):
            self._pending = begin  # white space behind a call is left out
            return False
        self._state = TextScanner._answer
        if begin.startswith(opening):
            self._begin(opening, begin[len(opening) :], True)
            return True
        self._pending = begin.removeprefix(closing)
        return True

    def _calls(self) -> bool:
        """In possible calls, up to their end."""
        tools, reader = self._format.tools, self._reader
        assert reader is not None
        text, ends = self._pending, (tools.closing,) if tools.closing else tools.markers
        found = first_of(text, ends)
        start, end = found or (len(text) - (0 if self._final else begun(text, ends)),) * 2
        self._pending = text[start:]
        if not self._feed(reader, text[:start]):
            return True
        if found is None:
            return False
        if reader.quoting:
            self._pending = text[end:]
            self._feed(reader, text[start:end])
        elif tools.closing:
            self._end(reader, True, text[start:end], text[end:])
        else:
            self._end(reader, True, "", text[start:])
        return True

    # ---- steps of the states --------------------------------------------------------------------------

    def _pass_on(self, push: Callable[[str], None], delimiters: tuple[str, ...]) -> None:
        """Pass on text in which no delimiter is, but for the characters that may begin one."""
        held = 0 if self._final else begun(self._pending, delimiters)
        text, self._pending = self._pending[: len(self._pending) - held], self._pending[len(self._pending) - held :]
        push(text)

    def _begin(self, marker: str, text: str, grouped: bool) -> None:
        """A reader has to say whether there are calls in this text, which follows a marker."""
        self._reader = CallReader(self._format.tools.read, self._tools)
        self._marker, self._pending, self._grouped = marker, text, grouped
        self._raw, self._num_raw = [], 0
        self._state = TextScanner._calls

    def _feed(self, reader: CallReader, text: str) -> bool:
        """Give text to the reader; returns whether it goes on. If not, the text behind the calls is in ``_pending``."""
        if not text:
            return True
        if not reader.called:
            self._raw.append(text)
            self._num_raw += len(text)
        found = reader.push(text)
        if reader.failed or (not reader.called and self._num_raw > _MOST_HELD):
            self._no_call("", self._pending)
            return False
        self._message.add(found)
        if reader.rest is None:
            return True
        self._ended(reader.rest + self._pending)
        return False

    def _end(self, reader: CallReader, closed: bool, delimiter: str, behind: str) -> None:
        """The text of the reader has ended."""
        found = reader.finish(closed)
        if reader.called:
            self._ended(behind)
            self._message.add(found)
        else:
            self._no_call(delimiter, behind)

    def _ended(self, behind: str) -> None:
        """Calls have ended, and this text follows them."""
        self._message.content.border()
        self._reader, self._pending = None, behind
        self._state = TextScanner._behind_call if self._grouped else TextScanner._answer

    def _no_call(self, delimiter: str, behind: str) -> None:
        """A marker is content, and the text behind it is looked at once more."""
        self._message.content.push(self._marker)
        raw = "".join(self._raw)
        self._num_rescanned += len(raw)
        if self._num_rescanned > _MOST_RESCANNED:
            self._message.content.push(raw)
            raw = ""
        self._pending = raw + delimiter + behind
        self._reader, self._state = None, TextScanner._answer


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
        """Take text; return the new deltas of the message."""
        self._scanner.push(text)
        return self._message.take()

    def finish(self) -> list[Delta]:
        """Return the deltas of the text that was held back. No more text comes."""
        self._scanner.finish()
        self._message.content.finish()
        return self._message.take()


_PLAIN = OutputFormat()


def make_plain() -> MessageParser:
    """Return a parser of an output that is content as it is."""
    return MessageParser(_PLAIN)
