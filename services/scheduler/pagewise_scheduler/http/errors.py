"""Errors that a client sees, in OpenAI's shape.

APIError                 status 500, "internal_error"
├── InvalidRequest       400, "invalid_request_error": the text and ``param`` name what is wrong
│   ├── Unsupported      400, code "unsupported_parameter"
│   └── ModelNotFound    404, code "model_not_found"
├── TooLarge             413
├── Overloaded           429, with Retry-After
└── Unavailable          503, with Retry-After
"""

import msgspec
from aiohttp import web

from pagewise_scheduler.generation import AdmissionError


class APIError(Exception):
    """Answered as ``{"error": {"message", "type", "param", "code"}}`` with ``status``."""

    status = 500
    kind = "internal_error"
    code: str | None = None
    retry_after: int | None = None

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or type(self).code

    def body(self) -> bytes:
        """The answer's JSON."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> web.Response:
        """The answer."""
        headers = {"Retry-After": str(self.retry_after)} if self.retry_after is not None else None
        return web.Response(body=self.body(), status=self.status, content_type="application/json", headers=headers)


class InvalidRequest(APIError):  # noqa: N818
    """The request is wrong; the client has to change it."""

    status, kind = 400, "invalid_request_error"


class Unsupported(InvalidRequest):
    """A parameter that is known and not supported, or not known at all."""

    code = "unsupported_parameter"


class ModelNotFound(InvalidRequest):
    """Another model's name."""

    status, code = 404, "model_not_found"


class HTTPProblem(InvalidRequest):
    """A route or method that does not exist, or a body that is too large; ``status`` is given."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Overloaded(APIError):  # noqa: N818
    """Too many requests wait."""

    status, kind, retry_after = 429, "rate_limit_error", 1
    code = "overloaded"


class Unavailable(APIError):  # noqa: N818
    """Nobody is there to serve it now."""

    status, kind, retry_after = 503, "service_unavailable", 5


def from_admission(error: AdmissionError) -> APIError:
    """What the client is told when a request cannot be taken."""
    if error.kind == "never_fits":
        return InvalidRequest(str(error), code="context_length_exceeded")
    return Overloaded(str(error)) if error.kind == "overloaded" else Unavailable(str(error))
