"""aiohttp's log of connections. Malformed HTTP is the client's fault, so it is not logged as an error."""

import logging
import sys

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from pagewise_gateway.http.refused_requests import RefusedRequests

log = logging.getLogger(__name__)


class ServerLog(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's logger, except that malformed requests become one debug line instead of a traceback."""

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
