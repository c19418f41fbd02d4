"""What aiohttp logs of connections: bytes that are no HTTP are the client's doing, not a failure of ours."""

import logging
import sys

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from pagewise_gateway.http.refused_requests import RefusedRequests

log = logging.getLogger(__name__)


class ServerLog(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's log, in which what clients send wrongly is a line for debugging instead of a traceback."""

    def __init__(self) -> None:
        super().__init__(logging.getLogger("aiohttp.server"))
        self._refused = RefusedRequests()

    def log(self, level: int, msg: object, *args: object, **kwargs: object) -> None:
        """Log, or say briefly what the client did."""
        error = kwargs.get("exc_info")
        if error and not isinstance(error, BaseException):
            error = sys.exc_info()[1]
        if isinstance(error, HttpProcessingError | web.RequestPayloadError):
            log.debug("a client sent no proper HTTP: %s", " ".join(str(error).split())[:200])
            error.__traceback__ = None  # its frames hold the error
            self._refused.add()
            return
        super().log(level, msg, *args, **kwargs)  # type: ignore[arg-type]
