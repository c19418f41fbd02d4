"""Reads the outputs of gpt-oss: messages, each with a header that announces reasoning, content or a call.

A header is at the beginning or after the end of a message, and the end of a message is before a header or at the end of
the output. Elsewhere, text that looks like one of them is text of the message.
"""

import re
from collections.abc import Callable, Generator
from itertools import product
from typing import Any

from pagewise_gateway.text.output_parsing.deltas import Delta, DeltaKind, MessageBuilder
from pagewise_gateway.text.output_parsing.json_calls import parts
from pagewise_gateway.text.output_parsing.scanning import JsonValue, PendingText, begins, begun, first_of

_BEGINS = ("<|start|>", "<|channel|>")
_MESSAGE = "<|message|>"
_CALL = "<|call|>"
_ENDS = ("<|end|>", _CALL, "<|return|>")
DELIMITERS = (*_BEGINS, _MESSAGE, *_ENDS)
_MOST_HEADER = 512
_MOST_SPACE = 256
_WORD = r"[^\s<>{}()\"'`]+"
_TO = (r"\s*", "=to=", _WORD, r"\s*")
_HEADERS = [
    parts(*role, *before, "=<|channel|>", r"\s*", r"(?:\w+)?", *after, *kind, f"={_MESSAGE}")
    for role, before, after, kind in product(
        ((r"\s*",), ("=<|start|>", _WORD, r"\s*")),
        ((), _TO),
        ((r"\s*",), _TO),
        ((r"(?:\w+)?", r"\s*"), (r"(?:\w+)?", r"\s*", "=<|constrain|>", r"\s*", r"(?:\w+)?", r"\s*")),
    )
]
_PART = re.compile("|".join(_HEADERS))
"""Matches beginnings of headers."""
_HEADER = re.compile(
    r"(?:<\|start\|>\S+?)?\s*(?:to=(?P<first>\S+?)\s*)?<\|channel\|>\s*(?P<channel>analysis|commentary|final)"
    r"\s*(?:to=(?P<second>[^\s<]+))?.*",
    re.DOTALL,
)
_FUNCTIONS = "functions."


class HarmonyScanner:
    """Scans one output in states, each of which returns the next one, or None where it needs more text."""

    def __init__(self, source: PendingText, message: MessageBuilder) -> None:
        self._source, self._message = source, message
        self._num_before = 0  # characters of a possible end of a message, before a header or the end of the output
        self._kind: DeltaKind = "content"  # of the text of a message; a call: "arguments"
        self._arguments = JsonValue()
        self._some = False  # whether there are any arguments

    def scan(self, continues: bool) -> Generator[None]:
        """Scan the output, and yield where more text is needed. ``continues``: it begins in a message."""
        state = self._body if continues else self._header
        while True:
            following = state() if self._source.text else None
            if following is None:
                yield
            else:
                state = following

    def _header(self) -> "_State | None":
        """In a possible header, which begins after ``_num_before`` characters."""
        text = self._source.text[self._num_before :]
        start, delimiter = first_of(text, (_MESSAGE, _CALL))
        if start < 0 and not self._source.final and _may_begin(text[: len(text) - begun(text, (_CALL,))]):
            return None
        header = _parsed(text[:start], delimiter) if delimiter else None
        if header is None:
            return self._no_header()
        self._end_message(True)
        self._kind, function = header
        if function:
            self._arguments, self._some = JsonValue(), False
            self._message.add([Delta("call", function)])
        self._source.text, self._num_before = text[start + len(delimiter) :], 0
        if delimiter != _CALL:
            return self._body
        self._end_message(True)
        return self._behind

    def _no_header(self) -> "_State":
        """Make a delimiter that begins no header text of the message."""
        delimiters = _ENDS if self._num_before else _BEGINS
        self._text(self._source.take(next((len(each) for each in delimiters if self._source.text.startswith(each)), 0)))
        self._num_before = 0
        return self._body

    def _body(self) -> "_State | None":
        """In a message, up to its end."""
        text, delimiter = self._source.take_until(_ENDS)
        self._text(text)
        if not delimiter:
            return None
        if self._kind == "arguments" and self._arguments.quoting:
            self._text(self._source.take(len(delimiter)))
            return self._body
        self._num_before = len(delimiter)
        return self._behind

    def _behind(self) -> "_State | None":
        """After a possible end of a message."""
        source = self._source
        behind = source.text[self._num_before :]
        begin = behind.lstrip()
        if not begin and source.final:
            self._end_message(True)
            source.text = ""
            return None
        if begin.startswith(_BEGINS):
            self._num_before = len(source.text) - len(begin)
            return self._header
        if begins(begin, _BEGINS) and not source.final and len(behind) < _MOST_SPACE:
            return None
        return self._no_header()

    def _text(self, text: str) -> None:
        if self._kind == "content":
            self._message.content.push(text)
        elif self._kind == "reasoning":
            self._message.reasoning.push(text)
        else:
            text = text if self._some else text.lstrip()
            if not text:
                return
            self._some = True
            end = self._arguments.end(text, 0)
            self._message.add([Delta("arguments", text if end < 0 else text[:end])])
            if end >= 0:  # the text after arguments is no part of them
                self._end_message(False)
                self._message.content.push(text[end:])

    def _end_message(self, closed: bool) -> None:
        if self._kind == "arguments" and closed and not self._some:
            self._message.add([Delta("arguments", "{}")])
        self._message.border()
        self._kind = "content"


_State = Callable[[], Any]


def _may_begin(header: str) -> bool:
    return len(header) <= _MOST_HEADER and _PART.fullmatch(header) is not None


def _parsed(header: str, delimiter: str) -> tuple[DeltaKind, str] | None:
    """Return the kind of the text after a header, and the function that it calls; None: it is no header."""
    found = _HEADER.fullmatch(header) if _may_begin(header) else None
    if found is None:
        return None
    recipient = found["first"] or found["second"] or ""
    if function := recipient.removeprefix(_FUNCTIONS) if recipient.startswith(_FUNCTIONS) else "":
        return "arguments", function
    if delimiter == _CALL:  # only a call may have no message
        return None
    return "reasoning" if recipient or found["channel"] == "analysis" else "content", ""
