"""Reads a body and turns it into a checked request struct.

Its structure is counted before it is decoded, and compressed bodies are inflated piece by piece, so that no body takes
more memory than its size allows. Fields of OpenAI's API that Pagewise does not have are refused by name here.
"""

import asyncio
import contextlib
import re
import zlib
from collections.abc import AsyncIterator
from functools import cache
from time import monotonic
from typing import Any, TypeVar

import msgspec
import msgspec.inspect as types
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
from pagewise_gateway.http.intake import Intake
from pagewise_gateway.http.schema import ChatMessage, ChatRequest, TokenizeRequest
from pagewise_gateway.http.tracing import RequestTrace

MAX_CONTAINERS = 16_384
"""Most arrays and objects of a body."""
MAX_STRINGS = 65_536
"""Most strings of a body, names of fields included."""
MAX_VALUES = 1_048_576
"""Most elements of all arrays and objects of a body, such as token ids."""
_ALWAYS_FAST = 32_768
"""Bodies of so many bytes are not looked at."""
PIECE = 16_384
"""The most bytes that are inflated at a time, and the most that this returns: it takes 5 ms at worst."""
# Field -> values that ask for nothing. Null always counts as one.
_FIELDS: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": (),
    "conversation": (),
    "function_call": ("none",),
    "functions": ([],),
    "max_tool_calls": (),
    "include_reasoning": (True, False),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_options": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default", "standard_only"),
    "store": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("low", "medium", "high"),
    "web_search_options": (),
    # Anthropic
    "compaction": (),
    "container": (),
    "diagnostics": (),
    "fallbacks": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "thread": (),
    # vLLM
    "chat_template": (),
    "documents": ([],),
    "ec_transfer_params": (),
    "echo": (False,),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "logits_processors": (),
    "logprob_token_ids": (),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "request_id": (),
    "return_mm_kwargs": (False,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "session_id": (),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "thinking_token_budget": (),
    "truncation_side": ("left",),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}
# The same for the fields of a message.
_MESSAGE_FIELDS: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": ("",),
}
_MESSAGE_KNOWN = frozenset(ChatMessage.__struct_fields__)
RequestT = TypeVar("RequestT", bound=Struct)
BODY_SECONDS = 60.0
"""How long a client may take to send its body."""
LINGER_SECONDS = 3.0
"""For how long the rest of a refused body is read before the connection is closed."""
PART_SECONDS = 10.0
"""How long a client may send nothing of its body. aiohttp does not tell a request that its chunks are malformed, so it
waits for so long, too."""
_TINY_BODY_BYTES = 4096
"""Bodies of up to this size are parsed at once: to wait for a turn would take as long."""
_SMALL_BODY_BYTES = 65_536
"""Bodies of up to this size are parsed and checked without a pause; their memory is taken when they are announced."""
_PATH = re.compile(r" - at (?:`key` in )?`(?:key in )?\$\.?(.*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`")
_MISSING = re.compile(r"Object missing required field `(.*?)`")
_OTHER_KIND = re.compile(r"Invalid (?:enum )?value ('.*')$", re.DOTALL)


def check_structure(body: bytearray) -> None:
    """Count the arrays, objects, strings and other values of a body that is going to be decoded.

    What is inside strings does not count: code is full of brackets. If the body is no JSON, the counts are right up to
    where the decoder stops.

    Raises:
        InvalidRequestError: there are too many of them.
    """
    if len(body) <= _ALWAYS_FAST:
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


_ZLIB, _RAW, _GZIP = zlib.MAX_WBITS, -zlib.MAX_WBITS, 16 + zlib.MAX_WBITS


class Inflater:
    """Inflates one body, which is one member of gzip or deflate.

    To be used in this order: ``feed`` at most ``PIECE`` bytes, call ``piece`` until it returns none, and repeat this
    for the whole body; then call ``end``.
    """

    def __init__(self, encoding: str) -> None:
        """``encoding``: gzip or deflate."""
        self._encoding = encoding
        self._input = b""
        self._inflate, self._begun = zlib.decompressobj(), False

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body, at least one."""
        self._input = data

    def piece(self) -> bytes:
        """Return at most ``PIECE`` inflated bytes; none when the bytes that were fed hold no more.

        Raises:
            InvalidRequestError: the body is not valid in this encoding.
        """
        if not self._begun:
            self._begun = True
            # Some clients send deflate without the zlib header, whose first byte says that it is deflate.
            deflate = _ZLIB if self._input[0] & 0xF == 8 else _RAW
            self._inflate = zlib.decompressobj(_GZIP if self._encoding == "gzip" else deflate)
        try:
            piece = self._inflate.decompress(self._input, PIECE)
        except zlib.error as error:
            raise InvalidRequestError(f"the body is not valid {self._encoding}: {error}") from None
        self._input = self._inflate.unconsumed_tail
        if self._inflate.unused_data:
            raise InvalidRequestError(f"the body goes on behind the end of what is compressed with {self._encoding}")
        return piece

    def end(self) -> None:
        """Check that the body is complete.

        Raises:
            InvalidRequestError: it is not complete.
        """
        if not self._inflate.eof:
            raise InvalidRequestError(f"the body is not complete: its {self._encoding} has no end")


def inflater(encodings: list[str]) -> Inflater | None:
    """Return the inflater for a body with these ``Content-Encoding`` headers; None: it is not compressed.

    Raises:
        MediaTypeError: the encoding is not supported.
    """
    encoding = ",".join(encodings).strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding in ("gzip", "x-gzip", "deflate"):
        return Inflater(encoding.removeprefix("x-"))
    raise MediaTypeError(f"the body is encoded as {encoding}: send it with gzip, with deflate, or as it is")


def drop_unsupported(fields: dict[str, Any], known: frozenset[str], of_chat: bool) -> dict[str, Any]:
    """Return the fields without nulls and without unsupported fields whose values ask for nothing.

    ``known``: the fields that the request's struct has; they are left alone. ``of_chat``: whether it has messages of a
    chat.

    Raises:
        UnsupportedParameterError: a field asks for something Pagewise does not do.
    """
    kept = _drop(fields, _FIELDS, known, "")
    if of_chat and isinstance(messages := kept.get("messages"), list):
        kept["messages"] = [_drop_in_message(message, i) for i, message in enumerate(messages)]
    return kept


def _drop(
    fields: dict[str, Any], table: dict[str, tuple[Any, ...]], known: frozenset[str], prefix: str
) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if value is None:
            # An unknown name is kept, so that it is refused even as null.
            if name not in table and name not in known:
                kept[name] = value
        elif name in known or name not in table:
            kept[name] = value
        elif not any(type(value) is type(harmless) and value == harmless for harmless in table[name]):
            raise UnsupportedParameterError(f"{prefix}{name} is not supported by Pagewise", f"{prefix}{name}")
    return kept


def _drop_in_message(message: Any, index: int) -> Any:
    if not isinstance(message, dict):
        return message
    place = f"messages[{index}]"
    if message.get("role") == "function":
        raise UnsupportedParameterError(f"{place}: messages of role function are not supported; tool is", place)
    kept = _drop(message, _MESSAGE_FIELDS, _MESSAGE_KNOWN, f"{place}.")
    if isinstance(parts := kept.get("content"), list):
        for i, part in enumerate(parts):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise UnsupportedParameterError(
                    f"{place}.content[{i}]: parts of type {kind} are not supported: only text is",
                    f"{place}.content[{i}]",
                )
    return kept


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
    if len(body) <= _TINY_BODY_BYTES:
        parsed = parse_request(body, request_type)
    else:
        parsed = await service.turns.call(client.name, lambda: parse_request(body, request_type))
    if len(body) > _SMALL_BODY_BYTES:
        await asyncio.sleep(0)  # checking its values takes as long as parsing it: others run in between
    await _settle_adapter(service, parsed)
    return parsed, intake


async def _settle_adapter(service: Service, body: Struct) -> None:
    """Wait until it is known whether there is the adapter that a request names, if it does not name the model."""
    name, limits = getattr(body, "model", None), service.limits
    if name is not None and limits.max_adapter_rank and name != limits.model_name:
        await limits.adapters.wait_for(name)


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
    await intake.count(service.scheduler_client)
    return intake


async def _read(request: web.Request, intake: Intake) -> bytearray:
    """Read the body. Memory is taken as its bytes arrive, so that a body that is only announced takes none from others.

    Raises:
        MediaTypeError, BodyTooLargeError, BodyTimeoutError, InvalidRequestError: as in ``read_request``.
        OverloadedError: bodies take too much memory.
    """
    content_type = request.headers.get("Content-Type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise MediaTypeError(f"the body is declared as {content_type}: send Content-Type: application/json")
    inflate, limit = inflater(request.headers.getall("Content-Encoding", [])), request.client_max_size
    parts, has = (_parts(request), "has") if inflate is None else (_inflated(request, inflate), "inflates to")
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
    """Yield the body as it arrives. Others run between its parts, also if it arrives faster than it is read."""
    while True:
        async with asyncio.timeout(PART_SECONDS):
            part = await request.content.readany()
        if not part:
            return
        yield part
        if not request.content.is_eof():
            await asyncio.sleep(0)


async def discard_body(request: web.Request) -> None:
    """Read and throw away the rest of a refused body, after the response was written.

    A client that sends all of its body first would see a reset instead of the answer if its connection was closed at
    once (RFC 9112, section 9.6).
    """
    with contextlib.suppress(TimeoutError, web.RequestPayloadError):
        async with asyncio.timeout(LINGER_SECONDS):
            async for _ in _parts(request):
                pass


async def _inflated(request: web.Request, inflate: Inflater) -> AsyncIterator[bytes]:
    """Yield a compressed body in small pieces, which take turns with other short work.

    Raises:
        InvalidRequestError: it is not valid in this encoding.
    """
    turns, key = request.app[Service.KEY].turns, request[CLIENT].name
    async for part in _parts(request):
        for start in range(0, len(part), PIECE):
            inflate.feed(part[start : start + PIECE])
            while piece := await turns.call(key, inflate.piece):
                yield piece
    inflate.end()


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
            _with_integers(wanted, request_type)
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


def _with_integers(fields: dict[str, Any], request_type: type[Struct]) -> None:
    """Replace floats without a fraction by integers, in place, in all fields that take integers or lists of them: JSON
    has numbers only, and some clients send 10.0.

    Other floats stay as they are, so that the error that they cause names the field.
    """
    for name in _integer_fields(request_type) & fields.keys():
        fields[name] = _integral(fields[name])


def _integral(value: Any) -> Any:
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, list):
        kinds = set(map(type, value))
        if float in kinds or list in kinds:
            return [_integral(item) for item in value]
    return value


@cache
def _integer_fields(request_type: type[Struct]) -> frozenset[str]:
    info = types.type_info(request_type)
    assert isinstance(info, types.StructType)
    return frozenset(field.encode_name for field in info.fields if _takes_integers(field.type))


def _takes_integers(kind: types.Type) -> bool:
    """Whether a value of a field may be an integer, or a list of integers, but not another number."""
    match kind:
        case types.IntType():
            return True
        case types.ListType(item_type=item) | types.Metadata(type=item):
            return _takes_integers(item)
        case types.UnionType(types=alternatives):
            return any(map(_takes_integers, alternatives))
        case _:
            return False
