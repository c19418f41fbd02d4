"""Finds delimiters and the ends of JSON values in text that arrives in pieces."""

import json
import re
from collections.abc import Sequence

_FIRST = re.compile(r"([\s\S])")
_ESCAPED = re.compile("(.)", re.DOTALL)
_OUTSIDE = re.compile(r'[^"{}\[\]]*+(["{}\[\]])')
_INSIDE = re.compile(r'(?:[^"\\\x00-\x1f]++|\\[^\x00-\x1f])*+(["\\\x00-\x1f])')
_INSIDE_RAW = re.compile(r'(?:[^"\\]++|\\.)*+(["\\])', re.DOTALL)
_BEHIND_WORD = re.compile(r"[^,}\]\s]*+([,}\]\s])")


class PendingText:
    """The text that has not been scanned yet. ``final``: no more text comes."""

    __slots__ = ("final", "text")

    def __init__(self) -> None:
        self.text = ""
        self.final = False

    def take(self, end: int) -> str:
        """Return the text up to an index, and remove it."""
        taken, self.text = self.text[:end], self.text[end:]
        return taken

    def take_until(self, delimiters: Sequence[str]) -> tuple[str, str]:
        """Remove the text before the first of these delimiters. Returns it, and the delimiter, which stays.

        If there is none, the delimiter is empty, and characters that may begin one stay.
        """
        start, delimiter = first_of(self.text, delimiters)
        if start < 0:
            start = len(self.text) - (0 if self.final else begun(self.text, delimiters))
        return self.take(start), delimiter


def first_of(text: str, delimiters: Sequence[str]) -> tuple[int, str]:
    """Return the index of the first of these delimiters in a text, and the delimiter; -1 and an empty text: none."""
    found = [(text.find(each), each) for each in delimiters]
    return min(((at, each) for at, each in found if at >= 0), default=(-1, ""))


def begun(text: str, delimiters: Sequence[str]) -> int:
    """Return the number of characters at the end of a text that may begin one of these delimiters."""
    most = 0
    for delimiter in delimiters:
        tail = text[-(len(delimiter) - 1) :] if len(delimiter) > 1 else ""
        at = tail.find(delimiter[0])
        while at >= 0 and not delimiter.startswith(tail[at:]):
            at = tail.find(delimiter[0], at + 1)
        most = max(most, len(tail) - at if at >= 0 else 0)
    return most


def begins(text: str, delimiters: Sequence[str]) -> bool:
    """Return whether a text is the beginning of one of these delimiters."""
    return any(each.startswith(text) for each in delimiters)


def as_json(value: object) -> str:
    """Return a value as JSON. Half of a surrogate pair, which cannot be encoded, stays an escape."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if _encodable(text) else json.dumps(value)


def is_json(text: str) -> bool:
    """Return whether a text is JSON, with numbers of any size."""
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def as_text(value: object) -> str:
    """Return a value if it is a text that can be encoded, else an empty one."""
    return value if isinstance(value, str) and _encodable(value) else ""


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class JsonValue:
    """Finds the end of a JSON value in text that arrives in pieces, by its strings and brackets only."""

    __slots__ = ("_depth", "_next", "_raw", "_string")

    def __init__(self) -> None:
        self._depth = 0
        self._string = False
        self._raw = False  # whether the open string has a control character, which JSON would have escaped
        self._next = _FIRST  # matches up to the next character that counts

    @property
    def quoting(self) -> bool:
        """Whether the text ends inside a string. A line break ends a string: a quote is missing then, or was not
        escaped."""
        return self._string and not self._raw

    def end(self, text: str, at: int) -> int:
        """Return the index after the value, which continues at ``at``; -1: it does not end in this text."""
        while (found := self._next.match(text, at)) is not None:
            if self._next is _BEHIND_WORD:
                return found.start(1)
            at = found.end()
            if self._ends_with(found[1]):
                return at
        return -1

    def _ends_with(self, sign: str) -> bool:
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
        # The pattern matches up to the next character after this one that counts.
        if not self._string:
            return _OUTSIDE if self._depth else _BEHIND_WORD
        if sign == "\\" and self._next is not _ESCAPED:
            return _ESCAPED
        return _INSIDE_RAW if self._raw else _INSIDE
