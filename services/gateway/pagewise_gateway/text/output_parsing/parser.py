"""Finds reasoning, content and tool calls in a text that arrives in pieces, where delimiters mark them.

A delimiter counts only where the format has it: reasoning is opened at the beginning, and closed where it is open, and
a marker of calls comes before a call. Everything else is content. So the text after a marker is held back until its
reader has found the name of a call in it, or has found that there is none: then the text is scanned once more, without
the marker.

A scanner is a generator that yields where it needs more text, so it is written in the order of the text.
"""

from collections.abc import Generator

from pagewise_gateway.text.output_parsing.deltas import Delta, MessageBuilder, Tools
from pagewise_gateway.text.output_parsing.formats import OutputFormat, Start
from pagewise_gateway.text.output_parsing.harmony import HarmonyScanner
from pagewise_gateway.text.output_parsing.reader import CallReader
from pagewise_gateway.text.output_parsing.scanning import PendingText, begins

_MOST_HELD = 262_144
"""Characters after a marker in which a call has to begin. They are held back, and scanned again if there is none."""
_MOST_RESCANNED = 65_536
"""Characters of one output that are scanned again. Further markers without a call are content with the text after them,
because thousands of markers would have all the text after each of them scanned again."""
_MOST_SPACE = 256
"""Characters of white space between the marker of a group of calls and the marker of its first call."""


class _TextScanner:
    """Scans one output whose parts are delimited."""

    def __init__(
        self, source: PendingText, output: OutputFormat, tools: Tools, message: MessageBuilder, calls_first: bool
    ) -> None:
        self._source, self._format, self._tools, self._message = source, output, tools, message
        self._calls_first = calls_first
        self._bare = tuple(output.tools.bare)  # characters that may begin calls without a marker
        self._group_end: tuple[str, ...] = ()  # the marker that ends the last group, if there is other text in it
        self._raw: list[str] = []  # the text after a marker in which no call has begun yet
        self._num_raw = self._num_rescanned = 0

    def scan(self, start: Start, continues: bool) -> Generator[None]:
        in_reasoning, border = start == "reasoning", self._message.content.border
        if start != "main":
            border()
        if start in ("main", "implied") and self._format.reasoning is not None and not continues:
            in_reasoning = yield from self._opening(self._format.reasoning.opening, start == "implied")
        if in_reasoning:
            yield from self._reasoning()
        yield from self._answer()

    def _opening(self, opening: str, implied: bool) -> Generator[None, None, bool]:
        """Scan the white space before any text, and return whether the text begins with reasoning."""
        source = self._source
        while True:
            begin = source.text.lstrip()
            if begin.startswith(opening):
                source.text = begin.removeprefix(opening)
                self._message.content.border()
                return True
            if begin and (source.final or not opening.startswith(begin)):
                return implied
            self._message.content.push(source.take(len(source.text) - len(begin)))  # holds it back
            if source.final:
                return False
            yield

    def _reasoning(self) -> Generator[None]:
        assert self._format.reasoning is not None
        closing, end = self._format.reasoning.closing, ""
        ends = closing, *self._format.reasoning.ended_by
        while not end:
            text, end = self._source.take_until(ends)
            self._message.reasoning.push(text)
            if not end:
                if self._source.final:
                    return
                yield
        if end == closing:
            self._source.take(len(closing))
        self._message.border()

    def _answer(self) -> Generator[None]:
        """Scan content and calls, up to the end."""
        source, tools, content = self._source, self._format.tools, self._message.content
        while True:
            markers = () if self._calls_first and content.begun else (*tools.markers, *self._group_end)
            if self._bare and not content.begun:
                content.push(source.take(len(source.text) - len(source.text.lstrip())))  # holds it back
                if source.text.startswith(self._bare):
                    self._bare = ()  # once: the text is content if it is no call
                    yield from self._call("")
                    continue
            text, marker = source.take_until(markers)
            content.push(text)
            if not marker:
                if source.final:
                    return
                yield
            elif self._calls_first and content.begun:
                continue
            elif marker in self._group_end:
                self._end_group()
            elif marker == tools.opening:
                yield from self._call(source.take(len(marker)))
            else:
                yield from self._group(marker)

    def _group(self, marker: str) -> Generator[None]:
        """Scan a group of calls, whose first one has to follow its marker."""
        source, tools = self._source, self._format.tools
        assert tools.group is not None
        opening, closing = tools.opening, tools.group[1]
        while not (begin := source.text[len(marker) :].lstrip()).startswith(opening):
            if source.final or len(source.text) - len(marker) >= _MOST_SPACE or not opening.startswith(begin):
                self._message.content.push(source.take(len(marker)))
                return
            yield
        is_call = yield from self._call(source.take(len(source.text) - len(begin) + len(opening)))
        while is_call:
            source.text = source.text.lstrip()  # white space between calls is left out
            while begins(source.text, (closing, opening)) and source.text not in (closing, opening):
                if source.final:
                    break
                yield
                source.text = source.text.lstrip()
            if not source.text.startswith(opening):
                self._group_end = (closing,)
                if source.text.startswith(closing):
                    self._end_group()
                return
            is_call = yield from self._call(source.take(len(opening)))

    def _end_group(self) -> None:
        """Leave out the marker that ends a group."""
        (closing,), self._group_end = self._group_end, ()
        self._source.take(len(closing))
        self._message.content.border()

    def _call(self, marker: str) -> Generator[None, None, bool]:
        """Scan the text after a marker, and return whether there are calls in it."""
        source, tools = self._source, self._format.tools
        reader = CallReader(tools.read, self._tools)
        ends = (tools.closing,) if tools.closing else tools.markers
        self._raw, self._num_raw = [], 0
        while True:
            text, end = source.take_until(ends)
            if not self._feed(reader, text):
                break
            if not end:
                if source.final:
                    self._end(reader, closed=False)
                    break
                yield
            elif not reader.quoting:
                self._end(reader, closed=True)
                if reader.called and tools.closing:
                    source.take(len(tools.closing))
                break
            elif not self._feed(reader, source.take(len(end))):  # in a string, a delimiter is text
                if reader.called:
                    source.text = source.text.removeprefix(tools.closing)
                break
        if not reader.called:
            self._rescan(marker)
        return reader.called

    def _feed(self, reader: CallReader, text: str) -> bool:
        """Give text to the reader. Returns whether it needs more: if not, there is no call, or the calls have ended."""
        if not text:
            return True
        if not reader.called:
            self._raw.append(text)
            self._num_raw += len(text)
        found = reader.push(text)
        if not reader.called and (reader.rest is not None or self._num_raw > _MOST_HELD):
            return False
        self._message.add(found)
        if reader.rest is None:
            return True
        self._source.text = reader.rest + self._source.text
        self._message.content.border()
        return False

    def _end(self, reader: CallReader, *, closed: bool) -> None:
        found = reader.finish(closed)
        if reader.called:
            self._message.content.border()
            self._message.add(found)
            self._source.text = (reader.rest or "") + self._source.text

    def _rescan(self, marker: str) -> None:
        """Make a marker content, and have the text after it scanned once more."""
        self._message.content.push(marker)
        raw = "".join(self._raw)
        self._num_rescanned += len(raw)
        if self._num_rescanned > _MOST_RESCANNED:
            self._message.content.push(raw)
        else:
            self._source.text = raw + self._source.text


class MessageParser:
    """Parses one output.

    The deltas add up to the same message for all ways to cut the text into pieces. Nothing of the text is lost but
    delimiters, the text of calls other than names and arguments, and white space at the borders of content and
    reasoning, whose parts are joined by line breaks. A text without delimiters is not changed. No text raises an
    error.

    ``start``: see ``Start``. ``continues``: whether the output continues a message that the prompt begins. ``tools``:
    of the request. ``parallel``: whether calls after the first one count. ``calls_first``: whether there are calls only
    at the beginning of the answer, as under a grammar for it: then all text after other text is content.
    """

    __slots__ = ("_message", "_source", "_steps")

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
        self._message, self._source = MessageBuilder(parallel), PendingText()
        # The generator must not refer to this parser: such a cycle would stay until the next garbage collection.
        if output_format.harmony:
            self._steps = HarmonyScanner(self._source, self._message).scan(continues)
        else:
            scanner = _TextScanner(self._source, output_format, tools or Tools({}), self._message, calls_first)
            self._steps = scanner.scan(start, continues)

    @property
    def num_calls(self) -> int:
        """How many tool calls have begun."""
        return self._message.num_calls

    @property
    def whole(self) -> bool:
        """Whether the arguments of the last call that counts are complete."""
        return self._message.whole

    def push(self, text: str) -> list[Delta]:
        """Take text; return the new deltas of the message."""
        self._source.text += text
        next(self._steps)
        return self._message.take()

    def finish(self) -> list[Delta]:
        """Return the deltas of the text that was held back. No more text comes."""
        self._source.final = True
        next(self._steps, None)
        self._message.content.finish()
        return self._message.take()


_PLAIN = OutputFormat()


def make_plain() -> MessageParser:
    """Return a parser of an output that is only content."""
    return MessageParser(_PLAIN)
