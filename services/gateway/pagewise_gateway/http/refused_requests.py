"""Garbage collection of refused requests.

Exceptions, frames and what was received hold each other when a request is refused, mostly inside aiohttp. It is few
objects and up to 300 KB for each request: the collector counts objects, is told to look seldom, and would let hundreds
of megabytes come together.
"""

import gc

_COLLECT_EVERY = 64


class RefusedRequests:
    """Counts requests that are refused, and has the youngest objects looked through every so many of them."""

    def __init__(self) -> None:
        self._count = 0

    def add(self) -> None:
        """One more request was refused."""
        self._count += 1
        if self._count % _COLLECT_EVERY == 0:
            gc.collect(0)
