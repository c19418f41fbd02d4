"""Makes deltas of a message from pieces whose kind is known, and finds out the kinds in states."""

from collections.abc import Callable
from typing import Any

from pagewise_gateway.text.output_parsing.deltas import Delta, DeltaKind
from pagewise_gateway.text.output_parsing.reader import JsonValue


class MessageBuilder:
    """Adds up a message.

    Content and reasoning are passed on as they come, but for white space at their borders, which is left out; their
    parts are joined by line breaks. ``parallel``: whether calls after the first one count.
    """

    __slots__ = ("_arguments", "_deltas", "_parallel", "content", "num_calls", "reasoning", "whole")

    def __init__(self, parallel: bool) -> None:
        self._deltas: list[Delta] = []
        self.content, self.reasoning = _Trimmed("content", self._deltas), _Trimmed("reasoning", self._deltas)
        self.reasoning.border()
        self.num_calls = 0
        """How many tool calls have begun."""
        self.whole = True
        """Whether the arguments of the last call that counts are there to their end."""
        self._arguments: JsonValue | None = None
        self._parallel = parallel

    def take(self) -> list[Delta]:
        """Return the new deltas."""
        new = self._deltas.copy()
        self._deltas.clear()
        return new

    def border(self) -> None:
        """Note that content and reasoning end here, and may go on later."""
        self.content.border()
        self.reasoning.border()

    def add(self, found: list[Delta]) -> None:
        """Add the deltas of a reader of calls."""
        for delta in found:
            if delta.kind == "content":
                self.content.push(delta.text)
                continue
            if delta.kind == "call":
                self.num_calls += 1
                self.content.border()
            if delta.text and (self._parallel or self.num_calls == 1):
                self._follow(delta)
                self._deltas.append(delta)

    def _follow(self, delta: Delta) -> None:
        """Notice whether the last call is whole."""
        if delta.kind == "call":
            self._arguments, self.whole = None, False
        elif not self.whole:
            if self._arguments is None:
                self._arguments = JsonValue()
                self.whole = delta.text[0] not in '{["'  # text that a reader has not understood comes as a whole
            self.whole = self.whole or self._arguments.end(delta.text, 0) >= 0


class _Trimmed:
    """Passes text on without white space at its borders. ``begun``: whether there was any other text."""

    __slots__ = ("_bordered", "_deltas", "_fresh", "_held", "_kind", "begun")

    def __init__(self, kind: DeltaKind, deltas: list[Delta]) -> None:
        self._kind, self._deltas = kind, deltas
        self._bordered = self._fresh = self.begun = False
        self._held: list[str] = []

    def push(self, text: str) -> None:
        """Pass on text; white space at its end waits for more text."""
        stripped = text.rstrip()
        if not stripped:
            self._held.append(text)
            return
        before = ("\n" if self.begun else "") if self._fresh else "".join(self._held)
        self._deltas.append(Delta(self._kind, before + (stripped.lstrip() if self._fresh else stripped)))
        self._held = [text[len(stripped) :]]
        self.begun, self._fresh = True, False

    def border(self) -> None:
        """A region begins or ends here."""
        self._bordered = self._fresh = True
        self._held = []

    def finish(self) -> None:
        """Pass on white space at the end, if there was no border at all."""
        held = "".join(self._held)
        if held and not self._bordered:
            self._deltas.append(Delta(self._kind, held))


class Scanner:
    """Scans an output in states.

    Each state reads ``_pending``, and returns whether there may be more to read in it. States are plain functions: a
    method would hold its object, which then stays until the next garbage collection.
    """

    def __init__(self, message: MessageBuilder, state: Callable[[Any], bool]) -> None:
        self._message, self._state = message, state
        self._pending = ""
        self._final = False  # whether no more text comes

    def push(self, text: str) -> None:
        """Take text, and add its deltas to the message."""
        self._pending += text
        while self._pending and self._state(self):
            pass

    def finish(self) -> None:
        """Add the text that was held back. No more text comes."""
        self._final = True
        while self._pending and self._state(self):
            pass
