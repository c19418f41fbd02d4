"""Reads the tool calls of Gemma 4, such as ``call:f{city:<|"|>Rome<|"|>,days:[1,2]}``.

Names in objects have no quotes. A special token delimits strings, so strings have no escapes.
"""

import re
from collections.abc import Generator

from pagewise_gateway.text.output_parsing.deltas import Tools
from pagewise_gateway.text.output_parsing.json_calls import NAME, end_of_call, parts
from pagewise_gateway.text.output_parsing.reader import CallText
from pagewise_gateway.text.output_parsing.scanning import as_json, is_json

QUOTE = '<|"|>'
"""Begins and ends a string."""
_SIGNS = (QUOTE, "{", "}", "[", "]", ",", ":")
_VALUE_SIGNS = _SIGNS[:-1]
_BEGIN = re.compile(rf"\s*call:\s*({NAME})\s*\{{")
_MAY_BEGIN = re.compile(parts(r"\s*", "=call:", r"\s*", NAME, r"\s*"))
_MOST_BEGIN = 512
"""Characters in which a call has to begin. A longer text is no call."""


def gemma_call(source: CallText, tools: Tools) -> Generator[None]:
    """Read a call. Strings are passed on as they come, and other values at their end."""
    while (found := _BEGIN.match(source.text)) is None:
        if len(source.text) > _MOST_BEGIN or _MAY_BEGIN.fullmatch(source.text) is None:
            return
        yield
    if found.end() > _MOST_BEGIN:
        return
    source.take(found.end())
    source.call(found[1])
    yield from _Arguments(source).read()
    yield from end_of_call(source)


class _Arguments:
    """Writes the arguments of a call as JSON, after their opening bracket."""

    def __init__(self, source: CallText) -> None:
        self._source = source
        self._open = ["}"]  # the brackets that close the open objects and lists
        self._comma = ""  # before the next member
        self._in_value = False  # whether the name of a member has come, in an object

    def read(self) -> Generator[None]:
        source = self._source
        source.add("{")
        while self._open:
            is_value = self._in_value or self._open[-1] == "]"
            text, sign = "", ""
            while not sign:
                piece, sign = source.take_until(_VALUE_SIGNS if is_value else _SIGNS)
                text += piece
                if not sign:
                    yield
            word = text.strip().removeprefix(":").strip() if is_value else text.strip()  # a name may have quotes
            if sign != QUOTE:
                source.take(len(sign))
                self._word(word, sign, is_value)
            elif word:
                self._word(word, "", is_value)
            else:
                source.take(len(sign))
                yield from self._string(is_value)

    def _string(self, is_value: bool) -> Generator[None]:
        """Read a string, which is a value or the name of a member."""
        source, name, ended = self._source, [], False
        if is_value:
            self._begin()
            source.add('"')
        source.quoting = True
        while not ended:
            text, ended = source.take_before(QUOTE)
            if text and is_value:
                source.add(as_json(text)[1:-1])
            name.append(text)
            if not ended:
                yield
        source.quoting = False
        if is_value:
            source.add('"')
            self._in_value = False
        else:
            self._name("".join(name))

    def _name(self, name: str) -> None:
        self._begin()
        self._source.add(f"{as_json(name)}: ")
        self._in_value = True

    def _word(self, word: str, sign: str, is_value: bool) -> None:
        """Take a text without quotes, and the sign after it."""
        if word and not is_value:
            self._name(word)
        elif word:
            self._begin()
            self._source.add(_value(word))
            self._in_value = False
        if sign in ("{", "["):
            self._begin()
            self._source.add(sign)
            self._open.append("}" if sign == "{" else "]")
            self._comma, self._in_value = "", False
        elif sign in ("}", "]", ","):
            if self._in_value:  # there is no value
                self._source.add("null")
            self._in_value = False
            if sign != ",":
                self._source.add(self._open.pop())
                self._comma = ", "

    def _begin(self) -> None:
        """Begin a name, the value of the last name, or a further value of a list."""
        if not self._in_value:
            self._source.add(self._comma)
        self._comma = ", "


def _value(word: str) -> str:
    if word.lower() in ("null", "none", "nil"):
        return "null"
    return word if is_json(word) else as_json(word)
