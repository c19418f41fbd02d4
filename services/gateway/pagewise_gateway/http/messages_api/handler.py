"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

import msgspec
from aiohttp import web

from pagewise_gateway.http.chat import run_chat
from pagewise_gateway.http.context import CLIENT, REQUEST_ID, Service
from pagewise_gateway.http.messages_api.answer import MessageAnswer
from pagewise_gateway.http.messages_api.schema import CountRequest, MessagesRequest, TokenCount
from pagewise_gateway.http.messages_api.translation import chat_request
from pagewise_gateway.http.params import check_model
from pagewise_gateway.http.parsing import read_request
from pagewise_gateway.http.prompts import encode_chat


async def create_message(request: web.Request) -> web.StreamResponse:
    """Continue a conversation of Anthropic's API.

    Raises:
        APIError: the request is invalid, or cannot be served now.
        GenerationError: the request was not accepted, or failed before the response began.
    """
    body, intake = await read_request(request, MessagesRequest)
    chat = chat_request(body)
    del body  # this frame lives until the response has ended
    return await run_chat(
        request, chat, intake, lambda run: MessageAnswer(run, f"msg_{request[REQUEST_ID]}").respond(request)
    )


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """Count the tokens of a prompt of Anthropic's API.

    Raises:
        APIError, GenerationError: as ``create_message``.
    """
    service = request.app[Service.KEY]
    body, _ = await read_request(request, CountRequest)
    check_model(body.model, service.limits)
    chat = chat_request(body)
    service.formats.check(chat)
    encoded = await encode_chat(service, chat, service.scheduler_client.capacity(), request[CLIENT].name)
    counted = TokenCount(len(encoded.tokens))
    return web.Response(body=msgspec.json.encode(counted), content_type="application/json")
