"""Connections of clients: how fast bytes are parsed, how much the framing of HTTP may take, and how they are closed."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, cast

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from pagewise_gateway.http.loop_turns import LoopTurns

MAX_FRAMING_BYTES = 65_536
"""Bytes of the head of a request, or of what a chunked body has besides its content: sizes, extensions, trailers."""
BODY_PER_FRAMING = 8
"""A large chunked body may have a byte more of those for each so many bytes of content: chunks of about 50 bytes."""
LINGER_SECONDS = 5
"""For how long the rest of a refused body is read and thrown away before the connection is closed."""
LINGER_BODIES = 4
"""How much of it is thrown away, as a multiple of the largest body that is allowed, before the connection is closed."""

_REQUEST_SECONDS, _CLOSE_SECONDS = 0.0001, 0.0001
"""About the time that aiohttp takes for a request, however small, and for the end of a connection."""
_PIECE = 16_384
"""Bytes that are parsed at a time: 2 ms if they are chunks of one byte."""


class ClientConnection(web.RequestHandler):
    """aiohttp's connection, with turns between connections when much arrives, and a limit for what is not content.

    Bytes that have to wait for a turn are kept, and reading is paused meanwhile.

    Fields:
        key: the name of the API key that was used last on this connection; connections without one share their turns.
    """

    __slots__ = ("_discarded", "_held", "_limit", "_lingering", "_queued", "_turns", "key")

    def __init__(self, server: web.Server, turns: LoopTurns, largest_body: int, **options: Any) -> None:
        super().__init__(server, auto_decompress=False, lingering_time=0, **options)
        self.key = ""
        self._turns, self._limit = turns, LINGER_BODIES * largest_body
        self._held, self._queued = b"", False
        self._discarded: int | None = None
        self._lingering: asyncio.Future[None] | None = None
        self._parser = cast(Any, _Parser(self._parser, turns))

    def data_received(self, data: bytes) -> None:
        """Parse bytes that have arrived, or keep them until it is their turn. aiohttp calls this without bytes to go on
        with those that it has kept itself."""
        if not data:
            super().data_received(data)
        elif self._discarded is not None:
            self._discard(len(data))
        elif self._held or not self._turns.free():
            self._held += data
            self._wait_for_turn()
        elif len(data) <= _PIECE:
            super().data_received(data)
            self._turns.done()
        else:
            self._parse(data)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Close the connection, in turn: a thousand clients may hang up at the same time."""
        if self.ssl_context is not None:  # TLS has no half-closed connections
            return False
        self._turns.add(self.key, self._hang_up)
        return True  # asyncio leaves the transport open: ``_hang_up`` closes it

    def connection_lost(self, error: BaseException | None) -> None:
        """Drop what is kept: the client is gone."""
        self._held = b""
        super().connection_lost(error)

    async def linger(self, content: StreamReader, announced: int | None) -> None:
        """Throw away the rest of a refused body after the answer was written, so that the client reads the answer.

        A client that still sends when its connection is closed would see a reset instead of the answer. What arrives is
        not parsed. This lasts until the body is complete or the client hangs up, but for ``LINGER_SECONDS`` and
        ``LINGER_BODIES`` at most. HTTP servers call it a lingering close (RFC 9112, section 9.6).

        ``announced``: the Content-Length of the body.
        """
        if self._parser is None or self.transport is None:
            return
        arrived = content.total_bytes + cast(Any, self._parser).framing + len(self._held)
        self._discarded, self._held = 0, b""
        if content.exception() is None:
            content.read_nowait()  # gives the memory back
        self._resume_transport_reading()
        if announced is not None:
            self._limit = min(self._limit, announced - arrived)
        if self.transport.can_write_eof():  # TLS cannot
            self.transport.write_eof()  # tells the client that nothing follows, so that it hangs up
        if self._limit > 0:
            self._lingering = asyncio.get_running_loop().create_future()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    await self._lingering

    def _discard(self, size: int) -> None:
        assert self._discarded is not None
        self._discarded += size
        if self._discarded >= self._limit and self._lingering is not None and not self._lingering.done():
            self._lingering.set_result(None)
        self._wait_for_turn()

    def _hang_up(self) -> None:
        self._turns.expect(_CLOSE_SECONDS)
        if self.transport is not None:
            self.transport.close()

    def _parse(self, data: bytes) -> None:
        """Parse bytes until the time of a slice is used up, or aiohttp pauses reading; keep the rest."""
        for start in range(0, len(data), _PIECE):
            free = self._turns.free()
            if start and (self._reading_paused or self._buffer_paused or not free):
                self._held = data[start:]
                if not (self._reading_paused or self._buffer_paused):
                    self._wait_for_turn()
                return
            super().data_received(data[start : start + _PIECE])
            self._turns.done()

    def _wait_for_turn(self) -> None:
        if len(self._held) > _PIECE or self._discarded is not None:
            self._pause_transport_reading()
        if not self._queued:
            self._queued = True
            self._turns.add(self.key, self._turn)

    def _turn(self) -> None:
        self._queued = False
        if self._reading_paused or self._buffer_paused:
            return  # aiohttp calls ``_resume_transport_reading`` later
        data, self._held = self._held, b""
        if data and self._parser is not None:
            self._parse(data)
        if not (self._held or self._queued or self._reading_paused or self._buffer_paused):
            super()._resume_transport_reading()

    def _resume_transport_reading(self) -> None:
        """Go on reading, as aiohttp asks; bytes that are kept are parsed first."""
        if self._held:
            self._wait_for_turn()
        elif not self._queued:
            super()._resume_transport_reading()


class _Parser:
    """aiohttp's parser, with a limit for all bytes that are not content of a body. It stops at the first error.

    aiohttp bounds single headers, but neither the extensions of chunks nor the number of small chunks. After an error
    it would go on, and store an error, with its bytes, for everything that arrives.

    Fields:
        framing: the number of bytes since the head of the request, or since the body before it, that were not content.
            The few bytes that are not parsed yet count too.
    """

    def __init__(self, parser: Any, turns: LoopTurns) -> None:
        self.framing = 0
        self._turns = turns
        self._parser, self._feed = parser, parser.feed_data
        self.message_consumed, self.pause_reading = parser.message_consumed, parser.pause_reading
        self._content: StreamReader | None = None
        self._seen, self._broken = 0, False

    def feed_data(self, data: bytes) -> tuple[Sequence[Any], bool, bytes]:
        """As aiohttp's.

        Raises:
            HttpProcessingError: the bytes are not HTTP, or the head of a request is too long.
        """
        if self._broken:
            return (), False, b""
        try:
            messages, upgraded, tail = self._feed(data)
        except HttpProcessingError as error:
            self._broken = True
            if self._content is None or self._content.is_eof():
                raise
            self._content.set_exception(web.RequestPayloadError(str(error)))
            return (), False, b""
        content = self._content
        if messages:
            self._turns.expect(len(messages) * _REQUEST_SECONDS)
            content = self._content = messages[-1][1]
            self._seen, self.framing = content.total_bytes, 0
        else:
            self.framing += len(data)
            if content is not None and content.total_bytes != self._seen:
                self.framing -= content.total_bytes - self._seen
                self._seen = content.total_bytes
            if self.framing > MAX_FRAMING_BYTES + self._seen // BODY_PER_FRAMING:
                self._refuse()
        return messages, upgraded, tail

    def _refuse(self) -> None:
        """Make reading the body fail, or refuse the head of a request.

        Raises:
            LineTooLong: no body is being read, so it is the head that is too long.
        """
        self._broken = True
        if self._content is None or self._content.is_eof():
            raise LineTooLong(b"the head of the request", MAX_FRAMING_BYTES)
        self._content.set_exception(
            web.RequestPayloadError(
                f"the sizes, extensions and trailers of its chunks take more than {MAX_FRAMING_BYTES} bytes, and more "
                f"than 1 for {BODY_PER_FRAMING} bytes of content: send larger chunks"
            )
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)
