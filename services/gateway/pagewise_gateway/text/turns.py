"""A semaphore that is fair to API keys."""

import asyncio
from collections import deque


class Turns:
    """A semaphore of ``most`` turns. Waiting tasks get turns round robin over API keys, and in order within a key.

    So a client that asks for a thousand turns delays another client by one of them.
    """

    def __init__(self, most: int) -> None:
        self._free = most
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def take(self, key: str) -> None:
        """Wait for a turn, which lasts until ``pass_on`` is called. ``key``: name of the client's API key."""
        if self._free:
            self._free -= 1
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():  # the turn was granted in the meantime
                self.pass_on()
            raise

    def pass_on(self) -> None:
        """End a turn."""
        while self._waiting:
            key = next(iter(self._waiting))
            queue = self._waiting.pop(key)
            granted = queue.popleft()
            if queue:
                self._waiting[key] = queue  # behind all other keys
            if not granted.done():
                granted.set_result(None)
                return
        self._free += 1
