"""Answers as events of several types, the base of the answers of the Responses API and the Messages API."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Protocol

from pagewise_gateway.generation import SequenceDelta
from pagewise_gateway.http.answers import Answer, ChatRun, cut
from pagewise_gateway.http.errors import UnavailableError
from pagewise_gateway.http.writing import encode
from pagewise_gateway.text.output_parsing import Delta
from pagewise_gateway.text.output_parsing.deltas import DeltaKind


class Event(Protocol):
    """An event of a stream."""

    @property
    def type(self) -> str:
        """The name of the event."""


class EventAnswer(Answer):
    """Turns the one output of a chat into an answer. Whole answers are made of the same events as streams.

    An answer consists of items (messages, blocks, calls), each of which has a begin, text and an end.
    """

    end = b""
    kinds: ClassVar[Mapping[DeltaKind, str]]
    """The type of the item that each kind of delta belongs to."""

    def __init__(self, run: ChatRun) -> None:
        super().__init__(run.service, run.body, run.live)
        self._run = run
        self._parser = run.parser()
        self._begun = False
        self._open_kind = ""  # the type of the item that the next delta may continue
        self._num_items = 0

    def pieces(self, news: Iterable[SequenceDelta]) -> Iterator[bytes]:
        """Yield the events for these deltas in pieces."""
        for delta in news:
            for new in self._events_of(delta):
                yield b"" if new is None else as_bytes(new)

    def whole(self, outputs: Iterable[SequenceDelta]) -> Iterator[bytes]:
        """Yield the JSON body of an answer that is not streamed, in pieces.

        Raises:
            UnavailableError: the output was aborted before its end.
        """
        for delta in outputs:
            if delta.finish_reason == "abort":
                raise ended_early()
            for _ in self._events_of(delta):
                yield b""
        yield encode(self._response_body())

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
        """Yield the events of a piece of the message, which continues the open item or begins another item."""
        kind, text, begins_call = self.kinds[new.kind], new.text, new.kind == "call"
        if begins_call or kind != self._open_kind:
            yield from self._close()
            if self._num_items and not begins_call:
                text = text.removeprefix("\n")
            if begins_call:
                self._run.called.append(text)
            self._num_items += 1
            self._open_kind = kind
            yield from self._open_item(kind, new)
        if text and not begins_call:
            yield self._extend(kind, text)

    @abstractmethod
    def _begin(self) -> Iterator[Event]:
        """Yield the first events."""

    @abstractmethod
    def _open_item(self, kind: str, new: Delta) -> Iterator[Event]:
        """Yield the events of a new item. ``new``: its first piece, or the beginning of a call."""

    @abstractmethod
    def _extend(self, kind: str, text: str) -> Event:
        """Return the event that adds a text to the open item."""

    @abstractmethod
    def _close(self) -> Iterator[Event]:
        """Yield the events of the end of the open item, if there is one."""

    @abstractmethod
    def _finish(self, delta: SequenceDelta) -> Iterator[Event]:
        """Yield the last events. ``delta``: the last one, with the finish reason."""

    @abstractmethod
    def _response_body(self) -> object:
        """Return the whole answer, after its last event."""


def as_bytes(event: Event) -> bytes:
    """Return an event as it is sent."""
    return b"event: %b\ndata: %b\n\n" % (event.type.encode(), encode(event))


def ended_early() -> UnavailableError:
    """Return the error for an output that was aborted, which happens when a gateway stops."""
    return UnavailableError("the gateway is shutting down, and has ended this answer before its end: send it again")
