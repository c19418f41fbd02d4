"""Inflates compressed bodies in pieces, so that their size is checked before it takes memory."""

import zlib

from pagewise_gateway.http.errors import InvalidRequestError, MediaTypeError

PIECE = 16_384
"""The most bytes that are inflated at a time, and the most that this returns: it takes 5 ms at worst."""

_ZLIB, _RAW, _GZIP = zlib.MAX_WBITS, -zlib.MAX_WBITS, 16 + zlib.MAX_WBITS


class Inflater:
    """Inflates one body, which is one member of gzip or deflate.

    To be used in this order: ``feed`` at most ``PIECE`` bytes, call ``piece`` until it returns none, and repeat this
    for the whole body; then call ``end``.
    """

    def __init__(self, encoding: str) -> None:
        """``encoding``: gzip or deflate."""
        self._encoding = encoding
        self._input = b""
        self._inflate, self._begun = zlib.decompressobj(), False

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body, at least one."""
        self._input = data

    def piece(self) -> bytes:
        """Return at most ``PIECE`` inflated bytes; none when the bytes that were fed hold no more.

        Raises:
            InvalidRequestError: the body is not valid in this encoding.
        """
        if not self._begun:
            self._begun = True
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
            InvalidRequestError: it is not complete.
        """
        if not self._inflate.eof:
            raise InvalidRequestError(f"the body is not complete: its {self._encoding} has no end")


def inflater(encodings: list[str]) -> Inflater | None:
    """Return the inflater for a body with these ``Content-Encoding`` headers; None: it is not compressed.

    Raises:
        MediaTypeError: the encoding is not supported.
    """
    encoding = ",".join(encodings).strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding in ("gzip", "x-gzip", "deflate"):
        return Inflater(encoding.removeprefix("x-"))
    raise MediaTypeError(f"the body is encoded as {encoding}: send it with gzip, with deflate, or as it is")
