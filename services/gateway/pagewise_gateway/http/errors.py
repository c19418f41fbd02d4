"""The errors that clients get, in OpenAI's shape and with OpenAI's status codes.

Every error is an ``APIError``; errors with status 400 are ``InvalidRequestError``.
"""

import re
from collections.abc import Mapping
from typing import ClassVar

import msgspec
from aiohttp import web
from msgspec import Struct

from pagewise_gateway.generation import AdmissionError, GenerationError, InvalidGrammarError, NoExecutorError

MAX_MESSAGE_CHARACTERS = 1024
"""Longer messages are cut in the middle: they quote the request, and name the limit at their end."""
_MAX_PARAM_CHARACTERS = 256
_MAX_DIGITS = 32
"""Longer numbers in messages are cut in the middle, because 1e300 is an integer of 301 digits."""
_LONG_NUMBER = re.compile(rf"\d{{{_MAX_DIGITS + 1},}}")

RETRY_AFTER_SECONDS = 2
"""Default of Retry-After: about as long as an executor takes to restart."""


class ErrorDetail(Struct, frozen=True):
    """The cause of an error. ``param`` names the field of the request; ``code`` is meant for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(Struct, frozen=True):
    """The body of every error response."""

    error: ErrorDetail


class APIError(Exception):
    """An error response; its text is shown to the client. ``retry_after``: seconds, for the header Retry-After."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None
    headers: ClassVar[dict[str, str]] = {}
    retry_after: int | None = None

    def __init__(self, message: str, param: str | None = None, *, retry_after: int | None = None) -> None:
        numbers_shortened = _LONG_NUMBER.sub(lambda number: shortened(number[0], _MAX_DIGITS), message)
        super().__init__(shortened(numbers_shortened, MAX_MESSAGE_CHARACTERS))
        self.param = None if param is None else shortened(param, _MAX_PARAM_CHARACTERS)
        if retry_after is not None:
            self.retry_after = max(1, retry_after)

    def rename(self, names: Mapping[str, str]) -> None:
        """Give the field its name in another API. ``names``: field of a chat -> field of the other API."""
        head = re.split(r"[.\[]", self.param or "")[0]
        if self.param is not None and (name := names.get(head)) is not None:
            self.args = (str(self).replace(self.param, name),)
            self.param = name

    def body(self) -> bytes:
        """Return the JSON body."""
        return msgspec.json.encode(ErrorResponse(ErrorDetail(str(self), self.type, self.param, self.code)))

    def response(self) -> web.Response:
        """Return the response."""
        headers = dict(self.headers)
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        return web.Response(body=self.body(), status=self.status, content_type="application/json", headers=headers)


def shortened(text: str, most: int) -> str:
    """Return the text if it has at most ``most`` characters, else its beginning and its end."""
    if len(text) <= most:
        return text
    end = most // 4
    return f"{text[: most - end - 3]}...{text[-end:]}"


class InvalidRequestError(APIError):
    """The request cannot be understood, or a value is unusable; ``param`` names the field."""

    status = 400
    type = "invalid_request_error"


class UnsupportedParameterError(InvalidRequestError):
    """A field of OpenAI's or vLLM's API that Pagewise does not support, with a value that would have an effect."""

    code = "unsupported_parameter"


class UnsupportedEndpointError(InvalidRequestError):
    """An endpoint of OpenAI's API that Pagewise does not have."""

    code = "unsupported_endpoint"


class UnknownParameterError(InvalidRequestError):
    """A field that neither OpenAI's nor vLLM's API has."""

    code = "unknown_parameter"


class ContextLengthError(InvalidRequestError):
    """Prompt and output together exceed the length of the model, or the KV pool."""

    code = "context_length_exceeded"


class _ClientError(APIError):
    type = "invalid_request_error"


class InvalidKeyError(_ClientError):
    """The request has no valid API key."""

    status = 401
    code = "invalid_api_key"
    headers: ClassVar[dict[str, str]] = {"WWW-Authenticate": "Bearer"}


class ForbiddenError(_ClientError):
    """The API key is valid, and does not permit this."""

    status = 403
    code = "permission_denied"


class NotFoundError(_ClientError):
    """The path or the object does not exist."""

    status = 404
    code = "not_found"


class ModelNotFoundError(NotFoundError):
    """No model of this name is served here."""

    code = "model_not_found"


class MethodNotAllowedError(_ClientError):
    """The path exists, but not with this method."""

    status = 405
    code = "method_not_allowed"


class BodyTimeoutError(_ClientError):
    """The body did not arrive in time."""

    status = 408
    code = "body_timeout"
    headers: ClassVar[dict[str, str]] = {"Connection": "close"}


class BodyTooLargeError(_ClientError):
    """The body exceeds the limit."""

    status = 413
    code = "body_too_large"


class MediaTypeError(_ClientError):
    """The body is not declared as JSON."""

    status = 415
    code = "unsupported_media_type"


class OverloadedError(APIError):
    """The queue is full, the API key is over one of its limits, or bodies take too much memory."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    retry_after = RETRY_AFTER_SECONDS


class InternalError(APIError):
    """The server has failed."""

    code = "internal_error"


class UnavailableError(APIError):
    """There is no scheduler or no executor to run the request."""

    status = 503
    code = "service_unavailable"
    retry_after = RETRY_AFTER_SECONDS


def from_http_exception(error: web.HTTPException, asked: str) -> APIError:
    """Return the error for a response of aiohttp itself. ``asked``: method and path of the request."""
    kinds: dict[int, type[APIError]] = {
        404: NotFoundError,
        405: MethodNotAllowedError,
        413: BodyTooLargeError,
        415: MediaTypeError,
    }
    kind = kinds.get(error.status, InternalError if error.status >= 500 else InvalidRequestError)
    return kind(f"{asked}: {error.reason}")


def failure(error: GenerationError) -> APIError:
    """Return the error response for a request that was not accepted, or failed later."""
    match error:
        case AdmissionError(kind="never_fits"):
            return ContextLengthError(str(error))
        case AdmissionError(kind="invalid") | InvalidGrammarError():
            return InvalidRequestError(str(error))
        case AdmissionError(kind="overloaded"):
            return OverloadedError(str(error), retry_after=error.retry_after)
        case AdmissionError():
            return UnavailableError(str(error), retry_after=error.retry_after)
        case NoExecutorError():
            return UnavailableError(str(error))
        case _:
            return InternalError(str(error))
