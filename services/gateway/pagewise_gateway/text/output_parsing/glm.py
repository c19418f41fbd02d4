"""Reads the tool calls of GLM 4.5: a name, and tags around the name and the value of each argument."""

import json
import re
from collections.abc import Callable, Generator

from pagewise_gateway.text.output_parsing.deltas import Tools
from pagewise_gateway.text.output_parsing.json_calls import NAME
from pagewise_gateway.text.output_parsing.reader import CallText, EndOfTextError
from pagewise_gateway.text.output_parsing.scanning import JsonValue, as_json, begun, is_json

_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_NAME_PART = re.compile(rf"\s*(?:{NAME})?\s*")
_MOST_NAME = 512
"""Characters of a name with the space around it. A longer text is no call."""


def glm_call(source: CallText, tools: Tools) -> Generator[None]:
    """Read one call. The values of parameters that are strings are passed on as they come, others at their end.

    A value is a string if its parameter is declared as one, or if it is no JSON.
    """
    try:
        name = yield from _name(source)
    except EndOfTextError as end:
        name = source.text.strip()
        if end.closed and name in tools:  # only the name distinguishes such a call from other text
            source.call(name)
            source.add("{}")
        return
    if not name:
        return
    source.call(name)
    yield from _arguments(source, tools, name)


def _arguments(source: CallText, tools: Tools, name: str) -> Generator[None]:
    before, in_argument = "{", False
    try:
        while (yield from _tag(source, _KEY)):
            key: list[str] = []
            yield from _until(source, _KEY_END, key.append)
            in_argument = True
            if not (yield from _tag(source, _VALUE)):
                break
            text = "".join(key).strip()
            source.add(f"{before}{as_json(text)}: ")
            before = ", "
            yield from _value(source, tools.types(name, text))
            in_argument = False
    except EndOfTextError as end:
        if in_argument or not end.closed:  # the call is cut off
            return
    source.add("}" if before == ", " else "{}")


def _name(source: CallText) -> Generator[None, None, str]:
    """Read the name before the first tag; an empty text: there is none."""
    while (at := source.text.find(_KEY)) < 0:
        before = source.text[: len(source.text) - begun(source.text, (_KEY,))]
        if len(before) > _MOST_NAME or _NAME_PART.fullmatch(before) is None:
            return ""
        yield
    name = source.take(at)
    return name.strip() if len(name) <= _MOST_NAME and _NAME_PART.fullmatch(name) else ""


def _until(source: CallText, delimiter: str, push: Callable[[str], object]) -> Generator[None]:
    ended = False
    while not ended:
        text, ended = source.take_before(delimiter)
        if text:
            push(text)
        if not ended:
            yield


def _tag(source: CallText, tag: str) -> Generator[None, None, bool]:
    """Read a tag, and return whether it comes next, after white space; if not, nothing is read."""
    while True:
        text, found = source.take_before(tag)
        if text.strip():
            source.text = text + (tag if found else "") + source.text
            return False
        if found:
            return True
        yield


def _value(source: CallText, types: frozenset[str]) -> Generator[None]:
    pieces: list[str] = []
    source.quoting = not types or "string" in types  # it may be text, which is written without quotes
    if types == {"string"}:
        source.add('"')
        yield from _until(source, _VALUE_END, lambda text: source.add(as_json(text)[1:-1]))
    elif "string" in types:
        yield from _until(source, _VALUE_END, pieces.append)
    else:
        yield from _json_value(source, pieces)
    source.quoting = False
    source.add('"' if types == {"string"} else _as_json("".join(pieces), types))


def _json_value(source: CallText, pieces: list[str]) -> Generator[None]:
    """Read JSON, and the tag after it. In a string, a tag is text."""
    value, may_be_text = JsonValue(), source.quoting
    while True:
        text, ended = source.take_before(_VALUE_END)
        value.end(text, 0)
        pieces.append(text)
        if not ended:
            source.quoting = may_be_text or value.quoting
            yield
        elif value.quoting:
            value.end(_VALUE_END, 0)
            pieces.append(_VALUE_END)
        else:
            return


def _as_json(text: str, types: frozenset[str]) -> str:
    is_text = "string" in types
    try:
        value = json.loads(text)
        written = as_json(value)
    except (ValueError, RecursionError):  # no JSON, nested too deeply, or a number that is too long for Python
        return as_json(text) if is_text or not is_json(text) else text.strip()
    if is_text and not isinstance(value, str) and not (value is None and "null" in types):
        return as_json(text)
    return written
