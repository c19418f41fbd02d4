"""Runs short pieces of work on the event loop, with API keys in turns."""

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

T = TypeVar("T")

_SLICE_SECONDS, _LONGEST_SLICE_SECONDS = 0.005, 0.05
"""The length of a slice of work, after which streams, and whatever else is ready, run. A slice may take as long as they
took since the last one, up to the longest: so work gets half of the time of a busy event loop."""
_IMMEDIATE_SHARE = 0.75
"""The share of the time that may be spent on work that does not wait for a turn."""


class LoopTurns:
    """Runs work of a few milliseconds at most: parsing small bodies, tokenizing short texts, parsing HTTP.

    A thousand connections may ask for such work at the same time, and the event loop would do it all before the next
    token of a stream. While there is little work, it is done immediately. Otherwise it waits: the event loop does one
    slice of it in each iteration, and keys take turns. So a key with a thousand pieces of work delays the work of
    another key by one slice. The event loop is never idle while work waits.
    """

    def __init__(self) -> None:
        self._spent, self._since = 0.0, monotonic()
        self._expected, self._sliced = 0.0, 0.0
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        self._scheduled = False

    def free(self) -> bool:
        """Whether work may be done immediately: no work waits, and little was done lately."""
        if self._waiting:
            return False
        now = monotonic()
        self._spent = max(0.0, self._spent - (now - self._since) * _IMMEDIATE_SHARE)
        self._since = now
        return self._spent < _SLICE_SECONDS

    def done(self) -> None:
        """Count the time of the work that has been done since ``free`` returned true."""
        self._spent += monotonic() - self._since

    def expect(self, seconds: float) -> None:
        """Count work that will follow from what was done just now, and will not ask for a turn itself."""
        self._spent += seconds
        self._expected += seconds

    def add(self, key: str, work: Callable[[], None]) -> None:
        """Call ``work`` in turn, after this has returned. It must not raise. ``key``: name of the client's API key."""
        self._schedule()
        self._waiting.setdefault(key, deque()).append(work)

    async def call(self, key: str, function: Callable[[], T]) -> T:
        """Return what ``function`` returns, or raise what it raises, immediately if possible, else in turn."""
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
