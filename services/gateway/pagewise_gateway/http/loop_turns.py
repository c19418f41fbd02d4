"""Short work for clients on the event loop, given fairly to the holders of API keys."""

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

T = TypeVar("T")

_SLICE_SECONDS, _LONGEST_SLICE_SECONDS = 0.005, 0.05
"""So much work is done at a time; then streams, and whatever else is ready, have their turn. If these take longer, so
does a slice: work gets half of the time of a busy loop."""
_EARNED = 0.75
"""Part of the time that may be spent on work at once, without waiting for a turn."""


class LoopTurns:
    """Runs what takes a few milliseconds at most: small bodies are parsed, short texts tokenized, bytes taken in.

    Such work is quick, but a thousand connections may ask for it at the same time, and the event loop would do it all
    before the next token of a stream. While there is little of it, it is done at once. Otherwise it waits: a slice of
    it is done at a time, and keys take turns. So a key that has a thousand pieces of work delays another one's by a
    slice. The event loop is never idle while work waits.
    """

    def __init__(self) -> None:
        self._spent, self._since = 0.0, monotonic()
        self._expected, self._sliced = 0.0, 0.0
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        self._scheduled = False

    def free(self) -> bool:
        """Whether work may be done at once: nobody waits, and little was done lately."""
        if self._waiting:
            return False
        now = monotonic()
        self._spent = max(0.0, self._spent - (now - self._since) * _EARNED)
        self._since = now
        return self._spent < _SLICE_SECONDS

    def done(self) -> None:
        """Count the time since ``free`` said so: the work has been done."""
        self._spent += monotonic() - self._since

    def expect(self, seconds: float) -> None:
        """Count work that follows from what was done just now, and that will not ask for a turn."""
        self._spent += seconds
        self._expected += seconds

    def add(self, key: str, work: Callable[[], None]) -> None:
        """Do this in turn, and not before this returns. It must not raise. ``key``: name of the client's API key."""
        self._schedule()
        self._waiting.setdefault(key, deque()).append(work)

    async def call(self, key: str, function: Callable[[], T]) -> T:
        """Return what ``function`` returns, or raise what it raises: at once if possible, else in turn."""
        if self.free():
            try:
                return function()
            finally:
                self.done()
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def work() -> None:
            if done.done():  # the client is gone
                return
            try:
                done.set_result(function())
            except Exception as error:
                done.set_exception(error)

        self.add(key, work)
        return await done

    def _work(self) -> None:
        """Do a slice of work, one piece for each key in turn."""
        self._scheduled, self._expected = False, 0.0
        began = monotonic()
        most = min(max(began - self._sliced, _SLICE_SECONDS), _LONGEST_SLICE_SECONDS)
        while self._waiting:
            key = next(iter(self._waiting))
            queue = self._waiting.pop(key)
            work = queue.popleft()
            if queue:
                self._waiting[key] = queue  # behind all other keys
            work()
            if monotonic() - began + self._expected >= most:
                break
        self._sliced = monotonic()
        if self._waiting:
            self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            if not self._waiting:
                self._sliced = monotonic()
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._work)
