"""Reads a body and turns it into a checked request struct.

Its structure is counted before it is decoded, and compressed bodies are inflated piece by piece, so that no body takes
more memory than its size allows.
"""

import asyncio
import contextlib
import re
import zlib
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any, Literal, TypeVar

import msgspec
from aiohttp import web
from msgspec import Struct
from pagewise_shared.json_errors import why_not_json

from pagewise_gateway.http.advice_schema import AdviceRequest
from pagewise_gateway.http.context import CLIENT, REQUEST_ID, Service
from pagewise_gateway.http.errors import (
    MAX_MESSAGE_CHARACTERS,
    BodyTimeoutError,
    BodyTooLargeError,
    InvalidRequestError,
    MediaTypeError,
    UnknownParameterError,
    UnsupportedParameterError,
    shortened,
)
from pagewise_gateway.http.intake import Intake
from pagewise_gateway.http.request_log import RequestTrace
from pagewise_gateway.http.schema import ChatRequest, TokenizeRequest
from pagewise_gateway.http.unsupported_fields import drop_unsupported

MAX_CONTAINERS = 16_384
"""The maximum number of arrays and objects of a body."""
MAX_STRINGS = 65_536
"""The maximum number of strings of a body, names of fields included."""
MAX_VALUES = 1_048_576
"""The maximum number of elements of all arrays and objects of a body, such as token ids."""
_UNCHECKED_BYTES = 32_768
"""Bodies of up to this size cannot hold enough values to matter, so their structure is not counted."""
PIECE = 16_384
"""The maximum number of bytes that are inflated at a time, before and after: this takes 5 ms at worst."""
RequestT = TypeVar("RequestT", bound=Struct)
BODY_SECONDS = 60.0
"""The time that a client has to send its body."""
LINGER_SECONDS = 3.0
"""The time for which the rest of a refused body is read before the connection is closed."""
PART_SECONDS = 10.0
"""The time within which a client has to send the next part of its body. aiohttp does not report malformed chunks to the
request, so such a request waits as long."""
_TINY_BODY_BYTES = 4096
"""Bodies of up to this size are parsed at once: to wait for a turn would take as long."""
_SMALL_BODY_BYTES = 65_536
"""Bodies of up to this size are parsed and checked without a pause; their memory is taken when they are announced."""
_PATH = re.compile(r" - at (?:`key` in )?`(?:key in )?\$\.?(.*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`")
_MISSING = re.compile(r"Object missing required field `(.*?)`")
_OTHER_KIND = re.compile(r"Invalid (?:enum )?value ('.*')$", re.DOTALL)


def check_structure(body: bytearray) -> None:
    """Count the arrays, objects, strings and other values of a body before it is decoded.

    The contents of strings do not count: code is full of brackets. If the body is not JSON, the counts are right up to
    the point at which the decoder stops.

    Raises:
        InvalidRequestError: there are too many of them.
    """
    if len(body) <= _UNCHECKED_BYTES:
        return
    few = body.count(b"[") + body.count(b"{") <= MAX_CONTAINERS and body.count(b",") < MAX_VALUES
    if few and body.count(b'"') <= 2 * MAX_STRINGS:
        return
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # the quotes that are left begin and end strings
    strings = (bare.count(b'"') + 1) // 2
    if strings > MAX_STRINGS:
        raise InvalidRequestError(
            f"the body contains {strings} strings (names of fields included), the limit is {MAX_STRINGS}"
        )
    outside = b"".join(bare.split(b'"')[::2])
    containers = outside.count(b"[") + outside.count(b"{")
    if containers > MAX_CONTAINERS:
        raise InvalidRequestError(f"the body contains {containers} arrays and objects, the limit is {MAX_CONTAINERS}")
    if (values := outside.count(b",") + 1) > MAX_VALUES:
        raise InvalidRequestError(f"the body contains {values} values, the limit is {MAX_VALUES}")


def _encoding(encodings: list[str]) -> Literal["", "gzip", "deflate"]:
    """Return the compression that ``Content-Encoding`` headers declare; empty: none.

    Raises:
        MediaTypeError: the encoding is not supported.
    """
    match ",".join(encodings).strip().lower():
        case "" | "identity":
            return ""
        case "gzip" | "x-gzip":
            return "gzip"
        case "deflate":
            return "deflate"
        case other:
            raise MediaTypeError(f"the body is encoded as {other}: send it with gzip, with deflate, or as it is")


async def read_request(request: web.Request, request_type: type[RequestT]) -> tuple[RequestT, Intake]:
    """Count the request against the limits of its API key, then read and check its body.

    Returns the request, and its reservations until it is answered.

    Raises:
        GenerationError: the API key is over one of its limits.
        OverloadedError: the key has too many answers that are not read yet, or bodies take too much memory.
        MediaTypeError, BodyTooLargeError, BodyTimeoutError: the body cannot be read.
        InvalidRequestError: it is not JSON, or a field is unknown, unsupported, or has an unusable value.
    """
    service, client, intake = request.app[Service.KEY], request[CLIENT], await count_request(request)
    body = await _read(request, intake)
    if len(body) <= _TINY_BODY_BYTES:
        parsed = parse_request(body, request_type)
    else:
        parsed = await service.turns.call(client.name, lambda: parse_request(body, request_type))
    if len(body) > _SMALL_BODY_BYTES:
        await asyncio.sleep(0)  # checking its values takes as long as parsing it: other tasks run in between
    # The scheduler may know an adapter that this gateway does not know yet.
    model, limits = getattr(parsed, "model", None), service.limits
    if model is not None and limits.max_adapter_rank and model != limits.model_name:
        await limits.adapters.wait_for(model)
    if (trace := request.get(RequestTrace.KEY)) is not None:
        trace.parsed = monotonic()
    return parsed, intake


async def count_request(request: web.Request) -> Intake:
    """Count a request against the limits of its API key, until it is answered. Returns its reservations.

    Raises:
        GenerationError: the API key is over one of its limits.
        OverloadedError: the key has too many answers that are not read yet.
    """
    service = request.app[Service.KEY]
    intake = request[Intake.KEY] = Intake(
        request[CLIENT], request[REQUEST_ID], service.body_memory, service.answer_memory
    )
    await intake.count(service.scheduler_client)
    return intake


async def _read(request: web.Request, intake: Intake) -> bytearray:
    """Read the body. Memory is reserved as its bytes arrive, so that a body that is only announced reserves none.

    Raises:
        MediaTypeError, BodyTooLargeError, BodyTimeoutError, InvalidRequestError: as in ``read_request``.
        OverloadedError: bodies take too much memory.
    """
    content_type = request.headers.get("Content-Type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise MediaTypeError(f"the body is declared as {content_type}: send Content-Type: application/json")
    encoding, limit = _encoding(request.headers.getall("Content-Encoding", [])), request.client_max_size
    parts, has = (_inflated(request, encoding), "inflates to") if encoding else (_parts(request), "has")
    announced, body = request.content_length or 0, bytearray()
    if announced > limit:
        raise BodyTooLargeError(f"the body has {announced} bytes, the limit is {limit}")
    intake.memory.grow_to(min(announced, _SMALL_BODY_BYTES))
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in parts:
                if len(body) + len(piece) > limit:
                    raise BodyTooLargeError(f"the body {has} more than {limit} bytes, which is the limit")
                intake.memory.grow_to(len(body) + len(piece))
                body += piece
    except TimeoutError:
        raise BodyTimeoutError(
            f"the body did not arrive within {BODY_SECONDS:g} s, or nothing of it for {PART_SECONDS:g} s"
        ) from None
    except web.RequestPayloadError as error:
        reason = " ".join(str(error).split())
        raise InvalidRequestError(f"the body cannot be read: {reason}") from None
    return body


async def _parts(request: web.Request) -> AsyncIterator[bytes]:
    """Yield the body as it arrives. Other tasks run between its parts, even if it arrives faster than it is read."""
    while True:
        async with asyncio.timeout(PART_SECONDS):
            part = await request.content.readany()
        if not part:
            return
        yield part
        if not request.content.is_eof():
            await asyncio.sleep(0)


async def discard_body(request: web.Request) -> None:
    """Read and discard the rest of a refused body, after the response was written.

    A client that sends its whole body before it reads would see a reset instead of the response if its connection was
    closed at once (RFC 9112, section 9.6).
    """
    with contextlib.suppress(TimeoutError, web.RequestPayloadError):
        async with asyncio.timeout(LINGER_SECONDS):
            async for _ in _parts(request):
                pass


async def _inflated(request: web.Request, encoding: Literal["gzip", "deflate"]) -> AsyncIterator[bytes]:
    """Yield a compressed body, which is one member of gzip or deflate, in small pieces, in turns with other work.

    Raises:
        InvalidRequestError: it is not valid in this encoding.
    """
    turns, key = request.app[Service.KEY].turns, request[CLIENT].name
    stream, data, begun = zlib.decompressobj(), b"", False

    def inflate() -> bytes:
        try:
            piece = stream.decompress(data, PIECE)
        except zlib.error as error:
            raise InvalidRequestError(f"the body is not valid {encoding}: {error}") from None
        if stream.unused_data:
            raise InvalidRequestError(f"the body goes on behind the end of what is compressed with {encoding}")
        return piece

    async for part in _parts(request):
        if not begun:
            begun = True
            # Some clients send deflate without the zlib header, whose first byte names the method deflate, 8.
            wbits = zlib.MAX_WBITS if part[0] & 0xF == 8 else -zlib.MAX_WBITS
            stream = zlib.decompressobj(16 + zlib.MAX_WBITS if encoding == "gzip" else wbits)
        for start in range(0, len(part), PIECE):
            data = part[start : start + PIECE]
            while piece := await turns.call(key, inflate):
                data = stream.unconsumed_tail
                yield piece
    if not stream.eof:
        raise InvalidRequestError(f"the body is not complete: its {encoding} has no end")


def parse_request(body: bytearray, request_type: type[RequestT]) -> RequestT:
    """Return the request in these bytes.

    Raises:
        InvalidRequestError: it is not JSON, or a field is unknown, unsupported, or has an unusable value.
    """
    check_structure(body)
    try:
        fields = msgspec.json.decode(body)
    except UnicodeDecodeError:
        raise InvalidRequestError("the body is not valid UTF-8") from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None
    except msgspec.MsgspecError as error:
        raise InvalidRequestError(why_not_json(body, error).replace("it ", "the body ", 1)) from None
    if not isinstance(fields, dict):
        raise InvalidRequestError("the body must be a JSON object")
    known = frozenset(request_type.__struct_fields__)
    try:
        wanted = drop_unsupported(fields, known, of_chat=request_type in (ChatRequest, TokenizeRequest, AdviceRequest))
        try:
            return msgspec.convert(wanted, request_type)
        except msgspec.ValidationError as error:
            if "got `float`" not in str(error):
                raise
            # JSON has only numbers, and some clients send integers as 10.0. Fields for other numbers take integers too.
            return msgspec.convert({name: _integral(value) for name, value in wanted.items()}, request_type)
    except msgspec.ValidationError as error:
        raise explain(error, fields) from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None


def explain(error: msgspec.ValidationError, fields: dict[str, Any]) -> InvalidRequestError:
    """Return the error in terms of the fields that the client sent."""
    text = shortened(str(error), 4 * MAX_MESSAGE_CHARACTERS)
    path_match = _PATH.search(text)
    path = path_match[1].replace("[...]", "") if path_match else ""
    text = _PATH.sub("", text)
    if unknown := _UNKNOWN.match(text):
        name = f"{path}.{unknown[1]}" if path else unknown[1]
        return UnknownParameterError(f"Unrecognized request argument supplied: {name}", name)
    if missing := _MISSING.match(text):
        name = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidRequestError(f"{name} is required", name)
    if path.endswith("].type") and (kind := _OTHER_KIND.match(text)):  # of a part, a block or a tool
        return UnsupportedParameterError(f"{path}: {kind[1]} is not supported by Pagewise", path)
    return InvalidRequestError(f"{path}: {text}" if path else text, path or None)


def _integral(value: Any) -> Any:
    """Return an integer for a float without a fraction, also in lists. Other floats stay, so that errors name them."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, list):
        kinds = set(map(type, value))
        if float in kinds or list in kinds:
            return [_integral(item) for item in value]
    return value
