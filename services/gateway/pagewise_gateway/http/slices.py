"""Runs long work on the event loop in slices, so that other tasks run in between."""

import asyncio
from collections.abc import Iterator
from time import monotonic

from pagewise_gateway.text.turns import Turns

_SECONDS = 0.01
"""How long a slice takes at most, and about how much of one iteration of the event loop all slices take."""
_BYTES = 262_144
"""A slice also ends when it has made so many bytes, so that they are written before more are made."""


class Slices:
    """The slices in which answers are made, of all requests: one runs at a time, and API keys take turns.

    Threads would not help, because making answers holds the GIL.
    """

    def __init__(self) -> None:
        self._turns = Turns(1)
        self._spent = 0.0

    def room(self) -> bool:
        """Whether this iteration of the event loop has time left for such work."""
        return self._spent < _SECONDS

    def spend(self, seconds: float) -> None:
        """Count time of this iteration of the event loop as spent."""
        if not self._spent:
            asyncio.get_running_loop().call_soon(self._next_iteration)
        self._spent += seconds

    async def next(self, key: str, pieces: Iterator[bytes]) -> bytes | None:
        """Return the pieces made in one slice, joined; None if there are no more. ``key``: name of the API key."""
        await self._turns.take(key)
        try:
            if not self.room():
                await asyncio.sleep(0)
            began, size, parts = monotonic(), 0, []
            try:
                for piece in pieces:
                    parts.append(piece)
                    size += len(piece)
                    if size >= _BYTES or monotonic() - began > _SECONDS:
                        break
                return b"".join(parts) if parts else None
            finally:
                self.spend(monotonic() - began)
        finally:
            self._turns.pass_on()

    async def all(self, key: str, pieces: Iterator[bytes]) -> bytearray:
        """Return all pieces, joined, which are made in as many slices as that takes."""
        body = bytearray()
        while (piece := await self.next(key, pieces)) is not None:
            body += piece
        return body

    def _next_iteration(self) -> None:
        self._spent = 0.0
