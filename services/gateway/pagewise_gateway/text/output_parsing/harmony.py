"""Reads the outputs of gpt-oss: messages, each with a header that announces reasoning, content or a call.

A header stands at the beginning and behind the end of a message, and the end of a message stands before a header or at
the end. Elsewhere, text that looks like one of them is text of the message.
"""

import re
from itertools import product

from pagewise_gateway.text.output_parsing.deltas import Delta, DeltaKind, begins, begun, first_of
from pagewise_gateway.text.output_parsing.json_calls import parts
from pagewise_gateway.text.output_parsing.message import MessageBuilder, Scanner
from pagewise_gateway.text.output_parsing.reader import JsonValue

_BEGINS = ("<|start|>", "<|channel|>")
_MESSAGE = "<|message|>"
_CALL = "<|call|>"
_ENDS = ("<|end|>", _CALL, "<|return|>")
DELIMITERS = (*_BEGINS, _MESSAGE, *_ENDS)
"""Of all messages."""
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


class HarmonyScanner(Scanner):
    """Scans one output. ``continues``: it begins in a message."""

    def __init__(self, message: MessageBuilder, *, continues: bool) -> None:
        super().__init__(message, HarmonyScanner._body if continues else HarmonyScanner._header)
        self._num_before = 0  # characters of ``_pending`` before a header, with which the message before it has ended
        self._kind: DeltaKind = "content"  # of the text of a message; a call: "arguments"
        self._arguments = JsonValue()
        self._some = False  # whether there are any arguments

    def _header(self) -> bool:
        """In a possible header, which begins behind ``_num_before`` characters."""
        text = self._pending[self._num_before :]
        start, end = first_of(text, (_MESSAGE, _CALL)) or (-1, -1)
        if start < 0 and not self._final and _may_begin(text[: len(text) - begun(text, (_CALL,))]):
            return False
        header = _parsed(text[:start], text[start:end]) if start >= 0 else None
        if header is None:
            return self._no_header()
        self._end_message(True)
        self._kind, function = header
        if function:
            self._arguments, self._some = JsonValue(), False
            self._message.add([Delta("call", function)])
        self._pending, self._state, self._num_before = text[end:], HarmonyScanner._body, 0
        if text[start:end] == _CALL:
            self._end_message(True)
            self._state = HarmonyScanner._behind
        return True

    def _no_header(self) -> bool:
        """A delimiter begins no header, so it is text."""
        found = first_of(self._pending, _ENDS if self._num_before else _BEGINS)
        end = found[1] if found is not None and found[0] == 0 else 0
        self._text(self._pending[:end])
        self._pending, self._num_before, self._state = self._pending[end:], 0, HarmonyScanner._body
        return True

    def _body(self) -> bool:
        """In a message, up to its end."""
        text, found = self._pending, first_of(self._pending, _ENDS)
        start, end = found or (len(text) - (0 if self._final else begun(text, _ENDS)),) * 2
        self._text(text[:start])
        self._pending = text[start:]
        if found is None:
            return False
        if self._kind == "arguments" and self._arguments.quoting:
            self._text(text[start:end])
            self._pending = text[end:]
        else:
            self._num_before, self._state = end - start, HarmonyScanner._behind
        return True

    def _behind(self) -> bool:
        """Behind a possible end of a message."""
        behind = self._pending[self._num_before :]
        begin = behind.lstrip()
        if not begin and self._final:
            self._end_message(True)
            self._pending = ""
        elif begin.startswith(_BEGINS):
            self._num_before, self._state = len(self._pending) - len(begin), HarmonyScanner._header
        elif begins(begin, _BEGINS) and not self._final and len(behind) < _MOST_SPACE:
            return False
        else:
            return self._no_header()
        return True

    def _text(self, text: str) -> None:
        """Add text of the message."""
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
            if end >= 0:  # the text behind arguments is no part of them
                self._end_message(False)
                self._message.content.push(text[end:])

    def _end_message(self, closed: bool) -> None:
        if self._kind == "arguments" and closed and not self._some:
            self._message.add([Delta("arguments", "{}")])
        self._message.border()
        self._kind = "content"


def _may_begin(header: str) -> bool:
    return len(header) <= _MOST_HEADER and _PART.fullmatch(header) is not None


def _parsed(header: str, delimiter: str) -> tuple[DeltaKind, str] | None:
    """Return the kind of the text behind a header, and the function that it calls; None: it is no header."""
    found = _HEADER.fullmatch(header) if _may_begin(header) else None
    if found is None:
        return None
    recipient = found["first"] or found["second"] or ""
    if function := recipient.removeprefix(_FUNCTIONS) if recipient.startswith(_FUNCTIONS) else "":
        return "arguments", function
    if delimiter == _CALL:  # only a call can do without a message
        return None
    return "reasoning" if recipient or found["channel"] == "analysis" else "content", ""
