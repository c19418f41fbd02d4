"""Reads tool calls that are JSON objects with a name and arguments, character by character."""

import json
import re
from collections.abc import Callable

from pagewise_gateway.text.output_parsing.deltas import Delta, Tools, as_text

_MOST_KEY = 256
"""Characters of the longest name of a member; what is longer is no call."""
_MEMBERS = frozenset({"name", "arguments", "parameters", "type", "id"})
_BETWEEN = re.compile(r"[\s,;\[\]}]*")
_BEFORE_FIRST = re.compile(r"\s*\[?\s*")
_BEFORE_NEXT = re.compile(r"[\s,;]*")
_LIST_END = re.compile(r"^\s*\]")
_SPACE = re.compile(r"[\s,]*")
_KEY = re.compile(r'"((?:[^"\\]|\\.)*)"\s*:\s*(?=\S)', re.DOTALL)
_OPEN_KEY = re.compile(r'"(?:[^"\\\x00-\x1f]|\\[^\x00-\x1f])*\\?')
_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'"|\\.?', re.DOTALL)
_INSIDE_RAW = re.compile(r'["\x00-\x1f]|\\.?', re.DOTALL)
_BEHIND_WORD = re.compile(r"[,}\]\s]")


_State = Callable[["JsonCalls", str, int, list[Delta]], int]
"""Plain functions: a method would hold its object, which then stays until the next garbage collection."""


class JsonValue:
    """Finds where a JSON value ends, in text that arrives in pieces. Only strings and brackets are looked at."""

    __slots__ = ("_begun", "_depth", "_escaped", "_raw", "_string")

    def __init__(self) -> None:
        self._depth = 0
        self._begun = self._string = self._escaped = False
        self._raw = False  # whether the string that is open has a control character, which JSON would have escaped

    @property
    def quoting(self) -> bool:
        """Whether the text goes on inside of a string. What is open behind a line break is none: a quote is missing, or
        one was not escaped."""
        return self._string and not self._raw

    def end(self, text: str, at: int) -> int:
        """Return the index behind the value, which goes on at ``at``; -1: it does not end in this text."""
        if self._escaped and at < len(text):
            self._escaped, self._raw, at = False, self._raw or text[at] < " ", at + 1
        if not self._begun and at < len(text):
            self._begun, self._string, self._depth, at = True, text[at] == '"', int(text[at] in "{["), at + 1
        while (found := self._until.search(text, at)) is not None:
            at, sign = found.end(), found[0]
            if self._string:
                self._raw = self._raw or sign[-1] < " "
                self._escaped, self._string = sign == "\\", sign != '"'
            elif not self._depth:
                return found.start()
            elif sign == '"':
                self._string, self._raw = True, False
            else:
                self._depth += 1 if sign in "{[" else -1
            if not self._string and not self._depth:
                return at
        return -1

    @property
    def _until(self) -> re.Pattern[str]:
        """Matches what counts next."""
        if self._string:
            return _INSIDE if self._raw else _INSIDE_RAW
        return _OUTSIDE if self._depth else _BEHIND_WORD


class JsonCalls:
    """Reads objects such as ``{"name": "f", "arguments": {...}}``: one or several, or a list of them.

    Arguments are passed on as they are written. Brackets too many before the delimiter are a part of the calls.
    ``known``: only objects that name one of these tools, and have nothing but members of a call, are calls, as where
    nothing else tells them from an answer in JSON.
    """

    def __init__(self, known: Tools | None = None) -> None:
        self.called = self.failed = False
        self.rest: str | None = None
        self._known = known
        self._state: _State = JsonCalls._between
        self._rest = ""  # text that cannot be read before more comes
        self._key = self._name = ""
        self._value = JsonValue()
        self._separator = ""  # before the next object
        self._raw: list[str] = []  # of an object that is no call yet, with the separator
        self._words: list[str] = []  # of a value that is needed as a whole
        self._early: list[str] = []  # arguments that came before the name
        self._arguments = self._called = self._in_list = False

    @property
    def quoting(self) -> bool:
        """Whether the text goes on inside of a string."""
        return self._value.quoting or _OPEN_KEY.fullmatch(self._rest) is not None

    def push(self, text: str) -> list[Delta]:
        """Take text; return what is new."""
        text, self._rest = self._rest + text, ""
        deltas: list[Delta] = []
        at = 0
        while 0 <= at < len(text):
            at = self._state(self, text, at, deltas)
        return deltas

    def finish(self, closed: bool) -> list[Delta]:
        """Return what is left: what is no part of the calls, if no delimiter has ended them."""
        if self._state is not JsonCalls._between:
            text = "".join(self._raw) + self._rest if not self._called else ""
        else:
            text = "" if closed else self._behind_last().strip()
        return [Delta("content", text)] if text and self.called else []

    # ---- states: each reads text from ``at`` on, and returns where the next one goes on; -1: more text is needed ----

    def _between(self, text: str, at: int, deltas: list[Delta]) -> int:
        """Outside of objects."""
        found = _BETWEEN.match(text, at)
        end = found.end() if found is not None else at
        self._separator += text[at:end]
        legal = _BEFORE_NEXT if self.called else _BEFORE_FIRST
        if end == len(text) and (self.called or legal.fullmatch(self._separator)):
            return end
        self._raw = [self._behind_last()]
        if end == len(text) or text[end] != "{" or not legal.fullmatch(self._separator):
            return self._stop(text, end)
        self._in_list = self._in_list or "[" in self._separator
        self._state, self._separator = JsonCalls._member, ""
        self._raw.append("{")
        self._called = self._arguments = False
        self._early, self._name = [], ""
        return end + 1

    def _member(self, text: str, at: int, deltas: list[Delta]) -> int:
        """Before the name of a member, or the end of the object."""
        found = _SPACE.match(text, at)
        start = found.end() if found is not None else at
        self._keep(text[at:start])
        if start == len(text):
            return start
        if text[start] == "}":
            self._keep("}")
            if not self._called and not self._name:
                return self._stop(text, start + 1)
            self._call(deltas)
            self._state = JsonCalls._between
            if not self._arguments:
                deltas.append(Delta("arguments", "{}"))
            return start + 1
        if (key := _KEY.match(text, start)) is None:
            if text[start] == '"' and len(text) - start < _MOST_KEY:
                self._rest = text[start:]
                return -1
            return self._stop(text, start)
        if len(key[0]) >= _MOST_KEY or not (self._called or self._known is None or key[1] in _MEMBERS):
            return self._stop(text, start)
        self._keep(key[0])
        self._key, self._value, self._words = key[1], JsonValue(), []
        is_arguments = self._key in ("arguments", "parameters") and not self._arguments
        if is_arguments and self._name:
            self._call(deltas)
        self._state = JsonCalls._arguments_value if is_arguments and text[key.end()] == "{" else JsonCalls._other_value
        return key.end()

    def _other_value(self, text: str, at: int, deltas: list[Delta]) -> int:
        """In a value that is needed as a whole, or not at all."""
        end = self._value.end(text, at)
        piece = text[at:] if end < 0 else text[at:end]
        self._keep(piece)
        self._words.append(piece)
        if end < 0:
            return len(text)
        self._state = JsonCalls._member
        value = "".join(self._words)
        if self._key == "name" and not self._name:
            self._name = self._tool(value)
            if not self._name:
                return self._stop(text, end)
            if self._known is None or self._arguments:
                self._call(deltas)
        elif self._key in ("arguments", "parameters") and not self._arguments:
            written = as_text(_decoded(value)) or value  # some models write them as a string
            self._pass_on("{}" if value in ("null", '""') else written, deltas)
            self._arguments = True
        return end

    def _arguments_value(self, text: str, at: int, deltas: list[Delta]) -> int:
        """In arguments, which are passed on as they come."""
        end = self._value.end(text, at)
        piece = text[at:] if end < 0 else text[at:end]
        self._keep(piece)
        self._pass_on(piece, deltas)
        if end < 0:
            return len(text)
        self._arguments = True
        self._state = JsonCalls._member
        return end

    def _behind_last(self) -> str:
        """What follows the last call, without what closes the list."""
        return _LIST_END.sub("", self._separator, count=1) if self._in_list else self._separator

    def _stop(self, text: str, at: int) -> int:
        """What has been read of an object, and what follows, is no call; returns the end of the text."""
        if self.called:
            self.rest = "".join(self._raw) + text[at:]
        self.failed = not self.called
        self._raw, self._value = [], JsonValue()
        return len(text)

    def _keep(self, text: str) -> None:
        if not self._called:
            self._raw.append(text)

    def _tool(self, value: str) -> str:
        """The tool that is named by a value; an empty text: none is."""
        name = as_text(_decoded(value))
        return name if self._known is None or name in self._known else ""

    def _call(self, deltas: list[Delta]) -> None:
        """The object is a call."""
        if self._called:
            return
        self._called, self.called, self._raw = True, True, []
        deltas.append(Delta("call", self._name))
        if self._early:
            deltas.append(Delta("arguments", "".join(self._early)))

    def _pass_on(self, arguments: str, deltas: list[Delta]) -> None:
        if self._called:
            deltas.append(Delta("arguments", arguments))
        else:
            self._early.append(arguments)


def _decoded(value: str) -> object:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None
