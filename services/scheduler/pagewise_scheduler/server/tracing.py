"""The scheduler's part of a request's trace, made from the facts about the request when it has ended.

Executors send no traces. Their work for a request is known here, also if they die in it: so the span of an executor is
made here, under the executor's name.
"""

import logging
import traceback
from math import isnan

from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode
from pagewise_shared.logs import BoundedLog
from pagewise_shared.reports import Event
from pagewise_shared.tracing import Attributes, Tracing, child_context, wall_ns

from pagewise_scheduler.core.request_report import request_events
from pagewise_scheduler.server.client_request import ClientRequest

log = logging.getLogger(__name__)

_MOST_SEQUENCES = 8
"""Sequences of a request whose recoveries and preemptions a trace has."""


class RequestTraces:
    """Makes the spans of requests whose gateways trace them."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._complaints = BoundedLog(log)

    def ended(self, live: ClientRequest, now: float) -> None:
        """Make the spans of one prompt, whose sequences are still there. The request ends even if that fails.

        ``now``: seconds of ``clock``.
        """
        try:
            self._make(live, now)
        except Exception:
            self._complaints.warning("spans could not be made: %s", traceback.format_exc())

    def _make(self, request: ClientRequest, now: float) -> None:
        """Make the spans of one prompt.

        ``llm_request`` is a child of the gateway's span. Its children are ``queue``, ``recovery``, ``prefill``,
        ``decode``, and one ``executor`` for each executor that it was placed on; preemptions and moves are its events.
        """
        tracing = self._tracing
        whole = tracing.begin(
            "llm_request",
            tracing.parent({"traceparent": request.traceparent}),
            request.arrived,
            server=True,
            attributes=_attributes(request, now),
        )
        if not whole.is_recording():
            return
        here = child_context(whole)
        scheduled = now if isnan(request.scheduled_time) else request.scheduled_time
        first = now if isnan(request.first_token_time) else request.first_token_time
        tracing.span("queue", here, request.arrived, scheduled)
        if scheduled < now:
            tracing.span(
                "prefill", here, scheduled, first, {"gen_ai.usage.input_tokens": len(request.prompt_token_ids)}
            )
        if first < now:
            tracing.span("decode", here, first, now, {"gen_ai.usage.output_tokens": request.num_generated_tokens})
        events = [one for one in request_events(request) if one.sequence < _MOST_SEQUENCES]
        self._trace_recoveries(request, events, here, now)
        self._trace_executors(request, here, now)
        _add_events(whole, request, events)
        if request.failure:
            whole.set_status(Status(StatusCode.ERROR, request.failure))
        whole.end(wall_ns(now))

    def _trace_recoveries(self, request: ClientRequest, events: list[Event], here: Context, now: float) -> None:
        for event in (one for one in events if one.method not in (None, "device")):
            began = request.arrival_time + event.at
            ended = now if event.seconds is None else began + event.seconds
            self._tracing.span("recovery", here, began, ended, _recovery(event))

    def _trace_executors(self, request: ClientRequest, here: Context, now: float) -> None:
        for index, (began, executor_id) in enumerate(request.executors):
            ended = request.executors[index + 1][0] if index + 1 < len(request.executors) else now
            attributes = {"pagewise.executor.id": executor_id, "pagewise.reported_by": "scheduler"}
            tracer = self._tracing.tracer("pagewise-executor", executor_id)
            self._tracing.span("executor", here, began, ended, attributes, tracer)


def _attributes(request: ClientRequest, now: float) -> Attributes:
    sampling = request.params.sampling
    found: dict[str, str | bool | int | float | tuple[str, ...]] = {
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.n": request.params.n,
        "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
        "gen_ai.usage.output_tokens": request.num_generated_tokens,
        "gen_ai.usage.cache_read.input_tokens": request.num_cached_tokens,
        # The names that vLLM gives to the same.
        "gen_ai.usage.prompt_tokens": len(request.prompt_token_ids),
        "gen_ai.usage.completion_tokens": request.num_generated_tokens,
        "gen_ai.usage.num_sequences": request.params.num_sequences,
        "gen_ai.latency.e2e": now - request.arrival_time,
        "pagewise.priority": request.params.priority,
        "pagewise.preemptions": sum(sequence.num_preemptions for sequence in request.sequences),
        "pagewise.moves": max(0, len(request.executors) - 1),
    }
    reasons = tuple(sequence.finish_reason or "abort" for sequence in request.sequences)
    if reasons := ("error",) if request.failure else reasons:
        found["gen_ai.response.finish_reasons"] = reasons
    for source, tokens in request.loaded_tokens.items():
        found[f"pagewise.cached_tokens.{source}"] = tokens
    scheduled, first = request.scheduled_time, request.first_token_time
    if not isnan(scheduled):
        found["gen_ai.latency.time_in_queue"] = scheduled - request.arrival_time
        found["gen_ai.latency.time_in_model_inference"] = now - scheduled
    if not isnan(first):
        found["gen_ai.latency.time_to_first_token"] = first - request.arrival_time
        found["gen_ai.latency.time_in_model_decode"] = now - first
        if not isnan(scheduled):
            found["gen_ai.latency.time_in_model_prefill"] = first - scheduled
    return found


def _recovery(event: Event) -> Attributes:
    """How KV was recovered that was not on the device."""
    return {
        "pagewise.recovery.method": event.method or "",
        "pagewise.recovery.source": event.source or "",
        "pagewise.recovery.resumed": event.kind == "resumed",
        "pagewise.recovery.device_tokens": event.device_tokens,
        "pagewise.recovery.loaded_tokens": event.loaded_tokens,
        "pagewise.recovery.predicted_seconds": event.predicted_seconds.get(event.method or "", 0.0),
        "pagewise.recovery.complete": event.seconds is not None,
        "pagewise.sequence": event.sequence,
    }


def _add_events(span: Span, request: ClientRequest, events: list[Event]) -> None:
    for event in events:
        attributes: dict[str, str | int] = {"pagewise.sequence": event.sequence}
        if event.reason is not None:
            attributes |= {"reason": event.reason, "blocks": event.blocks, "freed_blocks": event.freed}
        else:
            attributes["device_tokens"] = event.device_tokens
        name = "preempted" if event.reason is not None else event.kind
        span.add_event(name, attributes, wall_ns(request.arrival_time + event.at))
    for (_, left), (when, taken) in zip(request.executors, request.executors[1:], strict=False):
        span.add_event("moved", {"from": left, "to": taken}, wall_ns(when))
