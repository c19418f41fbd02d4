"""Long work on the event loop, cut into slices, so that others run in between."""

import asyncio
from collections.abc import Iterator
from time import monotonic

from pagewise_gateway.text.turns import Turns

_SECONDS = 0.01
"""How long a slice takes, and about how much of one round of the event loop goes to all of them."""
_BYTES = 262_144
"""A slice ends with so many bytes, too: what is made is written before more is."""


class Slices:
    """The slices of all requests. There is one at a time, given to API keys in turns.

    Making answers holds the GIL, so that a thread would not help.
    """

    def __init__(self) -> None:
        self._turns = Turns(1)
        self._spent = 0.0

    def room(self) -> bool:
        """Whether this round of the event loop has time left for such work."""
        return self._spent < _SECONDS

    def spend(self, seconds: float) -> None:
        """Count time of this round as spent."""
        if not self._spent:
            asyncio.get_running_loop().call_soon(self._next_round)
        self._spent += seconds

    async def next(self, key: str, pieces: Iterator[bytes]) -> bytes | None:
        """Return what one slice makes of ``pieces``; None once there are no more. ``key``: name of the API key."""
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

    def _next_round(self) -> None:
        self._spent = 0.0
