"""The aiohttp application: routes, error responses, and the endpoints that generate nothing."""

import logging
import re
import time
import uuid

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware
from pagewise_shared.config import GatewayConfig
from pagewise_shared.config.adapter_options import adapter_rights, max_adapter_rank
from pagewise_shared.generation_config import GenerationConfig
from pagewise_shared.protocol import Adapter
from pagewise_shared.reports import CacheReport, CacheReset
from pagewise_shared.tracing import Tracing
from pagewise_shared.version import package_version

from pagewise_gateway.http import errors, responses, schema
from pagewise_gateway.http import messages_schema as messages
from pagewise_gateway.http import responses_schema as items
from pagewise_gateway.http.access import access_check, check_operator
from pagewise_gateway.http.adapters import LoadAdapterRequest, UnloadAdapterRequest, load_adapter, unload_adapter
from pagewise_gateway.http.advice import give_advice
from pagewise_gateway.http.advice_schema import AdviceAnswer, AdviceRequest
from pagewise_gateway.http.cache import ResetCacheRequest, debug_cache, reset_prefix_cache
from pagewise_gateway.http.chat import create_chat_completion
from pagewise_gateway.http.completions import create_completion
from pagewise_gateway.http.console import CONSOLE_HANDLERS, Feeds, add_console
from pagewise_gateway.http.context import CLIENT, CLIENT_REQUEST_ID, MAX_CLIENT_REQUEST_ID, REQUEST_ID, Service
from pagewise_gateway.http.conversation import ChatFormats
from pagewise_gateway.http.debug import debug_explain, debug_memory, debug_request
from pagewise_gateway.http.errors import APIError, NotFoundError, UnsupportedEndpointError
from pagewise_gateway.http.intake import AnswerMemory, BodyMemory, Intake
from pagewise_gateway.http.listening import RefusedRequests
from pagewise_gateway.http.loop_turns import LoopTurns
from pagewise_gateway.http.messages_api import count_tokens, create_message, error_response
from pagewise_gateway.http.openapi import OPERATORS, Endpoint, document
from pagewise_gateway.http.params import Limits, check_model
from pagewise_gateway.http.parsing import discard_body
from pagewise_gateway.http.places import PlaceFinder
from pagewise_gateway.http.request_log import about_request, log_request, trace_requests
from pagewise_gateway.http.responses_api import create_response
from pagewise_gateway.http.tokens_api import detokenize, render, tokenize
from pagewise_gateway.http.writing import Deliveries, in_time, known_error, write_if_large
from pagewise_gateway.metrics import CONTENT_TYPE, Metrics
from pagewise_gateway.scheduler_client import SchedulerClient
from pagewise_gateway.structured.grammars import Grammars
from pagewise_gateway.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rf"[\x21-\x7e]{{1,{MAX_CLIENT_REQUEST_ID}}}")

_MAX_PATH = 128
"""Errors cut longer paths in the middle."""

_LARGE_REST = 65_536
"""The connection of a request is closed if the body has so many bytes and was refused unread."""

_LOADING = f"{OPERATORS} Or adapters may not be loaded while the server runs."

_REFUSED = web.AppKey("refused", RefusedRequests)
_OPENAPI = web.AppKey("openapi", bytes)


def create_app(
    scheduler_client: SchedulerClient,
    tokenizer: Tokenizer,
    config: GatewayConfig,
    metrics: Metrics,
    tracing: Tracing | None = None,
    generation: GenerationConfig = GenerationConfig(),  # noqa: B008
) -> web.Application:
    """Return the application that serves HTTP requests. ``tracing``: sends their traces; None: they are not traced.

    It must run with aiohttp's ``handler_cancellation``, so that a client that disconnects aborts its request.

    Raises:
        ConfigError: the API keys cannot be read, or options of conversations contradict each other.
    """
    app = web.Application(middlewares=_middlewares(config, metrics, tracing), client_max_size=config.max_body_bytes)
    limits = Limits(
        config.served_model_name or config.model,
        config.max_n,
        config.model,
        scheduler_client.adapters,
        max_adapter_rank(config),
        adapter_rights(config).updating,
    )
    memory = BodyMemory(config.max_body_memory, config.max_body_bytes, metrics)
    answers = AnswerMemory(config.max_answer_memory, metrics)
    formats = ChatFormats(config, tokenizer)
    app[Service.KEY] = Service(
        scheduler_client,
        tokenizer,
        metrics,
        limits,
        formats,
        config.write_timeout,
        body_memory=memory,
        answer_memory=answers,
        turns=LoopTurns(),
        grammars=Grammars(),
        places=PlaceFinder(tokenizer, formats.template_kwargs),
        generation=generation,
        keep_alive=config.sse_keep_alive_interval,
        always_usage=config.enable_force_include_usage,
    )
    # Making it takes milliseconds, so it is made here and not for each request.
    app[_OPENAPI] = msgspec.json.encode(
        document(ENDPOINTS, package_version(), limits, config.max_body_bytes, memory, answers)
    )
    app[_REFUSED] = RefusedRequests()
    app[Deliveries.KEY] = Deliveries()
    app.on_cleanup.append(_close)
    app.add_routes([endpoint.route for endpoint in ENDPOINTS])
    app.router.add_post("/v1/embeddings", refuse_embeddings)
    if config.console:
        add_console(app, Feeds(scheduler_client, metrics, tokenizer), shows_text=config.console_shows_text)
    return app


def _middlewares(config: GatewayConfig, metrics: Metrics, tracing: Tracing | None) -> list[Middleware]:
    recording: list[Middleware] = []  # the outermost first
    if tracing is not None:
        recording.append(trace_requests(tracing, config.served_model_name or config.model))
    if config.log_requests:
        recording.append(log_request)
    return [*recording, _shape_errors, access_check(config, metrics)]


async def _close(app: web.Application) -> None:
    app[Service.KEY].tokenizer.close()
    app[Service.KEY].grammars.close()


@web.middleware
async def _shape_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give every request an id, and every error the shape of its API. Write large responses.

    A request counts against the limits of its API key until its response is written. The memory for its body is
    released before, so that a slow reader does not hold it. If a body was refused before its end, the rest is discarded
    after the response, and the connection stays open only if the rest is small.

    The X-Request-Id of a client is returned to it; the log and the id of the response use our own id.
    """
    sent = request.headers.get("X-Request-Id", "")
    request[REQUEST_ID] = uuid.uuid4().hex
    request[CLIENT_REQUEST_ID] = sent if _REQUEST_ID.fullmatch(sent) else request[REQUEST_ID]
    metrics = request.app[Service.KEY].metrics
    metrics.http_requests_in_progress.inc()
    try:
        response = await _shaped(request, handler)
        if (intake := request.get(Intake.KEY)) is not None:
            intake.memory.release()
        await _write(request, response)
        unread = not request.content.is_eof()
    except ConnectionError:
        # The client is gone, so it reads no response. If this was raised, aiohttp would log it as an internal error.
        log.debug("request %s: the client is gone", request[REQUEST_ID], extra=about_request(request))
        response, unread = web.Response(status=499), False
    finally:
        metrics.http_requests_in_progress.dec()
        if (intake := request.get(Intake.KEY)) is not None:
            intake.close()
    if response.status >= 400:
        request.app[_REFUSED].add()
        if response.status < 499 and (client := request.get(CLIENT)) is not None and client.name:
            metrics.key_client_errors(client.name).inc()
    if unread:
        await discard_body(request)
    return response


async def _write(request: web.Request, response: web.StreamResponse) -> None:
    """Write a response here that aiohttp would write too late or without a time limit: a large response, or a response
    to a request whose body has not been read.

    Raises:
        ConnectionError: as in ``in_time``.
    """
    unread = not request.content.is_eof()
    if not response.prepared:
        response.headers.update(Service.headers(request))
        # If this gateway stops, the client's next request should go to another gateway on this port.
        if request.app[Service.KEY].scheduler_client.closing or (
            unread and (request.content_length or _LARGE_REST) >= _LARGE_REST
        ):
            response.force_close()
        await write_if_large(request, response)
    if unread:
        await response.prepare(request)
        await in_time(request, response.write_eof())


async def _shaped(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return the handler's response, or one for its error.

    Raises:
        ConnectionError: the client is gone.
    """
    try:
        return await handler(request)
    except web.HTTPException as error:
        response = error_response(request, _not_handled(request, error))
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        error.__traceback__ = None  # breaks a cycle: its frames refer to the error
    except ConnectionError:
        raise
    except Exception as error:
        response = error_response(request, known_error(error, request))
        # They refer to frames, which refer to the body: without this, the body would wait for the garbage collector.
        error.__traceback__ = error.__context__ = None
    return response


def _not_handled(request: web.Request, error: web.HTTPException) -> APIError:
    """Return the error for a request that no handler takes. For an unknown path it lists the endpoints."""
    asked = errors.shortened(f"{request.method} {request.path}", _MAX_PATH)
    if error.status != 404:
        return errors.from_http_exception(error, asked)
    endpoints = ", ".join(
        f"{route.method} {route.resource.canonical}"
        for route in request.app.router.routes()
        if route.resource is not None and route.method != hdrs.METH_HEAD and route.handler not in _UNLISTED
    )
    return NotFoundError(f"{asked}: there is no such endpoint; there are {endpoints}")


async def refuse_embeddings(_: web.Request) -> web.Response:
    """Refuse a request for embeddings with a clearer error than that of an unknown path."""
    raise UnsupportedEndpointError(
        "/v1/embeddings is not supported by Pagewise: it serves models that generate text, and has no pooling"
    )


async def health(request: web.Request) -> web.Response:
    """200 if the scheduler answers and an executor is ready, else 503.

    It is 503 too while this gateway stops. The status in the body is "degraded" if requests are served, but another
    process of the server keeps failing.
    """
    scheduler_client = request.app[Service.KEY].scheduler_client
    answers, ready = scheduler_client.answers, scheduler_client.ready_executors
    problems = scheduler_client.problems
    served = "degraded" if problems else "ok"
    status = served if ready else "no executor is ready" if answers else "no scheduler answers"
    if scheduler_client.closing:
        status = "the gateway is shutting down"
    return _json(responses.Health(status, ready, answers, list(problems)), 200 if status == served else 503)


async def version(_: web.Request) -> web.Response:
    """The version of this service."""
    return _json(responses.Version(package_version()))


async def render_metrics(request: web.Request) -> web.Response:
    """Prometheus metrics of all processes."""
    check_operator(request, "/metrics shows", ", or start the gateways with --public-metrics")
    body = await request.app[Service.KEY].scheduler_client.queries.report("metrics")
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


async def openapi(request: web.Request) -> web.Response:
    """This document."""
    return web.Response(body=request.app[_OPENAPI], content_type="application/json")


async def list_models(request: web.Request) -> web.Response:
    """The model that is served, and its adapters."""
    adapters = request.app[Service.KEY].scheduler_client.adapters.all()
    return _json(responses.ModelList([_model(request, each) for each in (None, *adapters)]))


async def get_model(request: web.Request) -> web.Response:
    """The model, or an adapter, by its name."""
    return _json(_model(request, check_model(request.match_info["model"], request.app[Service.KEY].limits)))


def _model(request: web.Request, adapter: Adapter | None) -> responses.Model:
    """Describe an adapter, or the model. Only operators learn their folders."""
    service, operator = request.app[Service.KEY], request[CLIENT].operator
    limits, longest, defaults = service.limits, service.max_model_len, service.generation.defaults
    shown = defaults, service.formats.tool_parser, service.formats.reasoning_parser
    if adapter is None:
        root = limits.root if operator else limits.model_name
        return responses.Model(limits.model_name, _STARTED, longest, root, *shown)
    root = adapter.path if operator else adapter.name
    return responses.Model(adapter.name, adapter.created, longest, root, *shown, limits.model_name)


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


ENDPOINTS = (
    Endpoint(
        "/v1/completions",
        create_completion,
        responses.CompletionResponse,
        schema.CompletionRequest,
        responses.CompletionResponse,
    ),
    Endpoint(
        "/v1/chat/completions", create_chat_completion, responses.ChatResponse, schema.ChatRequest, responses.ChatChunk
    ),
    Endpoint("/v1/chat/completions/render", render, responses.RenderResponse, schema.ChatRequest),
    Endpoint("/v1/responses", create_response, items.Response, items.ResponsesRequest, items.ResponseEvent),
    Endpoint("/v1/messages", create_message, messages.Message, messages.MessagesRequest, messages.MessageEvent),
    Endpoint("/v1/messages/count_tokens", count_tokens, messages.TokenCount, messages.CountRequest),
    Endpoint("/v1/cache/advice", give_advice, AdviceAnswer, AdviceRequest),
    Endpoint("/v1/models", list_models, responses.ModelList),
    Endpoint("/v1/models/{model:.+}", get_model, responses.Model),
    Endpoint("/v1/load_lora_adapter", load_adapter, str, LoadAdapterRequest, forbidden=_LOADING),
    Endpoint("/v1/unload_lora_adapter", unload_adapter, str, UnloadAdapterRequest, forbidden=_LOADING),
    Endpoint("/tokenize", tokenize, responses.TokenizeResponse, schema.TokenizeRequest),
    Endpoint("/detokenize", detokenize, responses.DetokenizeResponse, schema.DetokenizeRequest),
    Endpoint("/health", health, responses.Health),
    Endpoint("/version", version, responses.Version),
    Endpoint("/metrics", render_metrics, str, forbidden=OPERATORS),
    Endpoint("/debug/memory", debug_memory, forbidden=OPERATORS),
    Endpoint("/debug/cache", debug_cache, CacheReport, forbidden=OPERATORS),
    Endpoint("/reset_prefix_cache", reset_prefix_cache, CacheReset, ResetCacheRequest, forbidden=OPERATORS),
    Endpoint("/debug/requests/{request_id:.+}", debug_request),
    Endpoint("/debug/explain/{request_id:.+}", debug_explain),
    Endpoint("/openapi.json", openapi),
)
"""The endpoints of every gateway, without the calls of the console's page."""

_UNLISTED = {refuse_embeddings, *CONSOLE_HANDLERS}
"""Handlers that errors do not list among the endpoints: refusals, and the calls of the console's page."""

_STARTED = int(time.time())
