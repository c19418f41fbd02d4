"""Reads tool calls that are a list of calls in Python, such as ``[f(a=1), g(b="x")]``.

``ResponseParser`` has no content parser for them. Gemma 3 has no format of its own; the templates that are used with it
write calls like this, sometimes in a block that is fenced as ``tool_code``.
"""

import re
from collections.abc import Callable

from pagewise_gateway.text.output_parsing.deltas import Delta, Tools
from pagewise_gateway.text.output_parsing.python_arguments import PythonArguments

_BEGIN = re.compile(r"(?:```(?:tool_code|python)?\s*)?\[?\s*([A-Za-z_][\w.-]*)\(")
_MOST_BEGIN = 512
"""Characters in which the first call has to begin; what is longer is no call."""
_NAME = re.compile(r"[\s,;]*([A-Za-z_][\w.-]*)\(")


_State = Callable[["PythonicCalls", str, list[Delta]], str]


class PythonicCalls:
    """Reads calls of ``tools``, each of which is passed on when it is whole."""

    __slots__ = ("_arguments", "_calling", "_closing", "_state", "_text", "_tools", "called", "failed", "rest")

    quoting = False  # no delimiter ends these calls

    def __init__(self, tools: Tools) -> None:
        self.called = self.failed = False
        self.rest: str | None = None
        self._closing: list[str] = []  # what is still to close the list, and the block
        self._tools = tools
        self._text = ""
        self._state: _State = PythonicCalls._begin
        self._calling = ""
        self._arguments = PythonArguments()

    def push(self, text: str) -> list[Delta]:
        """Take text; return what is new."""
        deltas: list[Delta] = []
        text, self._text = self._text + text, ""
        while text and not self.failed and self.rest is None:
            text = self._state(self, text, deltas)
        return deltas

    def finish(self, closed: bool) -> list[Delta]:
        """Return what is left. Of a call that is cut off there is its name."""
        if self._calling:
            return [Delta("call", self._calling)]
        return [Delta("content", self._text)] if self.called and self._text.strip() else []

    # ---- states: each takes text and returns what is left of it ---------------------------------------

    def _begin(self, text: str, deltas: list[Delta]) -> str:
        found = _BEGIN.match(text, 0, _MOST_BEGIN + 1)
        if found is not None and found.end() <= _MOST_BEGIN and found[1] in self._tools:
            self.called = True
            before = text[: found.start(1)]
            self._closing = ["]"] * ("[" in before) + ["```"] * ("```" in before)
            self._state = PythonicCalls._between
            return text[found.start(1) :]
        self.failed = found is not None or len(text) >= _MOST_BEGIN or not _may_begin(text)
        self._text = text
        return ""

    def _between(self, text: str, deltas: list[Delta]) -> str:
        found = _NAME.match(text)
        if found is not None and found.end() < _MOST_BEGIN:
            self._calling, self._arguments = found[1], PythonArguments()
            self._state = PythonicCalls._in_call
            return text[found.end() :]
        if re.fullmatch(r"[\s,;]*(?:[A-Za-z_][\w.-]*)?", text) and len(text) < _MOST_BEGIN:
            self._text = text
            return ""
        self._state = PythonicCalls._behind
        return text

    def _behind(self, text: str, deltas: list[Delta]) -> str:
        """Behind the last call: what closes the list and the block is a part of it."""
        while self._closing:
            left, closing = text.lstrip(), self._closing[0]
            if not left.startswith(closing):
                if closing.startswith(left) and len(text) < _MOST_BEGIN:
                    self._text = text
                    return ""
                break
            text = left[len(closing) :]
            del self._closing[0]
        self.rest = text
        return ""

    def _in_call(self, text: str, deltas: list[Delta]) -> str:
        end = self._arguments.push(text)
        if end < 0:
            return ""
        deltas += [Delta("call", self._calling), Delta("arguments", self._arguments.finish())]
        self._calling, self._state = "", PythonicCalls._between
        return text[end:]


def _may_begin(text: str) -> bool:
    """Whether a text that is no call yet may become one."""
    return re.fullmatch(r"(?:`{1,3}[a-z_]*\s*)?\[?\s*(?:[A-Za-z_][\w.-]*)?", text) is not None
