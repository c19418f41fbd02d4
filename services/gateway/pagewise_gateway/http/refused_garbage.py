"""What refused requests leave behind: exceptions, frames and what was received hold each other, mostly aiohttp's."""

import gc

_COLLECT_EVERY = 64


class Leavings:
    """Has that freed soon. It is few objects and up to 300 KB for each request: the collector counts objects, is told
    to look seldom, and would let hundreds of megabytes come together."""

    def __init__(self) -> None:
        self._refused = 0

    def refused(self) -> None:
        """One more request was refused."""
        self._refused += 1
        if self._refused % _COLLECT_EVERY == 0:
            gc.collect(0)
