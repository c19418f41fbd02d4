"""Reads tool calls whose name stands before their arguments, outside of the JSON."""

from collections.abc import Callable

from pagewise_gateway.text.output_parsing.deltas import CallReader, Delta
from pagewise_gateway.text.output_parsing.json_calls import JsonCalls, JsonValue

_MOST_HEADER = 512
"""Characters before the arguments of a call; what is longer is no call."""


class HeaderCall:
    """Reads one call: a header, and then its arguments, which begin with the first brace.

    ``name``: returns the name of the function that is in a header, or an empty string.
    """

    __slots__ = ("_called", "_ended", "_header", "_name", "_value")

    def __init__(self, name: Callable[[str], str]) -> None:
        self._name = name
        self._header = ""
        self._called = self._ended = False
        self._value = JsonValue()

    @property
    def quoting(self) -> bool:
        """Whether the text goes on inside of a string."""
        return self._value.quoting

    def push(self, text: str) -> list[Delta]:
        """Take text; return what is new."""
        if self._ended:
            return [] if self._called else [Delta("content", text)]
        deltas = []
        if not self._called:
            self._header += text
            brace = self._header.find("{")
            if brace < 0 and len(self._header) <= _MOST_HEADER:
                return []
            name = self._name(self._header[:brace]) if 0 <= brace <= _MOST_HEADER else ""
            if not name:
                self._ended = True
                return [Delta("content", self._header)]
            self._called = True
            deltas.append(Delta("call", name))
            text = self._header[brace:]
        end = self._value.end(text, 0)
        self._ended = end >= 0
        deltas.append(Delta("arguments", text[:end] if self._ended else text))
        return deltas

    def finish(self, closed: bool) -> list[Delta]:
        """Return what is left: a call without arguments, if its region has ended."""
        if self._called or self._ended or not closed:
            return []
        if name := self._name(self._header):
            return [Delta("call", name), Delta("arguments", "{}")]
        return [Delta("content", self._header)] if self._header.strip() else []


class MistralCalls:
    """Reads what follows Mistral's ``[TOOL_CALLS]``: a list of objects, or since version 11 a name and arguments."""

    __slots__ = ("_reader",)

    def __init__(self) -> None:
        self._reader: CallReader | None = None

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
            self._reader = JsonCalls() if text[0] in "[{" else HeaderCall(_mistral_name)
        return self._reader.push(text)

    def finish(self, closed: bool) -> list[Delta]:
        """Return what is left."""
        return self._reader.finish(closed) if self._reader is not None else []


def deepseek_name(header: str) -> str:
    """Return the name in a header of DeepSeek V3 and R1 (type, separator, name, fence) or of V3.1 (name, separator)."""
    before, _, after = header.partition("<\uff5ctool\u2581sep\uff5c>")
    behind = after.partition("```")[0].strip()
    return behind or before.strip()


def _mistral_name(header: str) -> str:
    return header.partition("[")[0].strip()  # [CALL_ID] or [ARGS] may follow
