"""Reads tool calls with JSON arguments: objects with a name and arguments, and headers before arguments."""

import json
import re
from collections.abc import Generator
from typing import NamedTuple

from pagewise_gateway.text.output_parsing.deltas import Tools
from pagewise_gateway.text.output_parsing.reader import CallText, EndOfTextError
from pagewise_gateway.text.output_parsing.scanning import as_text

_MOST_KEY = 256
"""Characters of the longest name of a member. An object with a longer one is no call."""
_ARGUMENTS = ("arguments", "parameters")
_MEMBERS = frozenset({"name", "type", "id", *_ARGUMENTS})
_BETWEEN = re.compile(r"[\s,;\[\]}]*+")
_BEFORE_FIRST = re.compile(r"\s*\[?\s*")
_BEFORE_NEXT = re.compile(r"[\s,;]*")
_LIST_END = re.compile(r"^\s*\]")
_SPACE = re.compile(r"[\s,]*+")
_KEY = re.compile(r'"((?:[^"\\]|\\.)*)"\s*:\s*(?=\S)', re.DOTALL)
_OPEN_KEY = re.compile(r'"(?:[^"\\\x00-\x1f]|\\[^\x00-\x1f])*\\?')

_MOST_HEADER = 512
"""Characters before the arguments of a call. A longer text is no call."""
NAME = r"""[^\s\[\]{}<>()"'`]+"""
"""Matches the name of a function."""
_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_BEHIND = re.compile(r"[\s`\]}]*")
_LEGAL_BEHIND = re.compile(r"\s*(?:```)?\s*")


def json_calls(source: CallText, known: Tools | None = None) -> Generator[None]:
    """Read objects such as ``{"name": "f", "arguments": {...}}``: one or several, or a list of them.

    Arguments are passed on as they are written. Excess brackets before the delimiter are a part of the calls.
    ``known``: only objects that name one of these tools, and have only members of a call, are calls. Without a marker,
    nothing else distinguishes them from an answer in JSON.
    """
    in_list = False
    while True:
        separator, is_legal = yield from _separator(source, in_list)
        before = _behind_last(separator, in_list)
        if not is_legal or not source.text.startswith("{"):
            source.text = before + source.text
            return
        in_list = in_list or "[" in separator
        if not (yield from _ObjectCall(source, known, before).read()):
            return


def _separator(source: CallText, in_list: bool) -> Generator[None, None, tuple[str, bool]]:
    """Read the text before the next object. Returns it, and whether an object may follow it."""
    separator, legal = "", _BEFORE_NEXT if source.called else _BEFORE_FIRST
    try:
        while True:
            separator += source.take(_end(_BETWEEN, source.text))
            is_legal = legal.fullmatch(separator) is not None
            if source.text or not (source.called or is_legal):
                return separator, is_legal
            yield
    except EndOfTextError as end:
        if source.called and not end.closed:
            source.content(_behind_last(separator, in_list).strip())
        raise


def _behind_last(separator: str, in_list: bool) -> str:
    return _LIST_END.sub("", separator, count=1) if in_list else separator


def _end(pattern: re.Pattern[str], text: str) -> int:
    found = pattern.match(text)
    return found.end() if found is not None else 0


class _NoCallError(Exception):
    """An object is no call."""


class _ObjectCall:
    """Reads an object that may be a call. ``before``: the text before it, which is read again if it is none."""

    def __init__(self, source: CallText, known: Tools | None, before: str) -> None:
        self._source, self._known = source, known
        self._raw = [before]  # the text until it is known that the object is a call
        self._called = False
        self._name = ""
        self._early: list[str] = []  # arguments that came before the name
        self._whole = False  # whether the arguments have ended

    def read(self) -> Generator[None, None, bool]:
        """Read the object, and return whether it is a call; if not, all of it becomes unread text again."""
        source = self._source
        try:
            self._take(len("{"))
            while (key := (yield from self._key())) is not None:
                yield from self._member(key)
            self._call()
        except _NoCallError:
            source.text = "".join(self._raw) + source.text
            return False
        except EndOfTextError:
            if source.called and not self._called:
                source.content("".join(self._raw) + source.text)
            raise
        if not self._whole:
            source.add("{}")
        return True

    def _key(self) -> Generator[None, None, str | None]:
        """Read the name of the next member, and the colon. Returns None at the end of the object."""
        source = self._source
        while True:
            self._take(_end(_SPACE, source.text))
            if (found := _KEY.match(source.text)) is not None:
                break
            if source.text.startswith("}"):
                self._take(len("}"))
                return None
            if source.text and (source.text[0] != '"' or len(source.text) >= _MOST_KEY):
                raise _NoCallError
            source.quoting = _OPEN_KEY.fullmatch(source.text) is not None
            yield
        source.quoting = False
        if len(found[0]) >= _MOST_KEY:
            raise _NoCallError
        self._take(found.end())
        return found[1]

    def _member(self, key: str) -> Generator[None]:
        if key in _ARGUMENTS and not self._whole:
            yield from self._arguments()
        elif key == "name" and not self._name:
            yield from self._function()
        elif self._called or self._known is None or key in _MEMBERS:
            yield from self._value()
        else:
            raise _NoCallError

    def _function(self) -> Generator[None]:
        self._name = as_text(_decoded((yield from self._value())))
        if not self._name or (self._known is not None and self._name not in self._known):
            raise _NoCallError
        if self._known is None or self._whole:
            self._call()

    def _arguments(self) -> Generator[None]:
        if self._name:
            self._call()
        if self._source.text.startswith("{"):
            yield from self._source.json_value(self._pass_on)
        else:
            value = yield from self._value()
            written = as_text(_decoded(value)) or value  # some models write them as a string
            self._add("{}" if value in ("null", '""') else written)
        self._whole = True

    def _value(self) -> Generator[None, None, str]:
        pieces: list[str] = []

        def push(piece: str) -> None:
            self._keep(piece)
            pieces.append(piece)

        yield from self._source.json_value(push)
        return "".join(pieces)

    def _take(self, end: int) -> None:
        self._keep(self._source.take(end))

    def _keep(self, text: str) -> None:
        if not self._called:
            self._raw.append(text)

    def _pass_on(self, arguments: str) -> None:
        self._keep(arguments)
        self._add(arguments)

    def _add(self, arguments: str) -> None:
        if self._called:
            self._source.add(arguments)
        else:
            self._early.append(arguments)

    def _call(self) -> None:
        if self._called:
            return
        if not self._name:
            raise _NoCallError
        self._called, self._raw = True, []
        self._source.call(self._name)
        if self._early:
            self._source.add("".join(self._early))


def _decoded(value: str) -> object:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


# ---- a name before the arguments -----------------------------------------------------------------------


class _Header(NamedTuple):
    """The text that may come before arguments.

    Fields:
        whole: matches it. The group ``name`` is the name, which has to be that of a known tool unless there is a group
            ``sure``; ``only`` is the name of any tool. ``id``: the id of the call.
        part: matches beginnings of it.
    """

    whole: re.Pattern[str]
    part: re.Pattern[str]


def parts(*expressions: str) -> str:
    """Return an expression that matches beginnings of a text whose parts match these expressions. A literal, which has
    the prefix ``=``, may be cut at any character."""
    found = ""
    for expression in reversed(expressions):
        literal = expression.startswith("=")
        for unit in map(re.escape, reversed(expression[1:])) if literal else (f"(?:{expression})",):
            found = f"(?:{unit}{found})?"
    return found


_BEFORE_ID, _BEFORE_ARGUMENTS = (r"\s*", NAME, r"\s*"), ("=[ARGS]", r"\s*")
_MISTRAL = _Header(
    re.compile(rf"\s*(?P<name>{NAME})\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?(?P<sure>\[ARGS\]\s*)?(?P<only>(?!))?"),
    re.compile(
        parts(*_BEFORE_ID, "=[CALL_ID]", r"\s*", r"[\w-]+", r"\s*", *_BEFORE_ARGUMENTS)
        + "|"
        + parts(*_BEFORE_ID, *_BEFORE_ARGUMENTS)
    ),
)
"""Since version 11."""
_DEEPSEEK = _Header(
    re.compile(
        rf"\s*(?:(?:(?P<sure>function)|[^\s<]+){_SEPARATOR}\s*(?P<name>{NAME})|(?P<only>{NAME}){_SEPARATOR})"
        r"\s*(?:```(?:json)?\s*)?"
    ),
    re.compile(parts(r"\s*", NAME, f"={_SEPARATOR}", r"\s*", rf"(?:{NAME})?", r"\s*", "=```", "=json", r"\s*")),
)
"""Of V3 and R1 (type, separator, name, fence) or of V3.1 (name, separator)."""


_KIMI = _Header(
    re.compile(
        rf"\s*(?P<id>(?:functions\.)?(?P<only>{NAME}):[0-9]+)\s*{re.escape(_KIMI_ARGUMENTS)}\s*(?P<name>(?!))?(?P<sure>(?!))?"
    ),
    re.compile(parts(r"\s*", NAME, r"\s*", f"={_KIMI_ARGUMENTS}", r"\s*")),
)


def _begin(header: _Header, source: CallText, text: str, tools: Tools) -> bool:
    """Begin the call of a header, and return whether it is the header of a call."""
    if (found := header.whole.fullmatch(text)) is None:
        return False
    name = found["name"] or found["only"]
    if not (found["sure"] or found["only"] or name in tools):
        return False
    source.call(name, found.groupdict().get("id") or "")
    return True


def _header_call(header: _Header, source: CallText, tools: Tools) -> Generator[None]:
    try:
        while (brace := source.text.find("{")) < 0:
            if len(source.text) > _MOST_HEADER or header.part.fullmatch(source.text) is None:
                return
            yield
    except EndOfTextError as end:
        if end.closed and _begin(header, source, source.text, tools):
            source.add("{}")
        return
    if brace <= _MOST_HEADER and _begin(header, source, source.text[:brace], tools):
        source.take(brace)
        yield from source.json_value(source.add)


def deepseek_call(source: CallText, tools: Tools) -> Generator[None]:
    """Read a call of DeepSeek: a type and a name, or a name alone, and arguments."""
    yield from _header_call(_DEEPSEEK, source, tools)
    if source.called:
        yield from end_of_call(source)


def end_of_call(source: CallText) -> Generator[None]:
    """Read the text before the delimiter after a call. A fence and excess brackets are a part of the call."""
    try:
        while len(source.text) <= _MOST_HEADER and _BEHIND.fullmatch(source.text):
            yield
    except EndOfTextError as end:
        if not end.closed and _LEGAL_BEHIND.fullmatch(source.text) is None:
            source.content(source.text)


def kimi_call(source: CallText, tools: Tools) -> Generator[None]:
    """Read a call of Kimi: an id such as ``functions.f:0``, and arguments."""
    yield from _header_call(_KIMI, source, tools)
    if source.called:
        yield from end_of_call(source)


def mistral_calls(source: CallText, tools: Tools) -> Generator[None]:
    """Read calls of Mistral: a list of objects, or since version 11 a name and arguments."""
    while not source.text.lstrip():
        source.text = ""
        yield
    source.text = source.text.lstrip()
    yield from json_calls(source) if source.text[0] in "[{" else _header_call(_MISTRAL, source, tools)
