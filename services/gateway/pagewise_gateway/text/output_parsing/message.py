"""Makes deltas of a message from pieces of which the kind is known."""

from pagewise_gateway.text.output_parsing.deltas import Delta, DeltaKind
from pagewise_gateway.text.output_parsing.reader import JsonValue


class MessageBuilder:
    """Adds up a message.

    Content and reasoning are passed on as they come, but for white space at their borders, which is left out; their
    parts are joined by line breaks. ``parallel``: whether calls after the first one count.
    """

    __slots__ = ("_arguments", "_parallel", "content", "num_calls", "reasoning", "whole")

    def __init__(self, parallel: bool) -> None:
        self.content, self.reasoning = _Trimmed("content", False), _Trimmed("reasoning", True)
        self.num_calls = 0
        """How many tool calls have begun."""
        self.whole = True
        """Whether the arguments of the last call that counts are there to their end."""
        self._arguments: JsonValue | None = None
        self._parallel = parallel

    def border(self) -> None:
        """Note that content and reasoning end here, and may go on later."""
        self.content.border()
        self.reasoning.border()

    def add(self, found: list[Delta], deltas: list[Delta]) -> None:
        """Add what a reader of calls has found."""
        for delta in found:
            if delta.kind == "content":
                self.content.push(delta.text, deltas)
                continue
            if delta.kind == "call":
                self.num_calls += 1
                self.content.border()
            if delta.text and (self._parallel or self.num_calls == 1):
                self._follow(delta)
                deltas.append(delta)

    def _follow(self, delta: Delta) -> None:
        """Notice whether the last call is whole."""
        if delta.kind == "call":
            self._arguments, self.whole = None, False
        elif not self.whole:
            if self._arguments is None:
                self._arguments = JsonValue()
                self.whole = delta.text[0] not in '{["'  # what a reader has not understood comes as a whole
            self.whole = self.whole or self._arguments.end(delta.text, 0) >= 0


class _Trimmed:
    """Passes text on without white space at its borders. ``begun``: whether there was any other text."""

    __slots__ = ("_bordered", "_fresh", "_held", "_kind", "begun")

    def __init__(self, kind: DeltaKind, bordered: bool) -> None:
        self._kind = kind
        self._bordered = self._fresh = bordered
        self._held: list[str] = []
        self.begun = False

    def push(self, text: str, deltas: list[Delta]) -> None:
        """Pass on text; white space at its end waits for more text."""
        stripped = text.rstrip()
        if not stripped:
            self._held.append(text)
            return
        before = ("\n" if self.begun else "") if self._fresh else "".join(self._held)
        deltas.append(Delta(self._kind, before + (stripped.lstrip() if self._fresh else stripped)))
        self._held = [text[len(stripped) :]]
        self.begun, self._fresh = True, False

    def border(self) -> None:
        """A region begins or ends here."""
        self._bordered = self._fresh = True
        self._held = []

    def finish(self, deltas: list[Delta]) -> None:
        """Pass on white space at the end, if there was no border at all."""
        held = "".join(self._held)
        if held and not self._bordered:
            deltas.append(Delta(self._kind, held))
