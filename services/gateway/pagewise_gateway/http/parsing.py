"""Turns the bytes of a body into a checked request struct."""

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import Struct

from pagewise_gateway.http.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    InvalidRequestError,
    MediaTypeError,
    UnknownParameterError,
)
from pagewise_gateway.http.unsupported import drop_unsupported

RequestT = TypeVar("RequestT", bound=Struct)

BODY_SECONDS = 60.0
"""How long a client may take to send its body."""

_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`")
_MISSING = re.compile(r"Object missing required field `(.*?)`")


async def read_request(request: web.Request, request_type: type[RequestT]) -> RequestT:
    """Read and check the body.

    Raises:
        MediaTypeError, BodyTooLargeError, BodyTimeoutError: the body cannot be read.
        InvalidRequestError: it is not JSON, or a field is unknown, unsupported, or has an unusable value.
    """
    content_type = request.headers.get("Content-Type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise MediaTypeError(f"the body is declared as {content_type}: send Content-Type: application/json")
    limit = request.client_max_size
    if request.content_length is not None and request.content_length > limit:
        raise BodyTooLargeError(f"the body has {request.content_length} bytes, the limit is {limit}")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = await request.read()
    except TimeoutError:
        raise BodyTimeoutError(f"the body did not arrive within {BODY_SECONDS:g} s") from None
    except web.HTTPRequestEntityTooLarge:
        raise BodyTooLargeError(f"the body has more than {limit} bytes, which is the limit") from None
    except web.RequestPayloadError as error:
        reason = " ".join(str(error).split())
        raise InvalidRequestError(f"the body cannot be read: {reason}") from None
    return parse_request(body, request_type)


def parse_request(body: bytes, request_type: type[RequestT]) -> RequestT:
    """Return the request in these bytes.

    Raises:
        InvalidRequestError: as in ``read_request``.
    """
    try:
        text = body.decode()  # JSON is UTF-8; the JSON decoder checks that inside strings only
        fields = msgspec.json.decode(text)
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is not valid UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None
    except msgspec.MsgspecError as error:
        hint = " (JSON has no NaN and no Infinity)" if "NaN" in text or "Infinity" in text else ""
        reason = str(error).replace(" - at `$[...]`", "")
        raise InvalidRequestError(f"the body is not valid JSON: {reason}{hint}") from None
    if not isinstance(fields, dict):
        raise InvalidRequestError("the body must be a JSON object")
    known = frozenset(request_type.__struct_fields__)
    try:
        return msgspec.convert(drop_unsupported(fields, known), request_type)
    except msgspec.ValidationError as error:
        raise explain(error, fields) from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None


def explain(error: msgspec.ValidationError, fields: dict[str, Any]) -> InvalidRequestError:
    """Return the error in terms of the fields that the client sent."""
    text = str(error)
    path_match = _PATH.search(text)
    path = path_match[1].replace("[...]", "") if path_match else ""
    text = _PATH.sub("", text)
    if unknown := _UNKNOWN.match(text):
        name = f"{path}.{unknown[1]}" if path else unknown[1]
        return UnknownParameterError(f"Unrecognized request argument supplied: {name}", name)
    if missing := _MISSING.match(text):
        name = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidRequestError(f"{name} is required", name)
    return InvalidRequestError(f"{path}: {text}" if path else text, path or None)
