"""``POST /v1/responses``."""

import logging
from functools import cache

from aiohttp import web

from pagewise_gateway.http.chat import run_chat
from pagewise_gateway.http.context import CLIENT, REQUEST_ID, Service
from pagewise_gateway.http.errors import InvalidRequestError
from pagewise_gateway.http.intake import Reservation
from pagewise_gateway.http.parsing import read_request
from pagewise_gateway.http.responses_api.answer import ResponseAnswer, begun
from pagewise_gateway.http.responses_api.schema import ResponsesRequest
from pagewise_gateway.http.responses_api.translation import chat_request, leave_out_tools

log = logging.getLogger(__name__)

_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text.format"}
"""The fields of a chat that have other names here."""


async def create_response(request: web.Request) -> web.StreamResponse:
    """Continue a conversation that consists of items.

    Raises:
        APIError: the request is invalid, or cannot be served now.
        GenerationError: the request was not accepted, or failed before the response began.
    """
    service, key = request.app[Service.KEY], request[CLIENT].name
    body, intake = await read_request(request, ResponsesRequest)
    for kind in leave_out_tools(body):
        _tell(kind)
        service.metrics.requests_without_tools(kind).inc()
    chat = chat_request(body)
    model = body.model or service.limits.model_name
    response, num_bytes = begun(f"resp_{request[REQUEST_ID]}", model, body)
    del body  # this frame lives until the response has ended
    try:
        return await run_chat(
            request,
            chat,
            intake,
            lambda run: ResponseAnswer(run, response, Reservation(service.answer_memory, key)).respond(request),
            repeated=num_bytes,
        )
    except InvalidRequestError as error:
        error.rename(_NAMES)
        raise


@cache
def _tell(kind: str) -> None:
    """Warn of a type of tools, once."""
    log.warning("tools of type %s are left out of requests that have functions, too", kind)
