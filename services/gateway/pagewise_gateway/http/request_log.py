"""Records of requests: the lines of ``--log-requests``, and the gateway's spans of traces.

Neither contains any of a request's text: only ids, counts, times and sampling parameters. In a line, values that are
not plain words are written as JSON strings and are bounded, because clients choose some of them: no value can end the
line or pass for another field.
"""

import json
import logging
import re
import traceback
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, ClassVar

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from pagewise_shared.logs import BoundedLog, about, printable
from pagewise_shared.tracing import Tracing, child_context, traceparent_of, wall_ns

from pagewise_gateway.http.context import CLIENT, CLIENT_REQUEST_ID, REQUEST_ID
from pagewise_gateway.scheduler_client import LiveRequest

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = logging.getLogger(__name__)

_UNLOGGED = frozenset({"/health", "/version", "/metrics"})
"""Probes request these every few seconds."""
_CLIENT_IS_GONE = 499
_PLAIN = re.compile(r"[A-Za-z0-9._:/{},+-]+")
_PROPAGATED = ("traceparent", "tracestate")
_COMPLETIONS = "/v1/completions"


@dataclass(slots=True, frozen=True)
class Generated:
    """The counts and times of a generation that has ended.

    Fields:
        queue: seconds that the prompt with the shortest wait was queued; None: no prompt has started.
        arrival, first_token: seconds of the monotonic clock. first_token is None if there was no token.
        finish: the finish reason of each output.
    """

    KEY: ClassVar[web.RequestKey["Generated"]] = web.RequestKey("generated")

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue: float | None
    arrival: float
    first_token: float | None
    finish: list[str]

    @classmethod
    def of(cls, live: LiveRequest) -> "Generated":
        """Return the counts and times of a request. To be called before ``LiveRequest.abort``, which drops them."""
        queues = [prompt.queue_seconds for prompt in live.prompts if prompt.queue_seconds is not None]
        firsts = [prompt.first_token_time for prompt in live.prompts if prompt.first_token_time is not None]
        return cls(
            sum(len(prompt.token_ids) for prompt in live.request.prompts),
            live.num_cached_tokens,
            live.num_output_tokens,
            min(queues, default=None),
            live.arrival_time,
            min(firsts, default=None),
            list(live.finish_reasons()),
        )


@web.middleware
async def log_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Log the request when it has been answered, or its client is gone. Only the middleware that traces it may be
    outside of this middleware."""
    began, status = monotonic(), _CLIENT_IS_GONE
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        resource = request.match_info.route.resource
        path = request.path if resource is None else resource.canonical
        if path not in _UNLOGGED:
            _log(request, path, status, monotonic() - began)


def _log(request: web.Request, path: str, status: int, duration: float) -> None:
    ours, sent = request.get(REQUEST_ID, ""), request.get(CLIENT_REQUEST_ID, "")
    client, generated = request.get(CLIENT), request.get(Generated.KEY)
    fields: dict[str, object] = {
        "id": ours,
        "client_id": sent if sent != ours else None,
        "key": client.name if client is not None and client.name else None,
        "endpoint": f"{request.method} {path}",
        "status": status,
    }
    if generated is not None:
        first = generated.first_token
        fields |= {
            "prompt_tokens": generated.prompt_tokens,
            "cached_tokens": generated.cached_tokens,
            "output_tokens": generated.output_tokens,
            "queue": generated.queue,
            "first_token": first - generated.arrival if first is not None else None,
            "finish": ",".join(sorted(set(generated.finish))),
        }
    fields["duration"] = duration
    text = " ".join(f"{name}={_text(value)}" for name, value in fields.items())
    del fields["id"]  # it is the line's request_id
    log.info("request %s", text, extra=about_request(request, message="request ended", **fields))


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    text = printable(str(value), 200)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


class RequestTrace:
    """The trace of one HTTP request that is sampled.

    Fields:
        KEY: the key of a request that holds it. traceparent: of its span, for the scheduler.
        parsed: when the body had been read and checked. submitted: when the generation was submitted. Both are seconds
            of the monotonic clock, or None if that has not happened.
    """

    KEY: ClassVar[web.RequestKey["RequestTrace"]] = web.RequestKey("trace")

    def __init__(self, tracing: Tracing, span: "Span", began: float, model_name: str) -> None:
        self.traceparent = traceparent_of(span)
        self.parsed: float | None = None
        self.submitted: float | None = None
        self._tracing, self._span, self._began, self._model_name = tracing, span, began, model_name
        self._first_token: float | None = None

    def generated(self, live: LiveRequest, generated: Generated) -> None:
        """Add the attributes of the generation, which has ended or is about to be aborted."""
        params, sampling = live.request.params, live.request.params.sampling
        self._first_token = generated.first_token
        model = params.adapter.name if params.adapter is not None else self._model_name
        self._span.set_attributes(
            {
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
                "gen_ai.request.max_tokens": max((prompt.max_tokens for prompt in live.request.prompts), default=0),
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.choice.count": params.n,
                "gen_ai.request.stream": not live.options.whole,
                "gen_ai.response.finish_reasons": generated.finish,
                "gen_ai.usage.input_tokens": generated.prompt_tokens,
                "gen_ai.usage.output_tokens": generated.output_tokens,
                "gen_ai.usage.cache_read.input_tokens": generated.cached_tokens,
                "pagewise.submissions": live.submissions,
            }
        )
        if generated.queue is not None:
            self._span.set_attribute("gen_ai.latency.time_in_queue", generated.queue)
        if self._first_token is not None:
            self._span.set_attribute("gen_ai.latency.time_to_first_token", self._first_token - self._began)

    def end(self, request: web.Request, status: int) -> None:
        """End the span, and make its children: ``read``, ``tokenize``, ``wait`` and ``stream``."""
        now, here = monotonic(), child_context(self._span)
        ends = (("read", self.parsed), ("tokenize", self.submitted), ("wait", self._first_token), ("stream", now))
        began = self._began
        for name, ended in ends if self.parsed is not None and self.submitted is not None else ():
            if ended is None:  # there was no token: it has waited to the end
                self._tracing.span(name, here, began, now)
                break
            self._tracing.span(name, here, began, ended)
            began = ended
        ours, sent = request.get(REQUEST_ID, ""), request.get(CLIENT_REQUEST_ID, "")
        client = request.get(CLIENT)
        self._span.set_attributes(
            {
                "http.response.status_code": status,
                "gen_ai.request.id": ours,
                "gen_ai.latency.e2e": now - self._began,
            }
        )
        if sent != ours:
            self._span.set_attribute("pagewise.client_request_id", sent)
        if client is not None and client.name:
            self._span.set_attribute("pagewise.key", client.name)
        if status >= 500:
            from opentelemetry.trace import StatusCode

            self._span.set_status(StatusCode.ERROR)
        self._span.end(wall_ns(now))


def trace_requests(tracing: Tracing, model_name: str) -> Middleware:
    """Return the middleware that traces POST requests until they are answered, or their clients are gone. It has to be
    the outermost. ``model_name``: the model's name for clients."""
    complaints = BoundedLog(log)

    @web.middleware
    async def trace_request(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method != "POST":
            return await handler(request)
        began, status = monotonic(), _CLIENT_IS_GONE
        parent = tracing.parent({name: request.headers[name] for name in _PROPAGATED if name in request.headers})
        resource = request.match_info.route.resource
        attributes = {
            "http.request.method": request.method,
            "gen_ai.provider.name": "pagewise",
            "gen_ai.operation.name": "text_completion" if request.path == _COMPLETIONS else "chat",
        }
        if resource is not None:  # else the client has chosen the path
            attributes["http.route"] = resource.canonical
        name = " ".join(filter(None, ("POST", attributes.get("http.route"))))
        span = tracing.begin(name, parent, began, server=True, attributes=attributes)
        if not span.is_recording():
            return await handler(request)
        trace = request[RequestTrace.KEY] = RequestTrace(tracing, span, began, model_name)
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            try:
                trace.end(request, status)
            except Exception:  # it is answered, whether there is a trace of it or not
                complaints.warning("spans could not be made: %s", traceback.format_exc())

    return trace_request


def about_request(request: web.Request, **fields: object) -> dict[str, object]:
    """Return the ``extra`` of a log call whose line is about this request, with ``fields``."""
    trace = request.get(RequestTrace.KEY)
    return about(request.get(REQUEST_ID, ""), trace.traceparent if trace is not None else "", **fields)
