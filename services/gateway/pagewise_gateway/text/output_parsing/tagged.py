"""Reads tool calls whose parameters have tags: a name, and tags around the name and the value of each parameter.

GLM writes the name of a parameter between tags of its own, other models write it into the opening tag of the value.
"""

import json
import logging
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass

from pagewise_gateway.text.output_parsing.deltas import Tools
from pagewise_gateway.text.output_parsing.json_calls import NAME
from pagewise_gateway.text.output_parsing.pythonic import python_value
from pagewise_gateway.text.output_parsing.reader import CallText, EndOfTextError
from pagewise_gateway.text.output_parsing.scanning import JsonValue, as_json, begins, begun, is_json

log = logging.getLogger(__name__)

_BARE_NAME = re.compile(rf"\s*(?P<name>{NAME})?\s*")
_QUOTED_NAME = re.compile(rf"""\s*(?P<quote>["']?)(?P<name>{NAME})?(?:(?P=quote)\s*)?""")
_ATTRIBUTES = re.compile(
    r"""\s*(?P<quote>["']?)(?P<name>.*?)(?P=quote)\s*(?:string\s*=\s*"(?P<string>true|false)")?\s*""", re.DOTALL
)
_MOST_NAME = 512
"""Characters of a name with the space around it. A longer text is no call."""
_MOST_PYTHON = 65_536
"""Characters of a value that Python parses. A longer one has to be JSON."""


@dataclass(slots=True, frozen=True)
class Tags:
    """The tags of a call. The marker of the call comes before the name of the function.

    Fields:
        name_end: the end of the tag with the name of the function; empty: the name ends where a parameter begins.
        key, key_end: the tags around the name of a parameter. value, value_end: the tags around its value; ``value``
            empty: the value follows the name's tag.
        padding: a text that is left out at the beginning and at the end of a value.
        says_type: whether the tag has an attribute for strings: ``string="true"`` or ``string="false"``.
    """

    name_end: str
    key: str
    key_end: str
    value: str
    value_end: str
    padding: str = ""
    says_type: bool = False

    @property
    def inner(self) -> tuple[str, ...]:
        """The tags inside of a call."""
        return (self.key, self.value_end) if self.in_attribute else (self.key, self.key_end, self.value, self.value_end)

    @property
    def in_attribute(self) -> bool:
        """Whether names are attributes in tags, which may have quotes."""
        return not self.value


GLM_TAGS = Tags("", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
QWEN_TAGS = Tags(">", "<parameter=", ">", "", "</parameter>", "\n")
MINIMAX_TAGS = Tags(">", "<parameter name=", ">", "", "</parameter>")
DSML_TAGS = Tags(">", "<\uff5cDSML\uff5cparameter name=", ">", "", "</\uff5cDSML\uff5cparameter>", says_type=True)


class TaggedCall:
    """Reads one call with these tags.

    The values of string parameters are passed on as they come, other values at their end. A value is a string if
    its parameter is declared as one, or if it is no JSON. Files contain tags such as ``</parameter>``, too: in a text,
    a tag ends the value only where another parameter or one of ``borders``, the tags around calls, follows.
    """

    def __init__(self, tags: Tags, borders: tuple[str, ...]) -> None:
        self._tags = tags
        self._followers = (tags.key, *borders) if tags.in_attribute else ("",)  # GLM's tags are no others'
        self._value_ends = tuple(filter(None, (tags.padding and tags.padding + tags.value_end, tags.value_end)))

    def __call__(self, source: CallText, tools: Tools) -> Generator[None]:
        """Read the call after its marker."""
        try:
            name = yield from self._name(source)
        except EndOfTextError as end:
            name = source.text.strip()
            if (
                end.closed and not self._tags.name_end and name in tools
            ):  # only the name distinguishes the call from other text
                source.call(name)
                source.add("{}")
            return
        if not name:
            return
        source.call(name)
        yield from self._arguments(source, tools, name)

    def _name(self, source: CallText) -> Generator[None, None, str]:
        """Read the name of the function, before or in the first tag; an empty text: no name."""
        tags = self._tags
        end, pattern = tags.name_end or tags.key, _QUOTED_NAME if tags.in_attribute else _BARE_NAME
        while (at := source.text.find(end)) < 0:
            before = source.text[: len(source.text) - begun(source.text, (end,))]
            if len(before) > _MOST_NAME or pattern.fullmatch(before) is None:
                return ""
            yield
        found = pattern.fullmatch(source.take(at))
        source.take(len(tags.name_end))
        return (found["name"] or "") if found is not None and at <= _MOST_NAME else ""

    def _arguments(self, source: CallText, tools: Tools, name: str) -> Generator[None]:
        tags, before, in_argument = self._tags, "{", False
        try:
            while (yield from _tag(source, tags.key)):
                key: list[str] = []
                yield from _until(source, (tags.key_end,), key.append)
                in_argument = True
                if tags.value and not (yield from _tag(source, tags.value)):
                    break
                text, is_string = self._key("".join(key))
                source.add(f"{before}{as_json(text)}: ")
                before = ", "
                yield from self._value(source, _types(tools.types(name, text), is_string))
                in_argument = False
        except EndOfTextError as end:
            if in_argument or not end.closed:  # the call is cut off
                return
        source.add("}" if before == ", " else "{}")

    def _key(self, text: str) -> tuple[str, str | None]:
        """Return the name of a parameter, and the attribute ``string`` of its tag."""
        if not self._tags.in_attribute or (found := _ATTRIBUTES.fullmatch(text)) is None:
            return text.strip(), None
        return found["name"].strip(), found["string"] if self._tags.says_type else None

    def _value(self, source: CallText, types: frozenset[str]) -> Generator[None]:
        pieces: list[str] = []
        source.quoting = not types or "string" in types  # it may be text, which is written without quotes
        padding = self._tags.padding
        while padding and len(source.text) < len(padding) and padding.startswith(source.text):
            yield
        source.text = source.text.removeprefix(padding)
        if types == {"string"}:
            source.add('"')
            yield from self._text(source, lambda text: source.add(as_json(text)[1:-1]))
        elif "string" in types:
            yield from self._text(source, pieces.append)
        else:
            yield from self._json_value(source, pieces)
        source.quoting = False
        source.add('"' if types == {"string"} else _as_json("".join(pieces), types))

    def _text(self, source: CallText, push: Callable[[str], object]) -> Generator[None]:
        """Read text, and the tag after it."""
        while True:
            end = yield from _until(source, self._value_ends, push)
            if (yield from self._is_end(source)):
                return
            push(end)

    def _is_end(self, source: CallText) -> Generator[None, None, bool]:
        """Whether a text has ended at the tag before; if so, the white space behind that is read."""
        while True:
            rest = source.text.lstrip()
            if rest.startswith(self._followers):
                source.text = rest
                return True
            if not begins(rest, self._followers):
                return False
            yield

    def _json_value(self, source: CallText, pieces: list[str]) -> Generator[None]:
        """Read JSON, and the tag after it. In a string, a tag is text."""
        value, may_be_text = JsonValue(), source.quoting
        while True:
            text, end = source.take_until(self._value_ends)
            source.take(len(end))
            value.end(text, 0)
            pieces.append(text)
            if not end:
                source.quoting = may_be_text or value.quoting
                yield
            elif value.quoting or (may_be_text and not (yield from self._is_end(source))):
                value.end(end, 0)
                pieces.append(end)
            else:
                return


def _types(declared: frozenset[str], is_string: str | None) -> frozenset[str]:
    """Return the types that a value may have. ``is_string``: the attribute of its tag, "true" or "false", or None."""
    if is_string == "true":
        return frozenset({"string"}) if not declared or "string" in declared else declared
    return declared - {"string"} or declared if is_string == "false" else declared


def _until(source: CallText, delimiters: tuple[str, ...], push: Callable[[str], object]) -> Generator[None, None, str]:
    """Read text up to one of these delimiters, with it. Returns the delimiter."""
    while True:
        text, end = source.take_until(delimiters)
        source.take(len(end))
        if text:
            push(text)
        if end:
            return end
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


def _as_json(text: str, types: frozenset[str]) -> str:
    is_text = "string" in types
    if "null" in types and text.strip() in ("null", "None"):  # Qwen's template writes the latter
        return "null"
    try:
        value = json.loads(text)
        written = as_json(value)
    except (ValueError, RecursionError):  # no JSON, nested too deeply, or a number that is too long for Python
        if not is_text and is_json(text):
            return text.strip()
        return _python_as_json(text) if types and not is_text else as_json(text)
    if is_text and not isinstance(value, str):
        return as_json(text)
    return written


def _python_as_json(text: str) -> str:
    """Return a value that is no text as JSON. Models write some values in Python: ``True``, ``{'a': 1}``."""
    if len(text) <= _MOST_PYTHON:
        try:
            value = python_value(text.strip())
            return as_json(text if isinstance(value, str) else value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            log.debug("the value of a parameter is neither JSON nor Python", exc_info=True)
    return as_json(text)
