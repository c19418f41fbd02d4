"""Reads tool calls whose name stands before their arguments, outside of the JSON."""

import re
from typing import NamedTuple

from pagewise_gateway.text.output_parsing.deltas import CallReader, Delta, Tools
from pagewise_gateway.text.output_parsing.json_calls import JsonCalls, JsonValue

_MOST_HEADER = 512
"""Characters before the arguments of a call; what is longer is no call."""
NAME = r"""[^\s\[\]{}<>()"'`]+"""
"""A name that a header may have."""
_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
_BEHIND = re.compile(r"[\s`\]}]*")
_LEGAL_BEHIND = re.compile(r"\s*(?:```)?\s*")


class Header(NamedTuple):
    """What may stand before arguments.

    Fields:
        whole: matches it. Its groups: ``name`` is the name, ``only`` one that needs no more to be called, and ``sure``
        is there if the name may be that of an unknown tool.
        part: matches beginnings of it.
    """

    whole: re.Pattern[str]
    part: re.Pattern[str]


def parts(*expressions: str) -> str:
    """Return the expression of beginnings of a text, of which these match the parts; a literal is cut anywhere."""
    found = ""
    for expression in reversed(expressions):
        literal = expression.startswith("=")
        for unit in map(re.escape, reversed(expression[1:])) if literal else (f"(?:{expression})",):
            found = f"(?:{unit}{found})?"
    return found


MISTRAL = Header(
    re.compile(rf"\s*(?P<name>{NAME})\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?(?P<sure>\[ARGS\]\s*)?(?P<only>(?!))?"),
    re.compile(
        "|".join(
            (
                parts(r"\s*", NAME, r"\s*", "=[CALL_ID]", r"\s*", r"[\w-]+", r"\s*", "=[ARGS]", r"\s*"),
                parts(r"\s*", NAME, r"\s*", "=[ARGS]", r"\s*"),
            )
        )
    ),
)
"""Since version 11."""
DEEPSEEK = Header(
    re.compile(
        rf"\s*(?:(?:(?P<sure>function)|[^\s<]+){_SEPARATOR}\s*(?P<name>{NAME})|(?P<only>{NAME}){_SEPARATOR})"
        r"\s*(?:```(?:json)?\s*)?"
    ),
    re.compile(parts(r"\s*", NAME, f"={_SEPARATOR}", r"\s*", rf"(?:{NAME})?", r"\s*", "=```", "=json", r"\s*")),
)
"""Of V3 and R1 (type, separator, name, fence) or of V3.1 (name, separator)."""


class HeaderCall:
    """Reads one call: a header, and then its arguments, which begin with the first brace.

    ``fenced``: whether a delimiter ends the call, and a fence and brackets too many before it are a part of the call.
    """

    __slots__ = ("_behind", "_ended", "_fenced", "_form", "_header", "_tools", "_value", "called", "failed", "rest")

    def __init__(self, form: Header, tools: Tools, *, fenced: bool) -> None:
        self.called = self.failed = False
        self.rest: str | None = None
        self._form = form
        self._tools = tools
        self._fenced = fenced
        self._header = self._behind = ""
        self._ended = False
        self._value = JsonValue()

    @property
    def quoting(self) -> bool:
        """Whether the text goes on inside of a string."""
        return self._value.quoting

    def push(self, text: str) -> list[Delta]:
        """Take text; return what is new."""
        deltas = []
        if not self.called:
            self._header += text
            brace = self._header.find("{")
            header = self._header if brace < 0 else self._header[:brace]
            if brace < 0 or len(header) > _MOST_HEADER:
                self.failed = len(header) > _MOST_HEADER or self._form.part.fullmatch(header) is None
                return []
            name = self._name(header)
            if not name:
                self.failed = True
                return []
            self.called = True
            deltas.append(Delta("call", name))
            text = self._header[brace:]
        if not self._ended:
            end = self._value.end(text, 0)
            self._ended = end >= 0
            deltas.append(Delta("arguments", text[:end] if self._ended else text))
            text = text[end:] if self._ended else ""
        if self._ended:
            self._behind += text
            if not self._fenced or len(self._behind) > _MOST_HEADER or _BEHIND.fullmatch(self._behind) is None:
                self.rest, self._behind = self._behind, ""
        return deltas

    def finish(self, closed: bool) -> list[Delta]:
        """Return what is left: a call without arguments, if its region has ended."""
        if self.called:
            is_text = not closed and _LEGAL_BEHIND.fullmatch(self._behind) is None
            return [Delta("content", self._behind)] if is_text else []
        if closed and (name := self._name(self._header)):
            self.called = True
            return [Delta("call", name), Delta("arguments", "{}")]
        return []

    def _name(self, header: str) -> str:
        """The name that is in a header; an empty text: it is none."""
        found = self._form.whole.fullmatch(header)
        if found is None:
            return ""
        name = found["name"] or found["only"]
        return name if found["sure"] or found["only"] or name in self._tools else ""


class MistralCalls:
    """Reads what follows Mistral's ``[TOOL_CALLS]``: a list of objects, or since version 11 a name and arguments."""

    __slots__ = ("_reader", "_tools")

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._reader: CallReader | None = None

    @property
    def called(self) -> bool:
        """Whether a call has begun."""
        return self._reader is not None and self._reader.called

    @property
    def failed(self) -> bool:
        """Whether the text is no call."""
        return self._reader is not None and self._reader.failed

    @property
    def rest(self) -> str | None:
        """The text behind the calls."""
        return self._reader.rest if self._reader is not None else None

    @property
    def quoting(self) -> bool:
        """Whether the text goes on inside of a string."""
        return self._reader is not None and self._reader.quoting

    def push(self, text: str) -> list[Delta]:
        """Take text; return what is new."""
        if self._reader is None:
            text = text.lstrip()
            if not text:
                return []
            self._reader = JsonCalls() if text[0] in "[{" else HeaderCall(MISTRAL, self._tools, fenced=False)
        return self._reader.push(text)

    def finish(self, closed: bool) -> list[Delta]:
        """Return what is left."""
        return self._reader.finish(closed) if self._reader is not None else []
