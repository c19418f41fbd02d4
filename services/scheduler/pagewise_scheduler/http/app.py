"""The aiohttp application: routes, errors, and the endpoints that are not generations."""

import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web
from pagewise_shared.config import SchedulerConfig

from pagewise_scheduler.generation import Gateway
from pagewise_scheduler.http.chat import create_chat_completion, render
from pagewise_scheduler.http.completions import create_completion
from pagewise_scheduler.http.context import Service
from pagewise_scheduler.http.errors import APIError, HTTPProblem, InvalidRequest
from pagewise_scheduler.http.openapi import document
from pagewise_scheduler.http.params import Limits, check_model, read_body
from pagewise_scheduler.http.schema import DetokenizeRequest, TokenizeRequest
from pagewise_scheduler.metrics import CONTENT_TYPE, Metrics, package_version
from pagewise_scheduler.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

SLOW_READER_SECONDS = 30.0
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def create_app(
    gateway: Gateway,
    tokenizer: Tokenizer,
    config: SchedulerConfig,
    metrics: Metrics,
    *,
    slow_reader_seconds: float = SLOW_READER_SECONDS,
) -> web.Application:
    """The HTTP surface over ``gateway``. Run it with ``handler_cancellation``: a disconnect must abort its request."""
    app = web.Application(middlewares=[_shape_errors], client_max_size=config.max_body_bytes)
    limits = Limits(config.served_model_name or config.model, config.max_n)
    app[Service.KEY] = Service(gateway, tokenizer, metrics, limits, slow_reader_seconds)
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
            web.get("/openapi.json", openapi),
        ]
    )
    return app


@web.middleware
async def _shape_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give every request an id, and every error OpenAI's shape. A client's own id comes back but names nothing."""
    sent = request.headers.get("X-Request-Id", "")
    request["request_id"] = uuid.uuid4().hex
    request["client_request_id"] = sent if _REQUEST_ID.fullmatch(sent) else request["request_id"]
    try:
        response = await handler(request)
    except APIError as error:
        response = error.response()
    except web.HTTPRequestEntityTooLarge as error:
        response = HTTPProblem(413, f"the body is too large: {error.text}").response()
    except web.HTTPException as error:
        response = HTTPProblem(error.status, f"{request.method} {request.path}: {error.reason}").response()
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
    except ConnectionError:
        raise
    except Exception:
        log.exception("request %s failed", request["request_id"])
        response = APIError(f"internal error; the log has more under {request['request_id']}").response()
    if not response.prepared:
        response.headers.update(Service.headers(request))
    return response


async def health(request: web.Request) -> web.Response:
    """200 once an executor is ready, else 503."""
    capacity = request.app[Service.KEY].gateway.capacity()
    ready = capacity.ready_executors if capacity else 0
    status = "ok" if ready else "no executor is ready"
    return _json({"status": status, "executors": ready}, 200 if ready else 503)


async def version(_: web.Request) -> web.Response:
    """The version of this service."""
    return _json({"version": package_version()})


async def render_metrics(request: web.Request) -> web.Response:
    """Prometheus metrics."""
    body = request.app[Service.KEY].metrics.render()
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


async def openapi(request: web.Request) -> web.Response:
    """This surface as an OpenAPI document."""
    return _json(document(package_version(), request.app[Service.KEY].limits.model_name))


async def list_models(request: web.Request) -> web.Response:
    """The one model that is served."""
    return _json({"object": "list", "data": [_model(request.app[Service.KEY])]})


async def get_model(request: web.Request) -> web.Response:
    """The model by its name."""
    service = request.app[Service.KEY]
    check_model(request.match_info["model"], service.limits)
    return _json(_model(service))


async def tokenize(request: web.Request) -> web.Response:
    """Tokens of a prompt or of messages."""
    service = request.app[Service.KEY]
    body = await read_body(request, TokenizeRequest)
    check_model(body.model, service.limits)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give a prompt or messages", param="prompt")
    if body.messages is not None:
        tokens = await service.encode(render(service, body), bool(body.add_special_tokens))
    else:
        tokens = await service.encode(body.prompt or "", body.add_special_tokens is not False)
    capacity = service.gateway.capacity()
    answer: dict[str, object] = {
        "count": len(tokens),
        "max_model_len": capacity.max_model_len if capacity else None,
        "tokens": list(tokens),
    }
    if body.return_token_strs:
        answer["token_strs"] = [service.tokenizer.token_text(token) for token in tokens]
    return _json(answer)


async def detokenize(request: web.Request) -> web.Response:
    """Text of tokens, special tokens included."""
    service = request.app[Service.KEY]
    body = await read_body(request, DetokenizeRequest)
    check_model(body.model, service.limits)
    for token in body.tokens:
        if token >= service.tokenizer.vocab_size:
            raise InvalidRequest(f"tokens: {token} is outside the vocabulary", param="tokens")
    return _json({"prompt": service.tokenizer.decode(body.tokens, skip_special_tokens=False)})


def _model(service: Service) -> dict[str, object]:
    capacity = service.gateway.capacity()
    return {
        "id": service.limits.model_name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "pagewise",
        "max_model_len": capacity.max_model_len if capacity else None,
    }


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


_STARTED = int(time.time())
