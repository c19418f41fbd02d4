"""Turns the bytes of a body into a checked request struct."""

import asyncio
import re
from time import monotonic
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import Struct
from pagewise_shared.json_errors import why_not_json

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
from pagewise_gateway.http.inflating import PIECE, inflater
from pagewise_gateway.http.intake import Intake
from pagewise_gateway.http.integers import with_integers
from pagewise_gateway.http.schema import ChatRequest, TokenizeRequest
from pagewise_gateway.http.structure import check_structure
from pagewise_gateway.http.tracing import RequestTrace
from pagewise_gateway.http.unsupported import drop_unsupported

RequestT = TypeVar("RequestT", bound=Struct)

BODY_SECONDS = 60.0
"""How long a client may take to send its body."""

_SMALL_BODY_BYTES = 65_536
"""Bodies of up to this size are parsed in turns with other short work; larger ones one after the other."""

_PATH = re.compile(r" - at (?:`key` in )?`(?:key in )?\$\.?(.*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`")
_MISSING = re.compile(r"Object missing required field `(.*?)`")
_OTHER_KIND = re.compile(r"Invalid (?:enum )?value ('.*')$", re.DOTALL)


async def read_request(request: web.Request, request_type: type[RequestT]) -> tuple[RequestT, Intake]:
    """Do as ``_read_request`` says, and note in the request's trace when that was done."""
    made = await _read_request(request, request_type)
    if (trace := request.get(RequestTrace.KEY)) is not None:
        trace.parsed = monotonic()
    return made


async def _read_request(request: web.Request, request_type: type[RequestT]) -> tuple[RequestT, Intake]:
    """Count the request against the limits of its API key, then read and check its body.

    Returns the request and what is held for it, until ``Intake.close`` or until it is answered.

    Raises:
        GenerationError: the API key is over one of its limits.
        OverloadedError: the key has too many answers that are not read yet, or bodies take too much memory.
        MediaTypeError, BodyTooLargeError, BodyTimeoutError: the body cannot be read.
        InvalidRequestError: it is not JSON, or a field is unknown, unsupported, or has an unusable value.
    """
    service, client, intake = request.app[Service.KEY], request[CLIENT], await count_request(request)
    body = await _read(request, intake)
    if len(body) <= _SMALL_BODY_BYTES:
        small = await service.turns.call(client.name, lambda: parse_request(body, request_type))
        await _settle_adapter(service, small)
        return small, intake
    # Parsing holds the GIL, so a thread would not help. Large bodies take at most half of the event loop's time: the
    # next one is parsed when as much time has passed again.
    await service.parsing.take(client.name)
    began = monotonic()
    try:
        parsed = parse_request(body, request_type)
    finally:
        asyncio.get_running_loop().call_later(monotonic() - began, service.parsing.pass_on)
    await asyncio.sleep(0)  # checking its values takes as long as parsing it: others run in between
    await _settle_adapter(service, parsed)
    return parsed, intake


async def _settle_adapter(service: Service, body: Struct) -> None:
    """Wait until it is known whether there is the adapter that a request names, if it does not name the model."""
    name, limits = getattr(body, "model", None), service.limits
    if name is not None and limits.max_lora_rank and name != limits.model_name:
        await limits.adapters.settle(name)


async def count_request(request: web.Request) -> Intake:
    """Count a request against the limits of its API key, until it is answered. Returns what is held for it.

    Raises:
        GenerationError: the API key is over one of its limits.
        OverloadedError: the key has too many answers that are not read yet.
    """
    service = request.app[Service.KEY]
    intake = request[Intake.KEY] = Intake(
        request[CLIENT], request[REQUEST_ID], service.body_memory, service.answer_memory, service.answering
    )
    await intake.count(service.link)
    return intake


async def _read(request: web.Request, intake: Intake) -> bytearray:
    """Read the body. Memory is taken as its bytes arrive, so that a body that is only announced takes none from others.

    A compressed body is inflated in pieces, which take turns with other short work.
    """
    turns, key = request.app[Service.KEY].turns, request[CLIENT].name
    content_type = request.headers.get("Content-Type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise MediaTypeError(f"the body is declared as {content_type}: send Content-Type: application/json")
    inflate = inflater(request.headers.getall("Content-Encoding", []))
    limit = request.client_max_size
    if request.content_length is not None and request.content_length > limit:
        raise BodyTooLargeError(f"the body has {request.content_length} bytes, the limit is {limit}")
    try:
        intake.memory.grow_to(min(request.content_length or 0, _SMALL_BODY_BYTES))
        body, arrived = bytearray(), 0
        async with asyncio.timeout(BODY_SECONDS):
            while chunk := await request.content.readany():
                arrived += len(chunk)
                if arrived > limit:
                    raise BodyTooLargeError(f"the body has more than {limit} bytes, which is the limit")
                if inflate is None:
                    intake.memory.grow_to(arrived)
                    body += chunk
                    continue
                for start in range(0, len(chunk), PIECE):
                    inflate.feed(chunk[start : start + PIECE])
                    while piece := await turns.call(key, inflate.piece):
                        if len(body) + len(piece) > limit:
                            raise BodyTooLargeError(f"the body inflates to more than {limit} bytes, which is the limit")
                        intake.memory.grow_to(len(body) + len(piece))
                        body += piece
            if inflate is not None:
                inflate.end()
    except TimeoutError:
        raise BodyTimeoutError(f"the body did not arrive within {BODY_SECONDS:g} s") from None
    except web.RequestPayloadError as error:
        reason = " ".join(str(error).split())
        raise InvalidRequestError(f"the body cannot be read: {reason}") from None
    return body


def parse_request(body: bytearray, request_type: type[RequestT]) -> RequestT:
    """Return the request in these bytes.

    Raises:
        InvalidRequestError: as in ``read_request``.
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
        wanted = drop_unsupported(fields, known, of_chat=request_type in (ChatRequest, TokenizeRequest))
        try:
            return msgspec.convert(wanted, request_type)
        except msgspec.ValidationError as error:
            if "got `float`" not in str(error):
                raise
            with_integers(wanted, request_type)
            return msgspec.convert(wanted, request_type)
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
