"""Runs pieces of work on the event loop, with API keys in turns."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic
from typing import TypeVar

T = TypeVar("T")

_SLICE_SECONDS, _LONGEST_SLICE_SECONDS = 0.005, 0.05
"""The length of a slice of work; streams and all other ready tasks run after each slice. A slice may take as long as
these tasks took since the last slice, up to the longest slice: so work gets half of the time of a busy event loop."""
_IMMEDIATE_SHARE = 0.75
"""The share of the event loop's time that may be spent on immediate work. The time of an iteration of the loop counts
only after the iteration has ended, because other tasks get their share of the time in the next one."""
_BYTES = 262_144
"""A turn makes pieces of an answer until they have so many bytes or took ``_SLICE_SECONDS``. Then they are written."""


class LoopTurns:
    """Runs work that holds the GIL, so that threads would not help: parsing bodies, tokenizing short texts, making
    answers.

    A thousand requests may need such work at the same time, and the event loop would do it all before the next token of
    a stream. While there is little work, it is done immediately. Otherwise it waits: the event loop does one slice of
    it in each iteration, and keys take turns. So a key with a thousand pieces of work delays the work of another key by
    one slice. The event loop is never idle while work waits, unless a piece took longer than the longest slice: then
    streams get as much time before the next piece.
    """

    def __init__(self) -> None:
        self._spent, self._since, self._began = 0.0, monotonic(), 0.0
        self._in_iteration = False
        self._sliced = 0.0
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        self._scheduled = False

    def free(self) -> bool:
        """Return whether work may be done immediately: no work waits, and little was done lately."""
        if self._waiting:
            return False
        self._began = monotonic()
        if not self._in_iteration:
            self._spent = max(0.0, self._spent - (self._began - self._since) * _IMMEDIATE_SHARE)
            self._since = self._began
        return self._spent < _SLICE_SECONDS

    def done(self) -> None:
        """Count the time of the work that has been done since ``free`` returned true."""
        self._spent += monotonic() - self._began
        if not self._in_iteration:
            self._in_iteration = True
            asyncio.get_running_loop().call_soon(self._end_iteration)

    def _end_iteration(self) -> None:
        self._in_iteration = False

    async def call(self, key: str, function: Callable[[], T]) -> T:
        """Return the result of ``function``, or raise its exception, immediately if possible, else in turn.

        ``key``: name of the client's API key.
        """
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

        self._schedule()
        self._waiting.setdefault(key, deque()).append(work)
        return await done

    async def next(self, key: str, pieces: Iterator[bytes]) -> bytes | None:
        """Make pieces of an answer for one turn, and return them joined; None if there are no more."""

        def make() -> bytes | None:
            began, size, parts = monotonic(), 0, []
            for piece in pieces:
                parts.append(piece)
                size += len(piece)
                if size >= _BYTES or monotonic() - began > _SLICE_SECONDS:
                    break
            return b"".join(parts) if parts else None

        return await self.call(key, make)

    async def all(self, key: str, pieces: Iterator[bytes]) -> bytearray:
        """Make all pieces of an answer, in as many turns as that takes, and return them joined."""
        body = bytearray()
        while (piece := await self.next(key, pieces)) is not None:
            body += piece
        return body

    def _work(self) -> None:
        """Do a slice of work, one piece for each key in turn."""
        self._scheduled = False
        began = monotonic()
        most = min(max(began - self._sliced, _SLICE_SECONDS), _LONGEST_SLICE_SECONDS)
        while self._waiting:
            key = next(iter(self._waiting))
            queue = self._waiting.pop(key)
            work = queue.popleft()
            if queue:
                self._waiting[key] = queue  # behind all other keys
            work()
            if monotonic() - began >= most:
                break
        self._sliced = monotonic()
        if self._waiting:
            took = self._sliced - began
            self._schedule(took if took > _LONGEST_SLICE_SECONDS else 0.0)

    def _schedule(self, seconds: float = 0.0) -> None:
        if self._scheduled:
            return
        self._scheduled = True
        loop = asyncio.get_running_loop()
        if not self._waiting:
            self._sliced = monotonic()
        if seconds:
            loop.call_later(seconds, self._work)
        else:
            loop.call_soon(self._work)
