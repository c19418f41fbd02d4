"""Reads the tool calls of GLM 4.5: a name, and tags around the name and the value of each argument."""

import json
import re
from collections.abc import Callable

from pagewise_gateway.text.output_parsing.deltas import Delta, Tools, as_json, is_json
from pagewise_gateway.text.output_parsing.header_calls import NAME
from pagewise_gateway.text.output_parsing.json_calls import JsonValue

_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_NAME_PART = re.compile(rf"\s*(?:{NAME})?\s*")
_MOST_NAME = 512
"""Characters of a name with the space around it; what is longer is no call."""


_State = Callable[["GlmCall", str, bool, list[Delta]], None]


class _Until:
    """Passes text on until a delimiter comes; what may begin it is held back.

    ``value``: the text is JSON, and what is in its strings is no delimiter.
    """

    __slots__ = ("_held", "_value", "delimiter")

    def __init__(self, delimiter: str, value: JsonValue | None = None) -> None:
        self.delimiter = delimiter
        self._held = ""
        self._value = value

    @property
    def quoting(self) -> bool:
        """Whether the text goes on inside of a string."""
        return self._value is not None and self._value.quoting

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text before the delimiter, as far as it is known, and that behind it; None: it has not come."""
        text = self._held + text
        at = 0  # up to here, the value has seen it
        while (found := text.find(self.delimiter, at)) >= 0:
            behind = found + len(self.delimiter)
            self._follow(text[at:found])
            if not self.quoting:
                self._held = ""
                return text[:found], text[behind:]
            self._follow(text[found:behind])
            at = behind
        held = min(len(self.delimiter) - 1, len(text) - at)
        while not self.delimiter.startswith(text[len(text) - held :]):
            held -= 1
        self._held = text[len(text) - held :]
        self._follow(text[at : len(text) - held])
        return text[: len(text) - held], None

    @property
    def held(self) -> str:
        """The text that may begin the delimiter."""
        return self._held

    def _follow(self, text: str) -> None:
        if self._value is not None and self._value.end(text, 0) >= 0:
            self._value = None


class GlmCall:
    """Reads one call. The values of parameters that are strings are passed on as they come, others at their end.

    A value is a string if its parameter is declared as one; else it is JSON, and if it is not, a string.
    """

    def __init__(self, tools: Tools) -> None:
        self.called = self.failed = False
        self.rest: str | None = None
        self._tools = tools
        self._name = self._key = ""
        self._num_arguments = 0
        self._parts: list[str] = []
        # The value: whether it is always, or may be, a string without quotes; or may be one if it is no JSON.
        self._string = self._is_text = self._is_free = False
        self._state: _State = GlmCall._in_name
        self._until = _Until(_KEY)

    @property
    def quoting(self) -> bool:
        """Whether the text goes on inside of a value that may be text, or of a string."""
        return self._state is GlmCall._in_value and (self._is_free or self._until.quoting)

    def push(self, text: str) -> list[Delta]:
        """Take text; return what is new."""
        deltas: list[Delta] = []
        rest: str | None = text
        while rest and not self.failed:
            until = self._until
            before, rest = until.push(rest)
            if before.strip() and self._state in (GlmCall._before_key, GlmCall._before_value):
                deltas.append(Delta("arguments", "}" if self._num_arguments else "{}"))
                self.rest = before + (until.held if rest is None else until.delimiter + rest)
                break
            self._state(self, before, rest is not None, deltas)
        return deltas

    def finish(self, closed: bool) -> list[Delta]:
        """Return what is left: the end of the arguments, if the region has ended."""
        deltas: list[Delta] = []
        if not closed:
            return deltas
        if not self._name:
            name = ("".join(self._parts) + self._until.held).strip()
            if name not in self._tools:  # nothing else tells it from a word
                return deltas
            self._call(name, deltas)
        if self._state in (GlmCall._in_value, GlmCall._before_value):
            return deltas  # the call is cut off inside of its region
        deltas.append(Delta("arguments", "}" if self._num_arguments else "{}"))
        return deltas

    # ---- states: each takes the text before its delimiter ---------------------------------------------

    def _in_name(self, text: str, ended: bool, deltas: list[Delta]) -> None:
        self._parts = ["".join(self._parts) + text]
        name = self._parts[0].strip()
        if len(self._parts[0]) > _MOST_NAME or _NAME_PART.fullmatch(self._parts[0]) is None or (ended and not name):
            self.failed = True
        elif ended:
            self._call(name, deltas)
            self._next(GlmCall._in_key, _KEY_END)

    def _call(self, name: str, deltas: list[Delta]) -> None:
        self._name, self.called = name, True
        deltas.append(Delta("call", name))

    def _before_key(self, text: str, ended: bool, deltas: list[Delta]) -> None:
        if ended:
            self._next(GlmCall._in_key, _KEY_END)

    def _in_key(self, text: str, ended: bool, deltas: list[Delta]) -> None:
        self._parts.append(text)
        if ended:
            self._key = "".join(self._parts).strip()
            self._next(GlmCall._before_value, _VALUE)

    def _before_value(self, text: str, ended: bool, deltas: list[Delta]) -> None:
        if not ended:
            return
        types = self._tools.types(self._name, self._key)
        self._string, self._is_text = types == {"string"}, "string" in types
        self._is_free = self._is_text or not types
        before, quote = ", " if self._num_arguments else "{", '"' if self._string else ""
        self._num_arguments += 1
        self._pass_on(f"{before}{as_json(self._key)}: {quote}", deltas)
        self._next(GlmCall._in_value, _VALUE_END)
        self._until = _Until(_VALUE_END, None if self._is_text else JsonValue())

    def _in_value(self, text: str, ended: bool, deltas: list[Delta]) -> None:
        if self._string:
            self._pass_on(as_json(text)[1:-1] + ('"' if ended else ""), deltas)
        else:
            self._parts.append(text)
            if ended:
                self._pass_on(self._value("".join(self._parts)), deltas)
        if ended:
            self._next(GlmCall._before_key, _KEY)

    def _next(self, state: "_State", delimiter: str) -> None:
        self._state = state
        self._until = _Until(delimiter)
        self._parts = []

    def _pass_on(self, text: str, deltas: list[Delta]) -> None:
        if text and self._name:
            deltas.append(Delta("arguments", text))

    def _value(self, text: str) -> str:
        try:
            value = json.loads(text)
            written = as_json(value)
        except (ValueError, RecursionError):  # no JSON, nested too deeply, or a number that Python does not have
            return as_json(text) if self._is_text or not is_json(text) else text.strip()
        types = self._tools.types(self._name, self._key)
        if self._is_text and not isinstance(value, str) and not (value is None and "null" in types):
            return as_json(text)
        return written
