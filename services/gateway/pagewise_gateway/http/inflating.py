"""Compressed bodies, inflated in pieces: what a few bytes become is bounded before it is there."""

import zlib

from pagewise_gateway.http.errors import InvalidRequestError, MediaTypeError

PIECE = 16_384
"""Bytes that are inflated at a time, and that come out at a time at most: 5 ms at worst."""

_ZLIB, _RAW, _GZIP = zlib.MAX_WBITS, -zlib.MAX_WBITS, 16 + zlib.MAX_WBITS


class Inflater:
    """Inflates one body, which is one member of gzip or deflate.

    Use: ``feed`` at most ``PIECE`` bytes, take every ``piece`` until one is empty, and so on; ``end`` after the last.
    """

    def __init__(self, encoding: str) -> None:
        """``encoding``: gzip or deflate."""
        self._encoding = encoding
        self._input = b""
        self._inflate: zlib._Decompress | None = None

    def feed(self, data: bytes) -> None:
        """Give it the next bytes of the body; there is at least one."""
        self._input = data

    def piece(self) -> bytes:
        """Return at most ``PIECE`` bytes of what they hold; nothing: they hold no more.

        Raises:
            InvalidRequestError: the body is not compressed in this way.
        """
        if self._inflate is None:
            # Some clients send deflate without the zlib header, whose first byte says that it is deflate.
            deflate = _ZLIB if self._input[0] & 0xF == 8 else _RAW
            self._inflate = zlib.decompressobj(_GZIP if self._encoding == "gzip" else deflate)
        try:
            piece = self._inflate.decompress(self._input, PIECE)
        except zlib.error as error:
            raise InvalidRequestError(f"the body is not valid {self._encoding}: {error}") from None
        self._input = self._inflate.unconsumed_tail
        if self._inflate.unused_data:
            raise InvalidRequestError(f"the body goes on behind the end of what is compressed with {self._encoding}")
        return piece

    def end(self) -> None:
        """Check that the body is complete.

        Raises:
            InvalidRequestError: it is not.
        """
        if self._inflate is None or not self._inflate.eof:
            raise InvalidRequestError(f"the body is not complete: its {self._encoding} has no end")


def inflater(encodings: list[str]) -> Inflater | None:
    """Return what inflates a body with these ``Content-Encoding`` headers; None: it is not compressed.

    Raises:
        MediaTypeError: it is compressed in another way.
    """
    encoding = ",".join(encodings).strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding in ("gzip", "x-gzip", "deflate"):
        return Inflater(encoding.removeprefix("x-"))
    raise MediaTypeError(f"the body is encoded as {encoding}: send it with gzip, with deflate, or as it is")
