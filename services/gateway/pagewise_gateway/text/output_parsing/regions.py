"""Finds the regions of a text that arrives in pieces, by transformers' ``ResponseParser`` and a response template.

``ResponseParser`` tells which region each piece of text belongs to as it arrives. What it tells of the *value* of a
region comes only with the region's end, it raises if that is not what the template expects (such as the JSON of a call
that was cut off), and its buffers grow with the text, and are copied with every piece. So templates here declare every
region as text, call readers interpret it, and this layer bounds what a parser is fed: text in which no delimiter can
begin passes by it, and a new parser goes on from time to time.

``ResponseParser`` also ends a region with the first text that looks like its delimiter. A call may have that inside of
a string, so the text of calls, in a region of their own or not, passes by it up to a delimiter that is in no string.
"""

import re
from collections.abc import Callable, Generator, Iterator, Sequence
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
    ``quoting``: the region of calls, whose text may have delimiters inside of strings.
    """

    def __init__(self, regions: dict[str, tuple[tuple[str, ...], str | None]], quoting: str = "") -> None:
        fields: dict[str, Any] = {MAIN: _field()}
        for name, (opening, closing) in regions.items():
            close = {"close": closing} if closing else {"close_pattern": "" if closing == "" else _before_any(opening)}
            fields[name] = _field() | {"open": list(opening)} | close
        self.response_template = load_response_template({"start_anchor": _ANCHOR, "fields": fields})
        self.regions = regions
        delimiters = [text for opening, closing in regions.values() for text in (*opening, closing or "") if text]
        self.delimiters = tuple(dict.fromkeys(delimiters))
        first = "".join(sorted({re.escape(text[0]) for text in delimiters}))
        self.begins_delimiter = re.compile(f"[{first}]" if first else "(?!)")
        self.quoting = quoting
        opening, closing = regions.get(quoting, ((), None))
        self.ends_quoting = (closing,) if closing else opening


class Regions:
    """Tells which region each piece of a text belongs to.

    The events do not depend on how the text is cut into pieces, but for how many events of text there are. Characters
    that may begin a delimiter are held back. ``region``: the region that the text is in.
    """

    __slots__ = ("_begun", "_fed", "_held", "_parser", "_parser_holds", "_template", "region")

    def __init__(self, template: RegionTemplate, region: str = MAIN) -> None:
        self._template = template
        self.region = region
        self._held = ""  # what is held back: by the parser, or in a call by this object
        self._parser_holds = False
        self._begun = False  # whether there was any text but white space since the last border
        self._fed = 0
        self._parser = self._new_parser()

    def push(self, text: str, quoted: Callable[[], bool | None] = lambda: None) -> Iterator[RegionEvent]:
        """Take text; yield what is known of it now.

        ``quoted``: whether the text that was yielded so far ends inside of a string of a call; None: it is in no call.
        It is called where a delimiter may end the call.
        """
        while text:
            if self.region == self._template.quoting or quoted() is not None:
                text = yield from self._quoting(text, quoted)
                continue
            if self._settled():
                found = self._template.begins_delimiter.search(text)
                start = found.start() if found is not None else len(text)
                if start:
                    self._begun = self._begun or not text[:start].isspace()
                    yield RegionEvent("text", self.region, text[:start])
                    text = text[start:]
                    continue
            # Each search of the parser goes through all that it was fed. It is not fed what may be in a call: what
            # follows a delimiter, and the text behind that, of which the first character may begin a call.
            most = text[: _MOST_FED if self._begun or not self._outside() else 1]
            border = _first(self._held + most, self._template.delimiters)
            fed = max(1, border[1] - len(self._held)) if border is not None else len(most)
            yield from self._feed(text[:fed])
            text = text[fed:]

    def finish(self) -> list[RegionEvent]:
        """Return what was held back. No more text comes; the region that is open ends without a close."""
        if not self._parser_holds:
            return [RegionEvent("text", self.region, self._held)] if self._held else []
        _, told = self._parser.finalize()
        events: list[RegionEvent] = []
        self._add(told, self._held, events)
        return [event for event in events if event.kind == "text"]

    def _outside(self) -> bool:
        """Whether the text is outside of regions, or about to leave one that ends at once."""
        return self.region == MAIN or self._template.regions[self.region][1] == ""

    def _settled(self) -> bool:
        """Whether the parser holds nothing back, and is not about to leave a region that ends at once."""
        return not self._held and self._template.regions.get(self.region, ((), None))[1] != ""

    def _quoting(self, text: str, quoted: Callable[[], bool | None]) -> Generator[RegionEvent, None, str]:
        """Yield what is known of the text of calls; return the text behind its end.

        The parser sees the delimiter that ends the calls, and nothing that is before it.
        """
        if self._parser_holds:
            self._fed, self._parser, self._parser_holds = 0, self._new_parser(), False
        ends = self._template.ends_quoting if self.region == self._template.quoting else self._template.delimiters
        text, self._held = self._held + text, ""
        while (found := _first(text, ends)) is not None:
            start, end = found
            if start:
                yield RegionEvent("text", self.region, text[:start])
            delimiter, text = text[start:end], text[end:]
            if not quoted():
                yield from self._feed(delimiter)
                return text
            yield RegionEvent("text", self.region, delimiter)
        held = _begun(text, ends)
        text, self._held = text[: len(text) - held], text[len(text) - held :]
        if text:
            yield RegionEvent("text", self.region, text)
        return ""

    def _feed(self, text: str) -> list[RegionEvent]:
        if self._fed > _MOST_FED and self._settled():
            self._fed, self._parser = 0, self._new_parser()
        self._fed += len(text)
        events: list[RegionEvent] = []
        self._add(self._parser.feed(text), self._held + text, events)
        return events

    def _add(self, told: list[dict[str, Any]], text: str, events: list[RegionEvent]) -> None:
        """Add events of the parser, which are about the beginning of ``text``; the rest is held back."""
        at = 0
        for event in told:
            kind, region = event["type"], event["field"]
            opening, closing = self._template.regions.get(region, ((), None))
            if kind == "region_chunk":
                events.append(RegionEvent("text", region, event["text"]))
                self._begun = self._begun or not event["text"].isspace()
                at += len(event["text"])
            elif region == MAIN:
                continue
            elif kind == "region_open":
                self.region, self._begun = region, False
                events.append(RegionEvent("open", region))
                at += max(len(each) for each in opening if text.startswith(each, at))
            else:
                self.region, self._begun = MAIN, False
                events.append(RegionEvent("close", region))
                at += len(closing) if closing and text.startswith(closing, at) else 0
        self._held = text[at:]
        self._parser_holds = bool(self._held)

    def _new_parser(self) -> ResponseParser:
        """A parser that is in the region where the text is."""
        opening = self._template.regions[self.region][0][0] if self.region != MAIN else ""
        return ResponseParser(self._template.response_template, prefix=_ANCHOR + opening)


def _first(text: str, delimiters: Sequence[str]) -> tuple[int, int] | None:
    """Where the first of these delimiters begins and ends in a text, if one is in it."""
    found = [(text.find(each), each) for each in delimiters]
    start, delimiter = min(((at, each) for at, each in found if at >= 0), default=(-1, ""))
    return (start, start + len(delimiter)) if start >= 0 else None


def _begun(text: str, delimiters: Sequence[str]) -> int:
    """How many characters at the end of a text may begin one of these delimiters."""
    most = 0
    for delimiter in delimiters:
        tail = text[1 - len(delimiter) :]
        at = tail.find(delimiter[0])
        while at >= 0 and not delimiter.startswith(tail[at:]):
            at = tail.find(delimiter[0], at + 1)
        most = max(most, len(tail) - at if at >= 0 else 0)
    return most


def _field() -> dict[str, Any]:
    return {"content": "text", "content_args": {"strip": False}, "repeats": True}


def _before_any(texts: tuple[str, ...]) -> str:
    return f"(?={'|'.join(re.escape(text) for text in texts)})"
