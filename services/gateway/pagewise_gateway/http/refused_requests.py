"""Garbage collection of refused requests.

When a request is refused, exceptions, stack frames and the received bytes refer to each other in cycles, mostly inside
aiohttp. A cycle has few objects but up to 300 KB. The garbage collector counts objects and is set to run rarely, so it
would let hundreds of megabytes pile up.
"""

import gc

_COLLECT_EVERY = 64


class RefusedRequests:
    """Counts refused requests, and collects the youngest generation of objects after every 64 of them."""

    def __init__(self) -> None:
        self._count = 0

    def add(self) -> None:
        """Count one more refused request."""
        self._count += 1
        if self._count % _COLLECT_EVERY == 0:
            gc.collect(0)
