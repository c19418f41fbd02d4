"""Follows the framing of HTTP/1.1 in what a client sends, and bounds heads and the overhead of chunks."""

import re
from collections.abc import Callable

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
