"""The aiohttp application: routes, error responses, and the endpoints that generate nothing."""

import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware
from pagewise_shared.config import GatewayConfig
from pagewise_shared.sampling import SamplingParams
from pagewise_shared.version import package_version

from pagewise_gateway.generation import GenerationError, GenerationRequest
from pagewise_gateway.http.access import access_check
from pagewise_gateway.http.chat import create_chat_completion
from pagewise_gateway.http.completions import create_completion
from pagewise_gateway.http.context import CLIENT, CLIENT_REQUEST_ID, REQUEST_ID, Service
from pagewise_gateway.http.debug import debug_memory, debug_request
from pagewise_gateway.http.errors import APIError, InternalError, InvalidRequestError, failure, from_http_exception
from pagewise_gateway.http.openapi import document
from pagewise_gateway.http.params import Limits, check_model
from pagewise_gateway.http.parsing import read_request
from pagewise_gateway.http.prompts import encode_chat
from pagewise_gateway.http.refused_requests import RefusedRequests
from pagewise_gateway.http.request_log import RequestLog
from pagewise_gateway.http.responses import (
    DetokenizeResponse,
    Health,
    Model,
    ModelList,
    TokenizeResponse,
    Version,
)
from pagewise_gateway.http.schema import DetokenizeRequest, TokenizeRequest
from pagewise_gateway.link import SchedulerLink
from pagewise_gateway.metrics import CONTENT_TYPE, Metrics
from pagewise_gateway.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

_REFUSED = web.AppKey("refused", RefusedRequests)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def create_app(
    link: SchedulerLink,
    tokenizer: Tokenizer,
    config: GatewayConfig,
    metrics: Metrics,
) -> web.Application:
    """Return the application that serves HTTP requests over ``link``.

    It must run with aiohttp's ``handler_cancellation``, so that a client that disconnects aborts its request.

    Raises:
        ConfigError: the API keys cannot be read.
    """
    middlewares: list[Middleware] = [_shape_errors, access_check(config, metrics)]
    if config.log_requests:
        middlewares.insert(0, RequestLog(link).middleware)
    app = web.Application(middlewares=middlewares, client_max_size=config.max_body_bytes)
    limits = Limits(config.served_model_name or config.model, config.max_n)
    app[Service.KEY] = Service(link, tokenizer, metrics, limits, config.write_timeout)
    app[_REFUSED] = RefusedRequests()
    app.on_cleanup.append(_close)
    app.add_routes(
        [
            web.post("/v1/completions", create_completion),
            web.post("/v1/chat/completions", create_chat_completion),
            web.get("/v1/models", list_models),
            web.get("/v1/models/{model:.+}", get_model),
            web.post("/tokenize", tokenize),
            web.post("/detokenize", detokenize),
            web.get("/health", health),
            web.get("/version", version),
            web.get("/metrics", render_metrics),
            web.get("/debug/memory", debug_memory),
            web.get("/debug/requests/{request_id}", debug_request),
            web.get("/openapi.json", openapi),
        ]
    )
    return app


async def _close(app: web.Application) -> None:
    app[Service.KEY].tokenizer.close()


@web.middleware
async def _shape_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give every request an id, and every error OpenAI's shape.

    An X-Request-Id that a client sent is returned to it; the log and the id of the response use our own id.
    """
    sent = request.headers.get("X-Request-Id", "")
    request[REQUEST_ID] = uuid.uuid4().hex
    request[CLIENT_REQUEST_ID] = sent if _REQUEST_ID.fullmatch(sent) else request[REQUEST_ID]
    metrics = request.app[Service.KEY].metrics
    metrics.http_requests_in_progress.inc()
    try:
        response = await handler(request)
    except APIError as error:
        response = error.response()
    except GenerationError as error:
        response = failure(error).response()
    except web.HTTPException as error:
        response = from_http_exception(error, f"{request.method} {request.path}").response()
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        error.__traceback__ = None  # breaks a cycle: its frames refer to the error
    except ConnectionError:
        # The client is gone, so nobody reads an answer. If this was raised, aiohttp would log it as an internal error.
        log.debug("request %s: the client is gone", request[REQUEST_ID])
        response = web.Response(status=499)
    except Exception:
        log.exception("request %s failed", request[REQUEST_ID])
        response = InternalError(f"internal error; see the server's log of request {request[REQUEST_ID]}").response()
    finally:
        metrics.http_requests_in_progress.dec()
    if response.status >= 400:
        request.app[_REFUSED].add()
    if not response.prepared:
        response.headers.update(Service.headers(request))
        if request.app[Service.KEY].link.closing:
            response.force_close()  # the client's next request goes to another gateway, if there is one
    return response


async def health(request: web.Request) -> web.Response:
    """200 if the scheduler answers and an executor is ready, else 503; 503 too while this gateway stops."""
    link = request.app[Service.KEY].link
    answers, ready = link.answers, link.ready_executors
    status = "ok" if ready else "no executor is ready" if answers else "no scheduler answers"
    if link.closing:
        status = "the gateway is shutting down"
    return _json(Health(status, ready, answers), 200 if status == "ok" else 503)


async def version(_: web.Request) -> web.Response:
    """The version of this service."""
    return _json(Version(package_version()))


async def render_metrics(request: web.Request) -> web.Response:
    """Prometheus metrics of all processes, which the scheduler collects."""
    body = await request.app[Service.KEY].link.query("metrics")
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


async def openapi(request: web.Request) -> web.Response:
    """The OpenAPI document of this application."""
    return _json(document(package_version(), request.app[Service.KEY].limits.model_name))


async def list_models(request: web.Request) -> web.Response:
    """The one model that is served."""
    return _json(ModelList([_model(request.app[Service.KEY])]))


async def get_model(request: web.Request) -> web.Response:
    """The model by its name."""
    service = request.app[Service.KEY]
    check_model(request.match_info["model"], service.limits)
    return _json(_model(service))


async def tokenize(request: web.Request) -> web.Response:
    """Tokens of a prompt or of messages."""
    service = request.app[Service.KEY]
    body = await read_request(request, TokenizeRequest)
    check_model(body.model, service.limits)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give a prompt or messages", "prompt")
    async with _counted(request):
        if body.prompt is None:
            tokens = await encode_chat(service, body, None)
        else:
            tokens = await service.encode(body.prompt, body.add_special_tokens is not False)
        strings: list[str] | None = None
        if body.return_token_strs:
            strings = await service.tokenizer.off_loop(lambda: [service.tokenizer.token(token) for token in tokens])
    return _json(TokenizeResponse(len(tokens), _max_model_len(service), list(tokens), strings))


async def detokenize(request: web.Request) -> web.Response:
    """Text of tokens, special tokens included."""
    service = request.app[Service.KEY]
    body = await read_request(request, DetokenizeRequest)
    check_model(body.model, service.limits)
    capacity = service.link.capacity()
    vocab_size = max(service.tokenizer.vocab_size, capacity.vocab_size if capacity else 0)
    if (largest := max(body.tokens, default=0)) >= vocab_size:
        raise InvalidRequestError(f"tokens: token id {largest} is outside the vocabulary of {vocab_size}", "tokens")
    async with _counted(request):
        decode = service.tokenizer.decode
        text = await service.tokenizer.off_loop(lambda: decode(body.tokens, skip_special_tokens=False))
    return _json(DetokenizeResponse(text))


@asynccontextmanager
async def _counted(request: web.Request) -> AsyncIterator[None]:
    """Count work that the gateway does itself against the limits of the request's API key, if it has any.

    Raises:
        GenerationError: the key is over one of its limits.
    """
    client = request[CLIENT]
    if not client.limited:
        yield
        return
    generation = GenerationRequest(
        request[REQUEST_ID], (), SamplingParams(), arrival_time=time.monotonic(), key=client.name, limits=client.limits
    )
    live = request.app[Service.KEY].link.submit(generation)
    try:
        await live.next()
        yield
    finally:
        live.abort()


def _model(service: Service) -> Model:
    return Model(service.limits.model_name, _STARTED, _max_model_len(service))


def _max_model_len(service: Service) -> int | None:
    capacity = service.link.capacity()
    return capacity.max_model_len if capacity else None


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


_STARTED = int(time.time())
