"""Endpoints that run no model: the tokens of texts and chats, and the texts of tokens."""

import msgspec
from aiohttp import web

from pagewise_gateway.http import responses, schema
from pagewise_gateway.http.context import CLIENT, Service
from pagewise_gateway.http.errors import InvalidRequestError
from pagewise_gateway.http.params import check_common, check_model
from pagewise_gateway.http.parsing import read_request
from pagewise_gateway.http.pieces import Piece, check_segments
from pagewise_gateway.http.prompts import check_tokenizable, encode_chat, encode_text


async def tokenize(request: web.Request) -> web.Response:
    """Tokens of a prompt or of messages."""
    service, key = request.app[Service.KEY], request[CLIENT].name
    body, _ = await read_request(request, schema.TokenizeRequest)
    check_model(body.model, service.limits)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give a prompt or messages", "prompt")
    capacity = service.scheduler_client.capacity()
    if body.prompt is None:
        encoded = await encode_chat(service, body, capacity, key)
    else:
        check_tokenizable(body.prompt, capacity, "prompt")
        encoded = await encode_text(service, [Piece(body.prompt)], body.add_special_tokens is not False, key)
    tokens = encoded.tokens
    strings: list[str] | None = None
    if body.return_token_strs:
        name = service.tokenizer.token

        def named() -> list[str]:
            names = {token: name(token) for token in set(tokens)}  # one string for all tokens of an id
            return [names[token] for token in tokens]

        strings = await service.tokenizer.off_loop(named, key)
    return _json(responses.TokenizeResponse(len(tokens), service.max_model_len, list(tokens), strings))


async def render(request: web.Request) -> web.Response:
    """The prompt that a chat completion would have, which is not run."""
    service, key = request.app[Service.KEY], request[CLIENT].name
    body, _ = await read_request(request, schema.ChatRequest)
    check_common(body, service.limits)
    check_segments(body)
    service.formats.check(body)
    encoded = await encode_chat(service, body, service.scheduler_client.capacity(), key, whole_text=True)
    return _json(responses.RenderResponse(encoded.text, list(encoded.tokens)))


async def detokenize(request: web.Request) -> web.Response:
    """Text of tokens."""
    service = request.app[Service.KEY]
    body, _ = await read_request(request, schema.DetokenizeRequest)
    check_model(body.model, service.limits)
    capacity = service.scheduler_client.capacity()
    most = max(
        schema.ALWAYS_DETOKENIZED_TOKENS, schema.DETOKENIZED_CONTEXTS * (capacity.max_model_len if capacity else 0)
    )
    if len(body.tokens) > most:
        raise InvalidRequestError(f"tokens: {len(body.tokens)} are too many, the limit is {most}", "tokens")
    vocab_size = max(service.tokenizer.vocab_size, capacity.vocab_size if capacity else 0)
    if (largest := max(body.tokens, default=0)) >= vocab_size:
        raise InvalidRequestError(f"tokens: token id {largest} is outside the vocabulary of {vocab_size}", "tokens")
    decode = service.tokenizer.decode
    text = await service.tokenizer.off_loop(
        lambda: decode(body.tokens, skip_special_tokens=False), request[CLIENT].name, len(body.tokens)
    )
    return _json(responses.DetokenizeResponse(text))


def _json(body: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
