"""Finds the regions of a text that arrives in pieces, by transformers' ``ResponseParser`` and a response template.

``ResponseParser`` tells which region each piece of text belongs to as it arrives. What it tells of the *value* of a
region comes only with the region's end, it raises if that is not what the template expects (such as the JSON of a call
that was cut off), and its buffers grow with the text, and are copied with every piece. So templates here declare every
region as text, call readers interpret it, and this layer bounds what a parser is fed: text in which no delimiter can
begin passes by it, and a new parser goes on from time to time.
"""

import re
from typing import Any, Literal, NamedTuple

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

_ANCHOR = "\x00"
"""Begins each prefix, as a response template has to name something that does."""
_MOST_FED = 4096
"""Characters after which a new parser takes over, so that the buffers of one stay small."""

MAIN = "content"
"""The region of the text that is in no other one."""


class RegionEvent(NamedTuple):
    """Text of a region, or where one begins or ends. ``MAIN`` neither begins nor ends."""

    kind: Literal["open", "text", "close"]
    region: str
    text: str = ""


class RegionTemplate:
    """A response template whose regions are delimited by texts.

    ``regions``: of each region, the texts that open it, and the text that closes it. None: the region ends before the
    next text that opens it; an empty text: at once. Text outside of all regions is in ``MAIN``.
    """

    def __init__(self, regions: dict[str, tuple[tuple[str, ...], str | None]]) -> None:
        fields: dict[str, Any] = {MAIN: _field()}
        for name, (opening, closing) in regions.items():
            close = {"close": closing} if closing else {"close_pattern": "" if closing == "" else _before_any(opening)}
            fields[name] = _field() | {"open": list(opening)} | close
        self.response_template = load_response_template({"start_anchor": _ANCHOR, "fields": fields})
        self.openings = {name: opening[0] for name, (opening, _) in regions.items()}
        delimiters = [text for opening, closing in regions.values() for text in (*opening, closing or "") if text]
        self.delimiters = tuple(dict.fromkeys(delimiters))
        first = "".join(sorted({re.escape(text[0]) for text in delimiters}))
        self.begins_delimiter = re.compile(f"[{first}]" if first else "(?!)")


class Regions:
    """Tells which region each piece of a text belongs to.

    The events do not depend on how the text is cut into pieces, but for how many events of text there are. Characters
    that may begin a delimiter are held back. ``region``: the region that the text begins in.
    """

    __slots__ = ("_fed", "_parser", "_pending", "_template", "region")

    def __init__(self, template: RegionTemplate, region: str = MAIN) -> None:
        self._template = template
        self.region = region
        self._fed, self._pending = 0, False
        self._parser = self._new_parser()

    def push(self, text: str) -> list[RegionEvent]:
        """Take text; return what is known of it now."""
        quiet = self._template.begins_delimiter.search(text) is None
        if quiet and not self._pending:
            return [RegionEvent("text", self.region, text)] if text else []
        if self._fed > _MOST_FED and not self._pending:
            self._fed, self._parser = 0, self._new_parser()
        self._fed += len(text)
        events = self._events(self._parser.feed(text))
        # What is held back begins a delimiter, so nothing is if none begins in this text and its end has come back.
        self._pending = not (quiet and events and events[-1].kind == "text" and events[-1].text.endswith(text))
        return events

    def finish(self) -> list[RegionEvent]:
        """Return what was held back. No more text comes; the region that is open ends without a close."""
        _, events = self._parser.finalize()
        return [event for event in self._events(events) if event.kind == "text"]

    def _new_parser(self) -> ResponseParser:
        """A parser that is in the region where the text is."""
        opening = self._template.openings.get(self.region, "")
        return ResponseParser(self._template.response_template, prefix=_ANCHOR + opening)

    def _events(self, events: list[dict[str, Any]]) -> list[RegionEvent]:
        found = []
        for event in events:
            kind, region = event["type"], event["field"]
            if kind == "region_chunk":
                found.append(RegionEvent("text", region, event["text"]))
            elif region != MAIN and kind == "region_open":
                self.region = region
                found.append(RegionEvent("open", region))
            elif region != MAIN:
                self.region = MAIN
                found.append(RegionEvent("close", region))
        return found


def _field() -> dict[str, Any]:
    return {"content": "text", "content_args": {"strip": False}, "repeats": True, "join": ""}


def _before_any(texts: tuple[str, ...]) -> str:
    return f"(?={'|'.join(re.escape(text) for text in texts)})"
