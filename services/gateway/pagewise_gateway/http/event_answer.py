"""Answers to chats in the shapes of other APIs: one JSON body, or a stream of events that have types."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Protocol

from aiohttp import web

from pagewise_gateway.generation import SequenceDelta
from pagewise_gateway.http.chat import ChatRun, cut
from pagewise_gateway.http.context import CLIENT
from pagewise_gateway.http.errors import APIError, UnavailableError
from pagewise_gateway.http.writing import encode, stream_events
from pagewise_gateway.text.output_parsing import Delta
from pagewise_gateway.text.output_parsing.deltas import DeltaKind


class Event(Protocol):
    """An event of a stream."""

    @property
    def type(self) -> str:
        """What it tells of; also the name of the event."""


class EventAnswer(ABC):
    """Turns the one output of a chat into an answer. Whole answers are made of the same events as streams."""

    cheap = False
    end = b""
    kinds: ClassVar[Mapping[DeltaKind, str]]
    """The type of the item that each kind of delta belongs to."""

    def __init__(self, run: ChatRun) -> None:
        self._run = run
        self._parser = run.parser()
        self._begun = False
        self._open_kind = ""  # the type of the item that the next delta may continue
        self._num_items = 0

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Answer ``request`` with a stream of events if its body asks for one, else with one JSON body.

        Raises:
            UnavailableError: the output was ended before its end, and is not streamed.
        """
        if self._run.body.stream:
            return await stream_events(request, self._run.live, self)
        pieces = self._answer(await self._run.live.outcome())
        body = await self._run.service.turns.all(request[CLIENT].name, pieces)
        return web.Response(body=body, content_type="application/json")

    # ---- for ``stream_events`` -----------------------------------------------------------------------

    def quick(self) -> bool:
        """Whether the events of what has arrived may be made at once."""
        return self._run.quick()

    def events(self, news: list[SequenceDelta]) -> bytes:
        """Return the events for these deltas."""
        return b"".join(self.pieces(news))

    def pieces(self, news: Iterable[SequenceDelta]) -> Iterator[bytes]:
        """Yield the same in pieces."""
        for delta in news:
            for event in self._events_of(delta):
                yield b"" if event is None else as_bytes(event)

    def last(self) -> bytes:
        """The last event tells that the answer is complete, so nothing is left."""
        return b""

    @abstractmethod
    def error(self, error: APIError) -> bytes:
        """Return the event that ends a stream which has failed."""

    # ---- helpers -------------------------------------------------------------------------------------

    def _answer(self, outputs: Iterable[SequenceDelta]) -> Iterator[bytes]:
        for delta in outputs:
            if delta.finish_reason == "abort":
                raise ended_early()
            for _ in self._events_of(delta):
                yield b""
        yield encode(self._whole())

    def _events_of(self, delta: SequenceDelta) -> Iterator[Event | None]:
        """Yield the events of a delta, and None where other tasks may run."""
        if not self._begun:
            self._begun = True
            yield from self._begin()
        for text in cut(delta.text):
            for new in self._parser.push(text):
                yield from self._take(new)
            yield None
        if delta.finish_reason is not None:
            for new in self._parser.finish():
                yield from self._take(new)
            yield from self._finish(delta)

    def _take(self, new: Delta) -> Iterator[Event]:
        """Yield the events of a piece of the message, which continues the item that is open, or begins another one."""
        kind, text, begins_call = self.kinds[new.kind], new.text, new.kind == "call"
        if begins_call or kind != self._open_kind:
            yield from self._close()
            if self._num_items and not begins_call:
                text = text.removeprefix("\n")
            self._num_items += 1
            self._open_kind = kind
            yield from self._open_item(kind, text)
        if text and not begins_call:
            yield self._extend(kind, text)

    @abstractmethod
    def _begin(self) -> Iterator[Event]:
        """Yield the first events."""

    @abstractmethod
    def _open_item(self, kind: str, name: str) -> Iterator[Event]:
        """Yield the events of a new item. ``name``: of the function, if it is a call."""

    @abstractmethod
    def _extend(self, kind: str, text: str) -> Event:
        """Return the event of a text that the open item goes on with."""

    @abstractmethod
    def _close(self) -> Iterator[Event]:
        """Yield the events of the end of the item that is open, if one is."""

    @abstractmethod
    def _finish(self, delta: SequenceDelta) -> Iterator[Event]:
        """Yield the last events. ``delta``: why the output has ended."""

    @abstractmethod
    def _whole(self) -> object:
        """Return the whole answer, after its last event."""


def as_bytes(event: Event) -> bytes:
    """Return an event as it is sent."""
    return b"event: %b\ndata: %b\n\n" % (event.type.encode(), encode(event))


def ended_early() -> UnavailableError:
    """Return the error for an output that was ended where it was, which happens when a gateway stops."""
    return UnavailableError("the gateway is shutting down, and has ended this answer before its end: send it again")
