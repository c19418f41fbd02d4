"""Runs the readers of tool calls on the text after a marker.

A reader of a format is a generator, which yields where it needs more text. So it is written in the order of the text of
a call.
"""

from collections.abc import Callable, Generator
from contextlib import suppress

from pagewise_gateway.text.output_parsing.deltas import Delta, Tools
from pagewise_gateway.text.output_parsing.scanning import JsonValue, PendingText


class EndOfTextError(Exception):
    """Is thrown into a reader when no more text comes. ``closed``: a delimiter has ended the calls."""

    def __init__(self, closed: bool) -> None:
        super().__init__()
        self.closed = closed


class CallText(PendingText):
    """The text that a reader has not read yet, and the deltas of the text before.

    Fields:
        called: whether a call has begun. Before that, there are no deltas.
        quoting: whether the text ends inside a string, in which a delimiter is a part of the string.
        kept: whether the calls had ended before the text that a reader leaves at the end of the output.
    """

    __slots__ = ("called", "deltas", "kept", "quoting")

    def __init__(self) -> None:
        super().__init__()
        self.called = self.quoting = self.kept = False
        self.deltas: list[Delta] = []

    def call(self, name: str, call_id: str = "") -> None:
        """Begin a call. ``call_id``: its id, if the model wrote one."""
        self.called = True
        self.deltas.append(Delta("call", name, call_id))

    def add(self, arguments: str) -> None:
        """Add to the arguments of the call that began last."""
        self.deltas.append(Delta("arguments", arguments))

    def content(self, text: str) -> None:
        """Add text that is no part of the calls."""
        self.deltas.append(Delta("content", text))

    def take_before(self, delimiter: str) -> tuple[str, bool]:
        """Return the text before a delimiter, as far as it has come, and whether the delimiter has come."""
        taken, found = self.take_until((delimiter,))
        self.take(len(found))
        return taken, bool(found)

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
"""Reads calls. It returns at their end, or when the text is no call."""


class CallReader:
    """Runs a reader on text that arrives in pieces. ``rest``: the text after the calls; None: they have not ended."""

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
    def quoting(self) -> bool:
        """Whether the text ends inside a string."""
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
        if self._source.kept:
            self.rest = self._source.text
        return self._new()

    def _new(self) -> list[Delta]:
        new, self._source.deltas = self._source.deltas, []
        return new
