"""Pauses of all clients, in which processes hold only the memory that they keep."""

import asyncio

from benchmarks.processes import Cluster

_SHARE, _LEAST_SECONDS = 0.1, 300.0
"""One rest in each tenth of the time, and in each five minutes at most."""
_REST_SECONDS = 90.0
"""Streams end, and then passes the half a minute after which processes return freed memory (``tune_allocator``)."""


class Rests:
    """``keep`` begins and ends the rests of clients, and they wait for ``over`` before each request."""

    def __init__(self, seconds: float) -> None:
        """``seconds``: of the whole soak, whose end is also that of a rest if it takes five minutes or more."""
        self._every = max(_SHARE * seconds, _LEAST_SECONDS)
        self._awake = asyncio.Event()
        self._awake.set()

    async def keep(self, cluster: Cluster) -> None:
        """Keep them until cancelled."""
        while True:
            await asyncio.sleep(self._every - _REST_SECONDS)
            self._awake.clear()
            await asyncio.sleep(_REST_SECONDS)
            self._awake.set()

    async def over(self) -> None:
        """Return when there is no rest."""
        await self._awake.wait()
