"""Makes deltas of a message from the text of an output while it arrives."""

import re

from pagewise_gateway.text.output_parsing.deltas import CallReader, Delta, DeltaKind, Tools
from pagewise_gateway.text.output_parsing.formats import CALL, HEADER, REASONING, OutputFormat, Start
from pagewise_gateway.text.output_parsing.json_calls import JsonValue
from pagewise_gateway.text.output_parsing.regions import MAIN, RegionEvent, Regions, RegionTemplate

_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")
_CHANNEL = re.compile(r"(?:.*<\|channel\|>)?\s*(\w*)", re.DOTALL)


class MessageParser:
    """Parses one output.

    However the text is cut into pieces, the deltas add up to the same message. Content and reasoning are passed on as
    they come, but for white space at the borders of regions, which is left out; what is between regions is joined by
    line breaks. A text without regions stays as it is. No text raises an error.

    ``start``: where the output begins. ``continues``: whether it goes on with a message of which the prompt has a part.
    ``tools``: of the request. ``parallel``: whether calls after the first one count.
    """

    __slots__ = (
        "_arguments",
        "_content",
        "_format",
        "_header",
        "_kind",
        "_opening",
        "_parallel",
        "_reader",
        "_reasoning",
        "_regions",
        "_tools",
        "num_calls",
        "whole",
    )

    def __init__(
        self,
        output_format: OutputFormat,
        start: Start = "main",
        tools: Tools | None = None,
        *,
        continues: bool = False,
        parallel: bool = True,
    ) -> None:
        self.num_calls = 0
        """How many tool calls have begun."""
        self.whole = True
        """Whether the arguments of the last call that counts are there to their end."""
        self._arguments: JsonValue | None = None
        self._format = output_format
        self._tools = tools or Tools({})
        self._parallel = parallel
        self._content, self._reasoning = _Trimmed("content", False), _Trimmed("reasoning", True)
        self._reader: CallReader | None = None
        self._header: list[str] = []
        self._kind: DeltaKind = "content"  # of the text that is in no region
        # What has come of an opening that the output need not have.
        self._opening: str | None = "" if start == "implied" else None
        if start == "ended":
            self._content.border()
        region = REASONING if start in ("reasoning", "implied") else MAIN
        self._regions = Regions(output_format.template, HEADER if output_format.harmony and not continues else region)

    def push(self, text: str) -> list[Delta]:
        """Take text; return what is new in the message."""
        deltas: list[Delta] = []
        for event in self._regions.push(text, self._quoted):
            self._take(event, deltas)
        return deltas

    def finish(self) -> list[Delta]:
        """Return what was held back. No more text comes."""
        deltas: list[Delta] = []
        in_header = self._regions.region == HEADER
        for event in self._regions.finish():
            self._take(event, deltas)
        self._end_calls(False, deltas)
        self._no_opening(deltas)
        header = "".join(self._header)
        if in_header and not self.num_calls and "<|channel|>" not in header:
            self._content.push(header, deltas)
        self._content.finish(deltas)
        return deltas

    def _quoted(self) -> bool | None:
        return self._reader.quoting if self._reader is not None else None

    def _take(self, event: RegionEvent, deltas: list[Delta]) -> None:
        region, text = event.region, event.text
        if event.kind != "text":
            self._border(event, deltas)
        elif region == REASONING:
            self._think(text, deltas)
        elif region == HEADER:
            self._header.append(text)
        elif self._reader is not None:
            self._add(self._reader.push(text), deltas)
        elif region == MAIN:
            self._main(text, deltas)

    def _border(self, event: RegionEvent, deltas: list[Delta]) -> None:
        """A region begins or ends."""
        self._end_calls(True, deltas)
        self._no_opening(deltas)
        self._content.border()
        self._reasoning.border()
        self._kind = "content"
        if event.region == CALL and event.kind == "open" and self._format.tools is not None:
            self._reader = self._format.tools.reader(self._tools)
        elif event.region == HEADER and event.kind == "open":
            self._header = []
        elif event.region == HEADER:
            self._read_header(deltas)

    def _read_header(self, deltas: list[Delta]) -> None:
        """What follows in a text of gpt-oss: a call, reasoning, or content."""
        header = "".join(self._header)
        if (recipient := _RECIPIENT.search(header)) is not None:
            self._reader = _Arguments()
            self._add([Delta("call", recipient[1])], deltas)
        else:
            channel = _CHANNEL.match(header)
            hidden = "to=" in header or (channel is not None and channel[1] == "analysis")
            self._kind = "reasoning" if hidden else "content"

    def _main(self, text: str, deltas: list[Delta]) -> None:
        """Text outside of regions."""
        if self._kind == "reasoning":
            self._reasoning.push(text, deltas)
            return
        tools, begin = self._format.tools, text.lstrip()
        if tools is None or self._content.begun or not begin or begin[0] not in tools.bare:
            self._content.push(text, deltas)
            return
        self._content.push(text[: len(text) - len(begin)], deltas)  # a part of it, if it turns out to be no call
        self._reader = tools.reader(self._tools)
        self._add(self._reader.push(begin), deltas)

    def _think(self, text: str, deltas: list[Delta]) -> None:
        """Reasoning. If it was implied that the text begins with it, its opening may come nevertheless."""
        if self._opening is not None and self._format.reasoning is not None:
            opening, begin = self._format.reasoning.opening, (self._opening + text).lstrip()
            if len(begin) < len(opening) and opening.startswith(begin):
                self._opening = begin
                return
            self._opening = None
            text = begin.removeprefix(opening)
        self._reasoning.push(text, deltas)

    def _no_opening(self, deltas: list[Delta]) -> None:
        if self._opening:
            self._reasoning.push(self._opening, deltas)
        self._opening = None

    def _end_calls(self, closed: bool, deltas: list[Delta]) -> None:
        if self._reader is not None:
            reader, self._reader = self._reader, None
            self._add(reader.finish(closed), deltas)

    def _add(self, found: list[Delta], deltas: list[Delta]) -> None:
        """Add what a reader has found."""
        for delta in found:
            if delta.kind == "content":
                self._content.push(delta.text, deltas)
                continue
            if delta.kind == "call":
                self.num_calls += 1
                self._content.border()
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


_PLAIN = OutputFormat(RegionTemplate({}))


def make_plain() -> MessageParser:
    """Return a parser of an output that is content as it is."""
    return MessageParser(_PLAIN)


class _Arguments:
    """Reads the arguments of one call, which are all of a region, up to the end of the object that they are."""

    __slots__ = ("_ended", "_some", "_value")

    def __init__(self) -> None:
        self._some = self._ended = False
        self._value = JsonValue()

    @property
    def quoting(self) -> bool:
        """Whether the text goes on inside of a string."""
        return self._value.quoting

    def push(self, text: str) -> list[Delta]:
        """Take text; return what is new."""
        text = text if self._some else text.lstrip()
        if not text or self._ended:
            return []
        self._some = True
        end = self._value.end(text, 0)
        self._ended = end >= 0
        return [Delta("arguments", text[:end] if self._ended else text)]

    def finish(self, closed: bool) -> list[Delta]:
        """Return what is left: the arguments of a call that has none."""
        return [Delta("arguments", "{}")] if closed and not self._some else []


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
