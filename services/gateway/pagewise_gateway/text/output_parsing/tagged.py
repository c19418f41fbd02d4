"""Reads tool calls whose parameters have tags: a name, and tags around the name and the value of each parameter.

GLM writes the name of a parameter between tags of its own, other models write it into the opening tag of the value.
"""

import json
import logging
import re
from collections.abc import Callable, Collection, Generator
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
_BORDERS_OF_GROUPS = 4
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

    Models forget the tag at the end of a value. Then a text ends where a line begins with a parameter that the tool has
    and the call has not had yet, and where the call and the group of calls end, if the text does not go on behind that.
    """

    def __init__(self, tags: Tags, borders: tuple[str, ...]) -> None:
        self._tags = tags
        self._followers = (tags.key, *borders) if tags.in_attribute else ("",)  # GLM's tags are no others'
        self._value_ends = tuple(filter(None, (tags.padding and tags.padding + tags.value_end, tags.value_end)))
        self._next = f"\n{tags.key}" if tags.in_attribute else tags.key
        self._closing, self._group, self._behind = "", ("", ""), re.compile("")
        if len(borders) == _BORDERS_OF_GROUPS:
            _, self._closing, *group = borders
            self._group = (group[0], group[1])
            followers = "|".join(map(re.escape, self._followers))
            self._behind = re.compile(rf"{re.escape(tags.value_end)}\s*(?:{followers})|({re.escape(group[0])})")
        self._call_ends = (f"\n{self._closing}", self._closing) if self._closing else ()
        self._ends = (*self._value_ends, self._next, *self._call_ends)

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
        others = set(tools.parameters(name))
        try:
            while not source.kept and (yield from _tag(source, tags.key)):
                key: list[str] = []
                yield from _until(source, (tags.key_end,), key.append)
                in_argument = True
                if tags.value and not (yield from _tag(source, tags.value)):
                    break
                text, is_string = self._key("".join(key))
                source.add(f"{before}{as_json(text)}: ")
                before = ", "
                others.discard(text)
                yield from self._value(source, _types(tools.types(name, text), is_string), others)
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

    def _value(self, source: CallText, types: frozenset[str], others: Collection[str]) -> Generator[None]:
        """Read a value, and the tag after it. ``others``: the parameters that may follow."""
        pieces: list[str] = []
        source.quoting = not types or "string" in types  # it may be text, which is written without quotes
        padding = self._tags.padding
        while padding and len(source.text) < len(padding) and padding.startswith(source.text):
            yield
        source.text = source.text.removeprefix(padding)
        if types == {"string"}:
            source.add('"')
            yield from self._text(source, lambda text: source.add(as_json(text)[1:-1]), others)
        elif "string" in types:
            yield from self._text(source, pieces.append, others)
        else:
            yield from self._json_value(source, pieces, others)
        source.quoting = False
        source.add('"' if types == {"string"} else _as_json("".join(pieces), types))

    def _text(self, source: CallText, push: Callable[[str], object], others: Collection[str]) -> Generator[None]:
        """Read text, and the tag after it."""
        while True:
            text, end = source.take_until(self._ends)
            if text:
                push(text)
            if not end:
                yield
            elif (yield from self._is_end(source, end, others)):
                return
            else:
                push(source.take(len(end)))

    def _json_value(self, source: CallText, pieces: list[str], others: Collection[str]) -> Generator[None]:
        """Read JSON, and the tag after it. In a string, a tag is text. If the tag is missing, the next parameter and
        the end of the call end JSON that is whole."""
        value, may_be_text = JsonValue(), source.quoting
        while True:
            text, end = source.take_until(self._ends)
            value.end(text, 0)
            pieces.append(text)
            if not end:
                source.quoting = may_be_text or value.quoting
                try:
                    yield
                except EndOfTextError as ended:
                    if not ended.closed or not is_json("".join(pieces)):
                        raise
                    source.kept, source.text = True, ""
                    return
            elif value.quoting or (may_be_text and not (yield from self._is_end(source, end, others))):
                value.end(end, 0)
                pieces.append(source.take(len(end)))
            else:
                if not may_be_text:
                    source.take(len(end) if end in self._value_ends else len(end) - len(self._tags.key))
                return

    def _is_end(self, source: CallText, end: str, others: Collection[str]) -> Generator[None, None, bool]:
        """Whether a text ends at the tag that comes next. If so, the separator behind the text is read."""
        if end == self._next:
            return (yield from self._is_next(source, others))
        if end in self._call_ends:
            return (yield from self._is_closed(source, len(end)))
        while True:
            rest = source.text[len(end) :].lstrip()
            if rest.startswith(self._followers):
                source.text = rest
                return True
            if not begins(rest, self._followers):
                return False
            yield

    def _is_next(self, source: CallText, others: Collection[str]) -> Generator[None, None, bool]:
        """Whether one of the parameters ``others`` begins here."""
        start = len(self._next)
        while (at := source.text.find(self._tags.key_end, start, start + _MOST_NAME)) < 0:
            if len(source.text) >= start + _MOST_NAME or not others:
                return False
            yield
        if self._key(source.text[start:at])[0] not in others:
            return False
        source.text = source.text.removeprefix("\n")
        return True

    def _is_closed(self, source: CallText, length: int) -> Generator[None, None, bool]:
        """Whether the call ends here, with a tag of ``length`` characters and the end of its group.

        A text may have both. So if neither another group nor the end of the output comes before the end of a value,
        they are text.
        """
        _, group_end = self._group
        while not (rest := source.text[length:].lstrip()).startswith(group_end):
            if not group_end.startswith(rest):
                return False
            yield
        start = looked = len(source.text) - len(rest) + len(group_end)
        try:
            while (found := self._behind.search(source.text, looked)) is None:
                looked = max(start, self._may_go_on(source.text, looked))
                yield
        except EndOfTextError:
            source.kept = True
        else:
            if not found[1]:
                return False
        source.text = source.text[length:].lstrip()
        return True

    def _may_go_on(self, text: str, start: int) -> int:
        """Return where the end of a value, or another group, may have begun in a text that is not complete."""
        tag = self._tags.value_end
        at = text.rfind(tag, start)
        if at >= 0 and begins(text[at + len(tag) :].lstrip(), self._followers):
            return at
        return len(text) - begun(text, (tag, self._group[0]))


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
