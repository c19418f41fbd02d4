"""The memory of refused requests, and aiohttp's log of malformed ones.

When a request is refused, exceptions, stack frames and the received bytes refer to each other in cycles, mostly inside
aiohttp. A cycle has few objects but up to 300 KB. The garbage collector counts objects and is set to run rarely, so it
would let hundreds of megabytes pile up.
"""

import asyncio
import gc
import logging
import sys

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from pagewise_shared.service_process import return_freed_memory

log = logging.getLogger(__name__)

_COLLECT_EVERY = 64
_ALL_AFTER_SECONDS = 15.0
"""More than a connection lives on after malformed HTTP: the time for a part of its body, and for the rest of it."""


class RefusedRequests:
    """Counts refused requests. After every 64 of them, the youngest generation of objects is collected, and some time
    after one, all generations: the garbage of a malformed request is larger, and older when its connection ends."""

    def __init__(self) -> None:
        self._count, self._scheduled = 0, False

    def add(self) -> None:
        """Count one more refused request."""
        self._count += 1
        if self._count % _COLLECT_EVERY == 0:
            gc.collect(0)
        if not self._scheduled:
            self._collect_later()

    def _collect_later(self) -> None:
        self._scheduled = True
        asyncio.get_running_loop().call_later(_ALL_AFTER_SECONDS, self._collect, self._count)

    def _collect(self, count: int) -> None:
        gc.collect()
        asyncio.get_running_loop().run_in_executor(None, return_freed_memory)
        self._scheduled = False
        if self._count > count:  # of which some may not have ended yet
            self._collect_later()


class ServerLog(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's logger, except that a malformed request, which is its client's fault, becomes one debug line."""

    def __init__(self) -> None:
        super().__init__(logging.getLogger("aiohttp.server"))
        self._refused = RefusedRequests()

    def log(self, level: int, msg: object, *args: object, **kwargs: object) -> None:
        """Log a message; a malformed request becomes one debug line."""
        error = kwargs.get("exc_info")
        if error and not isinstance(error, BaseException):
            error = sys.exc_info()[1]
        if isinstance(error, HttpProcessingError | web.RequestPayloadError):
            log.debug("a client sent malformed HTTP: %s", " ".join(str(error).split())[:200])
            error.__traceback__ = None  # breaks a cycle: its frames refer to the error
            self._refused.add()
            return
        super().log(level, msg, *args, **kwargs)  # type: ignore[arg-type]
