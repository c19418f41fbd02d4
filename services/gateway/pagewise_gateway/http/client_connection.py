"""Connections of clients: how fast bytes are parsed, how much the framing of HTTP may take, and how they are closed."""

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from aiohttp import StreamReader, web

from pagewise_gateway.http.loop_turns import LoopTurns
from pagewise_gateway.metrics import Metrics

log = logging.getLogger(__name__)

MAX_FRAMING_BYTES = 65_536
"""Bytes of the head of a request, or of what a chunked body has besides its content: sizes, extensions, trailers."""
BODY_PER_FRAMING = 8
"""A large chunked body may have a byte more of those for each so many bytes of content: chunks of about 50 bytes."""

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_EXTENSION = rb";" + _TOKEN + rb"(?:=(?:" + _TOKEN + rb'|"[^"\\\x00-\x1f\x7f]*"))?'
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:" + _EXTENSION + rb")*")
_END_AND_SIZE = re.compile(rb"\r\n(0*[1-9A-Fa-f][0-9A-Fa-f]{0,10})\r\n")
_TRAILER = re.compile(_TOKEN + rb":[\t\x20-\x7e\x80-\xff]*")
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:(?:[^\r\n]*,)?[ \t]*chunked[ \t]*\r\n", re.IGNORECASE)
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,18})[ \t]*\r\n", re.IGNORECASE)
_TOO_LONG = b"The head of a request may have %d bytes\r\n" % MAX_FRAMING_BYTES * 2
"""The parser's error quotes it. It comes twice, because the head may end within a line."""
LINGER_SECONDS = 5
"""For how long the rest of a refused body is read and thrown away before the connection is closed."""
LINGER_BODIES = 4
"""How much of it is thrown away, as a multiple of the largest body that is allowed, before the connection is closed."""
_PIECE = 16_384
"""Bytes that are parsed at a time: 3 ms if they are chunks of one byte."""


class Framing:
    """Reads the framing of a connection, beside aiohttp's parser. That bounds the single headers of a request, but not
    its head as a whole, nor the extensions of chunks, nor the number of small chunks. After an error between chunks it
    does not end the body, for which the request then waits. So it gets only lines between chunks that are complete and
    valid, and the user of this makes a request fail whose body has another one.

    Where the two disagreed about the end of a body, one of the bounds would hold all the same.

    Fields:
        left: the bytes of content that follow until the next framing.
        heads: the number of heads that have ended.
        problem: what is wrong, as a sentence for the client. From then on everything is left out.
    """

    __slots__ = ("_content", "_framing", "_line", "_read_line", "heads", "left", "problem")

    def __init__(self) -> None:
        self.left, self.heads, self.problem = 0, 0, ""
        self._line = bytearray()
        self._framing = self._content = 0
        self._read_line: Callable[[Framing, bytes], None] | None = None

    def read(self, data: bytes) -> bytes:
        """Take the next bytes, and return those that aiohttp's parser is to have.

        Where a head is too long, a line that is no header follows, for which the parser refuses the request.
        """
        if self._read_line is not None and self._line:
            data = bytes(self._line) + data
            self._line.clear()
        at = 0
        while at < len(data) and not self.problem:
            if self.left:
                size = min(self.left, len(data) - at)
                self.left -= size
                at += size
            elif self._read_line is None:
                end = self._read_head(data, at)
                if self.problem:
                    return data[:at] + _TOO_LONG
                at = end
            elif self._read_line is Framing._read_end_of_chunk and (
                found := _END_AND_SIZE.match(data, at)
            ):  # for speed
                self._begin_chunk(int(found[1], 16))
                at = self._counted(at, found.end())
            elif end := data.find(b"\n", at) + 1:
                at = self._read_whole_line(data, at, end)
            else:
                self._line += data[at:]
                self._counted(0, len(self._line))
                self._framing -= len(self._line)  # it is counted again when it is complete
                break
        return data[:at]

    def _read_head(self, data: bytes, at: int) -> int:
        """Read bytes of a head, and return where they end."""
        before = len(self._line)
        self._line += data[at:]
        found = self._line.find(b"\r\n\r\n", max(0, before - 3))
        size = found + 4 if found >= 0 else len(self._line)
        self._framing += size - before
        if self._framing > MAX_FRAMING_BYTES:
            self.problem = f"its head takes more than {MAX_FRAMING_BYTES} bytes"
        elif found >= 0:
            head = self._line[:size]
            self._line.clear()
            if head.strip():  # there may be empty lines before a request
                self.heads += 1
                self._framing = self._content = 0
                self._begin_body(head)
        return at + size - before

    def _begin_body(self, head: bytearray) -> None:
        if _CHUNKED.search(head):
            self._read_line = Framing._read_size
        elif length := _LENGTH.search(head):
            self.left = int(length[1])

    def _begin_chunk(self, size: int) -> None:
        self.left = size
        self._content += size
        self._read_line = Framing._read_end_of_chunk

    def _counted(self, start: int, end: int) -> int:
        """Count the bytes from ``start`` to ``end`` as framing of a chunked body, and return where reading goes on."""
        self._framing += end - start
        if self._framing > MAX_FRAMING_BYTES + self._content // BODY_PER_FRAMING:
            self.problem = (
                f"the sizes, extensions and trailers of its chunks take more than {MAX_FRAMING_BYTES} bytes, and more "
                f"than 1 for {BODY_PER_FRAMING} bytes of content: send larger chunks"
            )
        return start if self.problem else end

    def _read_whole_line(self, data: bytes, at: int, end: int) -> int:
        """Read a line between the chunks of a body, and return where reading goes on."""
        assert self._read_line is not None
        end = self._counted(at, end)
        if not self.problem:
            if data[at:end].endswith(b"\r\n"):
                self._read_line(self, data[at : end - 2])
            else:
                self.problem = "a line between its chunks does not end with CR and LF"
        return at if self.problem else end

    def _read_size(self, line: bytes) -> None:
        size = _SIZE.fullmatch(line)
        if size is None:
            self.problem = f"its chunks are not valid: {line[:40]!r} is not the size of a chunk"
        elif int(size[1], 16):
            self._begin_chunk(int(size[1], 16))
        else:
            self._read_line = Framing._read_trailer

    def _read_end_of_chunk(self, line: bytes) -> None:
        if line:
            self.problem = "its chunks are not valid: one is longer than its size says"
        self._read_line = Framing._read_size

    def _read_trailer(self, line: bytes) -> None:
        if not line:
            self._read_line, self._framing = None, 0
        elif _TRAILER.fullmatch(line) is None:
            self.problem = f"its trailers are not valid: {line[:40]!r} is not a header"


_REQUEST_SECONDS, _CLOSE_SECONDS = 0.0001, 0.0001
"""About the time that aiohttp takes for a request, however small, and for the end of a connection."""


class ConnectionFaults:
    """Counts the connections that are aborted because serving them raised an exception, and logs the first one."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._told = metrics, False

    def add(self, error: Exception) -> None:
        """Count one more."""
        self._metrics.http_connection_faults.inc()
        if not self._told:
            self._told = True
            log.error("a connection is aborted, because serving it failed; others are counted only", exc_info=error)


class ClientConnection(asyncio.Protocol):
    """Stands between a connection's transport and aiohttp's protocol, with turns between connections when much arrives,
    and a limit for what is not content.

    For the transport it is the protocol. For aiohttp's protocol it is the transport: so it learns when aiohttp pauses
    reading, and everything else that aiohttp asks of a transport the real one does. Bytes that have to wait for a turn,
    or for aiohttp to go on reading, are kept, and reading is paused meanwhile.

    If an exception is raised here, the connection is aborted, which ends its requests: a connection that is neither
    served nor closed would keep its client waiting for ever.

    Fields:
        key: the name of the API key that was used last on this connection; connections without one share their turns.
    """

    write: Callable[[bytes], None]
    is_closing: Callable[[], bool]

    def __init__(self, server: web.Server, turns: LoopTurns, largest_body: int, faults: ConnectionFaults) -> None:
        """``server``: its protocols do not decompress bodies, and do not read the rest of refused ones."""
        self.key = ""
        self._http, self._turns, self._faults = server(), turns, faults
        self._real: asyncio.Transport
        self._framing = Framing()
        self._content: StreamReader | None = None
        self._held, self._queued, self._paused = b"", False, False
        self._limit = LINGER_BODIES * largest_body
        self._discarded: int | None = None
        self._lingering: asyncio.Future[None] | None = None

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to serve the connection."""
        self._real = cast(asyncio.Transport, transport)
        self.write, self.is_closing = self._real.write, self._real.is_closing  # called for every token
        self._guarded(self._http.connection_made, self)

    def data_received(self, data: bytes) -> None:
        """Parse bytes that have arrived, or keep them until it is their turn."""
        self._guarded(self._receive, data)

    def eof_received(self) -> bool:
        """Close the connection, in turn: a thousand clients may hang up at the same time."""
        if self._real.get_extra_info("sslcontext") is not None:  # TLS has no half-closed connections
            return False
        self._turns.add(self.key, self._hang_up)
        return True  # asyncio leaves the transport open: ``_hang_up`` closes it

    def connection_lost(self, error: Exception | None) -> None:
        """Drop what is kept: the client is gone."""
        self._held, self._content = b"", None
        self._guarded(self._http.connection_lost, error)

    def pause_writing(self) -> None:
        """Pass it on to aiohttp."""
        self._guarded(self._http.pause_writing)

    def resume_writing(self) -> None:
        """Pass it on to aiohttp."""
        self._guarded(self._http.resume_writing)

    # What aiohttp and handlers of requests call.

    def pause_reading(self) -> None:
        """Read no more, as aiohttp asks."""
        self._paused = True
        self._real.pause_reading()

    def resume_reading(self) -> None:
        """Go on reading, as aiohttp asks; bytes that are kept are parsed first."""
        self._paused = False
        if self._held:
            self._wait_for_turn()
        elif not self._queued:
            self._real.resume_reading()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return everything else of the real transport."""
            if name == "_real":  # before there is one
                raise AttributeError(name)
            return getattr(self._real, name)

    def begin(self, content: StreamReader) -> None:
        """Know the body of a request that is handled from now on, to make reading it fail if its framing is wrong."""
        self._content = content
        self._fail_if_broken()

    async def linger(self, announced: int | None) -> None:
        """Throw away the rest of a refused body after the answer was written, so that the client reads the answer.

        A client that still sends when its connection is closed would see a reset instead of the answer. What arrives is
        not parsed. This lasts until the body is complete or the client hangs up, but for ``LINGER_SECONDS`` and
        ``LINGER_BODIES`` at most. HTTP servers call it a lingering close (RFC 9112, section 9.6).

        ``announced``: the Content-Length of the body.
        """
        if self._real.is_closing() or self._content is None:
            return
        if announced is not None:
            self._limit = min(self._limit, self._framing.left - len(self._held))
        self._discarded, self._held = 0, b""
        if self._content.exception() is None:
            self._content.read_nowait()  # gives the memory back
        self.resume_reading()
        if self._real.can_write_eof():  # TLS cannot
            self._real.write_eof()  # tells the client that nothing follows, so that it hangs up
        if self._limit > 0:
            self._lingering = asyncio.get_running_loop().create_future()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    await self._lingering

    def _receive(self, data: bytes) -> None:
        if self._discarded is not None:
            self._discard(len(data))
        elif self._held or self._paused or not self._turns.free():
            self._held += data
            self._wait_for_turn()
        elif len(data) <= _PIECE:
            self._feed(data)
            self._turns.done()
        else:
            self._parse(data)

    def _discard(self, size: int) -> None:
        assert self._discarded is not None
        self._discarded += size
        if self._discarded >= self._limit and self._lingering is not None and not self._lingering.done():
            self._lingering.set_result(None)
        self._wait_for_turn()

    def _hang_up(self) -> None:
        self._turns.expect(_CLOSE_SECONDS)
        self._real.close()

    def _parse(self, data: bytes) -> None:
        """Parse bytes until the time of a slice is used up, or aiohttp pauses reading; keep the rest."""
        for start in range(0, len(data), _PIECE):
            free = self._turns.free()
            if start and (self._paused or not free):
                self._held = data[start:]
                if not self._paused:
                    self._wait_for_turn()
                return
            self._feed(data[start : start + _PIECE])
            self._turns.done()

    def _feed(self, piece: bytes) -> None:
        """Let aiohttp parse bytes, up to those whose framing is wrong."""
        heads = self._framing.heads
        if parsed := self._framing.read(piece):
            self._http.data_received(parsed)
        if self._framing.heads > heads:
            self._turns.expect((self._framing.heads - heads) * _REQUEST_SECONDS)
        self._fail_if_broken()

    def _fail_if_broken(self) -> None:
        content, problem = self._content, self._framing.problem
        if problem and content is not None and not content.is_eof() and content.exception() is None:
            content.set_exception(web.RequestPayloadError(problem))

    def _wait_for_turn(self) -> None:
        if len(self._held) > _PIECE or self._discarded is not None:
            self._real.pause_reading()
        if not self._queued:
            self._queued = True
            self._turns.add(self.key, self._take_turn)

    def _take_turn(self) -> None:
        self._queued = False
        self._guarded(self._go_on)

    def _go_on(self) -> None:
        if self._paused:
            return  # aiohttp calls ``resume_reading`` later
        data, self._held = self._held, b""
        if data and not self._real.is_closing():
            self._parse(data)
        if not (self._held or self._queued or self._paused):
            self._real.resume_reading()

    def _guarded(self, work: Callable[..., None], *arguments: object) -> None:
        try:
            work(*arguments)
        except Exception as error:
            self._faults.add(error)
            self._real.abort()
