"""The gateway's part of a request's trace: the span of the HTTP request, and what it waited for.

Nothing of a request's text is in a trace: only ids, counts, times and sampling parameters.
"""

import logging
import traceback
from time import monotonic
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Handler
from pagewise_shared.logs import BoundedLog, about
from pagewise_shared.tracing import Tracing, child_context, traceparent_of, wall_ns

from pagewise_gateway.http.context import CLIENT, CLIENT_REQUEST_ID, REQUEST_ID
from pagewise_gateway.scheduler_client import LiveRequest

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = logging.getLogger(__name__)

_CLIENT_IS_GONE = 499
_PROPAGATED = ("traceparent", "tracestate")
_COMPLETIONS = "/v1/completions"


class RequestTrace:
    """The trace of one HTTP request that is sampled.

    Fields:
        KEY: where a request has it. traceparent: of its span, for the scheduler.
        parsed: when the body had been read and checked; None: it was not. submitted: when the generation was submitted.
            Seconds of the monotonic clock.
    """

    KEY: web.RequestKey["RequestTrace"]

    def __init__(self, tracing: Tracing, span: "Span", began: float, model_name: str) -> None:
        self.traceparent = traceparent_of(span)
        self.parsed: float | None = None
        self.submitted: float | None = None
        self._tracing, self._span, self._began, self._model_name = tracing, span, began, model_name
        self._first_token: float | None = None

    def generated(self, live: LiveRequest) -> None:
        """Take over what is known of the generation: it has ended, or nobody wants it any more."""
        request, sampling = live.request, live.request.params.sampling
        queues = [prompt.queue_seconds for prompt in live.prompts if prompt.queue_seconds is not None]
        firsts = [prompt.first_token_time for prompt in live.prompts if prompt.first_token_time is not None]
        self._first_token = min(firsts, default=None)
        model = request.params.adapter.name if request.params.adapter is not None else self._model_name
        self._span.set_attributes(
            {
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
                "gen_ai.request.max_tokens": max((prompt.max_tokens for prompt in request.prompts), default=0),
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.choice.count": request.params.n,
                "gen_ai.request.stream": not live.options.whole,
                "gen_ai.response.finish_reasons": live.finish_reasons(),
                "gen_ai.usage.input_tokens": sum(len(prompt.token_ids) for prompt in request.prompts),
                "gen_ai.usage.output_tokens": live.num_output_tokens,
                "gen_ai.usage.cache_read.input_tokens": live.num_cached_tokens,
                "pagewise.submissions": live.submissions,
            }
        )
        if queues:
            self._span.set_attribute("gen_ai.latency.time_in_queue", min(queues))
        if self._first_token is not None:
            self._span.set_attribute("gen_ai.latency.time_to_first_token", self._first_token - self._began)

    def end(self, request: web.Request, status: int) -> None:
        """End the span, and make those of what it waited for: ``read``, ``tokenize``, ``wait`` and ``stream``."""
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


RequestTrace.KEY = web.RequestKey("trace", RequestTrace)


class RequestTraces:
    """Traces what clients ask for by POST. ``model_name``: what they call the model."""

    def __init__(self, tracing: Tracing, model_name: str) -> None:
        self._tracing, self._model_name = tracing, model_name
        self._complaints = BoundedLog(log)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Trace the request until it has been answered, or its client is gone. Others run inside of this middleware."""
        if request.method != "POST":
            return await handler(request)
        began, status = monotonic(), _CLIENT_IS_GONE
        parent = self._tracing.parent({name: request.headers[name] for name in _PROPAGATED if name in request.headers})
        resource = request.match_info.route.resource
        attributes = {
            "http.request.method": request.method,
            "gen_ai.provider.name": "pagewise",
            "gen_ai.operation.name": "text_completion" if request.path == _COMPLETIONS else "chat",
        }
        if resource is not None:  # else the path is whatever a client likes to send
            attributes["http.route"] = resource.canonical
        name = " ".join(filter(None, ("POST", attributes.get("http.route"))))
        span = self._tracing.begin(name, parent, began, server=True, attributes=attributes)
        if not span.is_recording():
            return await handler(request)
        trace = request[RequestTrace.KEY] = RequestTrace(self._tracing, span, began, self._model_name)
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            try:
                trace.end(request, status)
            except Exception:  # it is answered, whether there is a trace of it or not
                self._complaints.warning("spans could not be made: %s", traceback.format_exc())


def about_request(request: web.Request, **fields: object) -> dict[str, object]:
    """Return the ``extra`` of a log call whose line is about this request, with ``fields``."""
    trace = request.get(RequestTrace.KEY)
    return about(request.get(REQUEST_ID, ""), trace.traceparent if trace is not None else "", **fields)
