"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from pagewise_gateway.generation import GenerationError
from pagewise_gateway.http.chat import run_chat
from pagewise_gateway.http.context import CLIENT, REQUEST_ID, Service
from pagewise_gateway.http.errors import APIError, failure
from pagewise_gateway.http.messages_api.answer import MessageAnswer
from pagewise_gateway.http.messages_api.schema import CountRequest, MessagesRequest, TokenCount
from pagewise_gateway.http.messages_api.translation import chat_request
from pagewise_gateway.http.params import check_model
from pagewise_gateway.http.parsing import read_request
from pagewise_gateway.http.prompts import encode_chat

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's types of errors by status; others below 500 are invalid_request_error, the rest api_error."""

_NAMES = {"max_completion_tokens": "max_tokens", "response_format": "output_config.format"}
"""The fields of a chat that have other names here."""


async def create_message(request: web.Request) -> web.StreamResponse:
    """Continue a conversation of Anthropic's API."""
    return await _in_its_shape(lambda: _create(request))


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """Count the tokens of a prompt of Anthropic's API."""
    return await _in_its_shape(lambda: _count(request))


async def _create(request: web.Request) -> web.StreamResponse:
    body, intake = await read_request(request, MessagesRequest)
    chat = chat_request(body)
    del body  # this frame lives until the response has ended
    return await run_chat(
        request, chat, intake, lambda run: MessageAnswer(run, f"msg_{request[REQUEST_ID]}").respond(request)
    )


async def _count(request: web.Request) -> web.StreamResponse:
    service = request.app[Service.KEY]
    body, _ = await read_request(request, CountRequest)
    check_model(body.model, service.limits)
    chat = chat_request(body)
    service.formats.check(chat)
    encoded = await encode_chat(service, chat, service.link.capacity(), request[CLIENT].name)
    counted = TokenCount(len(encoded.tokens))
    return web.Response(body=msgspec.json.encode(counted), content_type="application/json")


async def _in_its_shape(answer: Callable[[], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    """Return the answer, or its error as Anthropic's clients read it, which has OpenAI's fields as well."""
    try:
        return await answer()
    except (APIError, GenerationError) as error:
        raised = error if isinstance(error, APIError) else failure(error)
        response = raised.response()
        # They refer to frames, which refer to the body: without this it would wait for the garbage collector.
        error.__traceback__ = error.__context__ = None
    kind = _TYPES.get(response.status, "api_error" if response.status >= 500 else "invalid_request_error")
    param = _NAMES.get((raised.param or "").partition(".")[0], raised.param)
    detail: dict[str, object] = {"type": kind, "message": str(raised), "param": param, "code": raised.code}
    if param == "thread":  # by this the tool runner of Anthropic's SDK knows that it has to send all messages each time
        detail["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    response.body = msgspec.json.encode({"type": "error", "error": detail})
    return response
