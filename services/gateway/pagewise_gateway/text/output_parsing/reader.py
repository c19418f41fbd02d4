"""How tool calls are read behind the marker that begins them, and where the JSON values in them end.

A reader of a format is a generator, which yields where it needs more text. So it is written as a call is written, from
its beginning to its end, and the place that it has reached is its state.
"""

import re
from collections.abc import Callable, Generator
from contextlib import suppress

from pagewise_gateway.text.output_parsing.deltas import Delta, Tools, begun

_FIRST = re.compile(r"([\s\S])")
_ESCAPED = re.compile("(.)", re.DOTALL)
_OUTSIDE = re.compile(r'[^"{}\[\]]*+(["{}\[\]])')
_INSIDE = re.compile(r'(?:[^"\\\x00-\x1f]++|\\[^\x00-\x1f])*+(["\\\x00-\x1f])')
_INSIDE_RAW = re.compile(r'(?:[^"\\]++|\\.)*+(["\\])', re.DOTALL)
_BEHIND_WORD = re.compile(r"[^,}\]\s]*+([,}\]\s])")


class EndOfTextError(Exception):
    """No more text comes. It is thrown into a reader that waits. ``closed``: a delimiter has ended the calls."""

    def __init__(self, closed: bool) -> None:
        super().__init__()
        self.closed = closed


class CallText:
    """The text that a reader reads, and the deltas that it makes of the text.

    Fields:
        text: the text that has not been read yet.
        called: whether a call has begun. Before that, there are no deltas.
        quoting: whether the text goes on inside of a string, in which a delimiter is a part of the string.
    """

    __slots__ = ("called", "deltas", "quoting", "text")

    def __init__(self) -> None:
        self.text = ""
        self.called = self.quoting = False
        self.deltas: list[Delta] = []

    def call(self, name: str) -> None:
        """Begin a call."""
        self.called = True
        self.deltas.append(Delta("call", name))

    def add(self, arguments: str) -> None:
        """Add to the arguments of the call that began last."""
        self.deltas.append(Delta("arguments", arguments))

    def content(self, text: str) -> None:
        """Add text that is no part of the calls."""
        self.deltas.append(Delta("content", text))

    def take(self, end: int) -> str:
        """Return the text up to an index, and go on behind it."""
        taken, self.text = self.text[:end], self.text[end:]
        return taken

    def take_before(self, delimiter: str) -> tuple[str, bool]:
        """Return the text before a delimiter, as far as it is known, and whether the delimiter has come."""
        at = self.text.find(delimiter)
        taken = self.take(at if at >= 0 else len(self.text) - begun(self.text, (delimiter,)))
        self.text = self.text.removeprefix(delimiter) if at >= 0 else self.text
        return taken, at >= 0

    def json_value(self, push: Callable[[str], object]) -> Generator[None]:
        """Read a JSON value, and push its pieces as they come."""
        value = JsonValue()
        while (end := value.end(self.text, 0)) < 0:
            text, self.text = self.text, ""
            push(text)
            self.quoting = value.quoting
            yield
        self.quoting = False
        push(self.take(end))


Read = Callable[[CallText, Tools], Generator[None]]
"""Reads calls. It returns where they end, or behind text that is no call."""


class CallReader:
    """Runs a reader on text that arrives in pieces. ``rest``: the text behind the calls; None: they go on."""

    __slots__ = ("_source", "_steps", "rest")

    def __init__(self, read: Read, tools: Tools) -> None:
        self._source = CallText()
        self._steps = read(self._source, tools)
        self.rest: str | None = None

    @property
    def called(self) -> bool:
        """Whether a call has begun."""
        return self._source.called

    @property
    def failed(self) -> bool:
        """Whether the text turned out to be no call; all of it is read as something else."""
        return self.rest is not None and not self.called

    @property
    def quoting(self) -> bool:
        """Whether the text goes on inside of a string."""
        return self._source.quoting

    def push(self, text: str) -> list[Delta]:
        """Take text; return the new deltas."""
        source = self._source
        source.text += text
        for _ in self._steps:  # up to where it waits
            break
        else:
            self.rest = source.text
        return self._new()

    def finish(self, closed: bool) -> list[Delta]:
        """Return the last deltas. ``closed``: a delimiter has ended the calls, and not the end of the output."""
        with suppress(EndOfTextError, StopIteration):
            self._steps.throw(EndOfTextError(closed))
        return self._new()

    def _new(self) -> list[Delta]:
        new, self._source.deltas = self._source.deltas, []
        return new


class JsonValue:
    """Finds where a JSON value ends, in text that arrives in pieces. Only strings and brackets are looked at."""

    __slots__ = ("_depth", "_next", "_raw", "_string")

    def __init__(self) -> None:
        self._depth = 0
        self._string = False
        self._raw = False  # whether the string that is open has a control character, which JSON would have escaped
        self._next = _FIRST  # matches up to the next character that counts

    @property
    def quoting(self) -> bool:
        """Whether the text goes on inside of a string. A string does not go on behind a line break: a quote is missing,
        or one was not escaped."""
        return self._string and not self._raw

    def end(self, text: str, at: int) -> int:
        """Return the index behind the value, which goes on at ``at``; -1: it does not end in this text."""
        while (found := self._next.match(text, at)) is not None:
            if self._next is _BEHIND_WORD:
                return found.start(1)
            at = found.end()
            if self._ends_with(found[1]):
                return at
        return -1

    def _ends_with(self, sign: str) -> bool:
        """Whether the value ends with this character."""
        begins = self._next is _FIRST
        if begins:
            self._string, self._depth = sign == '"', int(sign in "{[")
        elif self._string:
            self._string, self._raw = self._next is _ESCAPED or sign != '"', self._raw or sign < " "
        elif sign == '"':
            self._string, self._raw = True, False
        else:
            self._depth += 1 if sign in "{[" else -1
        self._next = self._behind(sign)
        return not (begins or self._string or self._depth)

    def _behind(self, sign: str) -> re.Pattern[str]:
        """Return the pattern that matches up to the next character that counts, behind this one."""
        if not self._string:
            return _OUTSIDE if self._depth else _BEHIND_WORD
        if sign == "\\" and self._next is not _ESCAPED:
            return _ESCAPED
        return _INSIDE_RAW if self._raw else _INSIDE
