"""Reads tool calls that are a list of calls in Python, such as ``[f(a=1), g(b="x")]``.

``ResponseParser`` has no content parser for them. Gemma 3 has no format of its own; the templates that are used with it
write calls like this, sometimes in a block that is fenced as ``tool_code``.
"""

import ast
import re
import warnings
from collections.abc import Callable
from typing import Any

from pagewise_gateway.text.output_parsing.deltas import Delta, Tools, as_json

_BEGIN = re.compile(r"(?:```(?:tool_code|python)?\s*)?\[?\s*([A-Za-z_][\w.-]*)\(")
_MOST_BEGIN = 256
"""Characters in which the first call has to begin; what is longer is no call."""
_NAME = re.compile(r"[\s,;]*([A-Za-z_][\w.-]*)\(")
_STOPS = re.compile(r"""["'()\[\]{}]""")
_IN_STRING = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}


_State = Callable[["PythonicCalls", str, list[Delta]], str]


class PythonicCalls:
    """Reads calls of ``tools``, each of which is passed on when it is whole. Text that begins with none is content."""

    __slots__ = ("_calling", "_depth", "_parts", "_quote", "_state", "_text", "_tools")

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._text = ""
        self._state: _State = PythonicCalls._begin
        self._calling = ""
        self._depth = 0
        self._quote = ""
        self._parts: list[str] = []

    @property
    def quoting(self) -> bool:
        """Whether the text goes on inside of a string."""
        return bool(self._quote)

    def push(self, text: str) -> list[Delta]:
        """Take text; return what is new."""
        deltas: list[Delta] = []
        text, self._text = self._text + text, ""
        while text:
            text = self._state(self, text, deltas)
        return deltas

    def finish(self, closed: bool) -> list[Delta]:
        """Return what is left. Of a call that is cut off there is its name."""
        if self._state is PythonicCalls._begin and self._text:
            return [Delta("content", self._text)]
        return [Delta("call", self._calling)] if self._calling else []

    # ---- states: each takes text and returns what is left of it ---------------------------------------

    def _begin(self, text: str, deltas: list[Delta]) -> str:
        found = _BEGIN.match(text, 0, _MOST_BEGIN + 1)
        if found is None or found.end() > _MOST_BEGIN:
            if found is None and len(text) < _MOST_BEGIN and _may_begin(text):
                self._text = text
                return ""
            self._state = PythonicCalls._content
        elif found[1] not in self._tools:
            self._state = PythonicCalls._content
        else:
            self._state = PythonicCalls._between
            return text[found.start(1) :]
        return text

    def _content(self, text: str, deltas: list[Delta]) -> str:
        deltas.append(Delta("content", text))
        return ""

    def _between(self, text: str, deltas: list[Delta]) -> str:
        found = _NAME.match(text)
        if found is not None and found.end() < _MOST_BEGIN:
            self._calling, self._depth, self._quote, self._parts = found[1], 1, "", []
            self._state = PythonicCalls._in_call
            return text[found.end() :]
        if re.fullmatch(r"[\s,;]*(?:[A-Za-z_][\w.-]*)?", text) and len(text) < _MOST_BEGIN:
            self._text = text
            return ""
        self._state = PythonicCalls._behind
        return text

    def _behind(self, text: str, deltas: list[Delta]) -> str:
        """Behind the last call: what closes the list and the block is left out, the rest is content."""
        rest = text.lstrip("]`)\n\t ")
        if rest:
            self._state = PythonicCalls._content
        return rest

    def _in_call(self, text: str, deltas: list[Delta]) -> str:
        at = 0
        while at < len(text):
            if self._quote:
                found = _IN_STRING[self._quote].search(text, at)
                if found is None:
                    break
                at = found.end()
                if found[0] == self._quote:
                    self._quote = ""
                elif at < len(text):
                    at += 1  # what is escaped
                else:  # it comes with the next piece
                    self._text = text[-1]
                    self._parts.append(text[:-1])
                    return ""
                continue
            found = _STOPS.search(text, at)
            if found is None:
                break
            at = found.end()
            if found[0] in "\"'":
                self._quote = found[0]
                continue
            self._depth += 1 if found[0] in "([{" else -1
            if not self._depth:
                self._parts.append(text[: at - 1])
                self._call(deltas)
                return text[at:]
        self._parts.append(text)
        return ""

    def _call(self, deltas: list[Delta]) -> None:
        written, name, self._calling = "".join(self._parts), self._calling, ""
        self._state, self._parts = PythonicCalls._between, []
        try:
            arguments = _arguments(written)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            arguments = written  # the client sees what the model has written
        deltas += [Delta("call", name), Delta("arguments", arguments)]


def _may_begin(text: str) -> bool:
    """Whether a text that is no call yet may become one."""
    return re.fullmatch(r"(?:`{1,3}[a-z_]*\s*)?\[?\s*(?:[A-Za-z_][\w.-]*)?", text) is not None


def _arguments(written: str) -> str:
    with warnings.catch_warnings():  # of escapes in strings that Python does not know
        warnings.simplefilter("ignore")
        call = ast.parse(f"f({written}\n)", mode="eval").body
    if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError("a call with arguments that have no names")
    values = {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}
    return as_json(values)


_WORDS = {"true": True, "false": False, "null": None}


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("an object with keys that are no strings")
        return {str(key): _literal(value) for key, value in zip(keys, node.values, strict=True)}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("a value that JSON does not have")
    return value
