"""Traces of requests, which a background thread sends to an OpenTelemetry collector (OTLP over HTTP).

OpenTelemetry is imported only if there is an endpoint: without one, a service has no ``Tracing``. A span is made after
its end, from times that are recorded anyway, so that requests are not slowed down.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit, urlunsplit

from pagewise_shared.errors import ConfigError
from pagewise_shared.version import package_version

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

Outcome = Literal["sent", "dropped", "failed"]
"""The outcome of a span: the collector accepted it, the queue was full, or the collector did not accept it."""

TRACE_SPANS = (
    "Spans of traces, by outcome; dropped: too many waited to be sent, failed: the collector did not take them."
)
"""The help text of the metric that counts spans, of the scheduler and of gateways."""

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]

_PATH = "/v1/traces"
_MOST_QUEUED = 2048
_BATCH = 128
"""Spans of one export. Exports share Python's lock with the event loop, so they have to be short."""
_CLOSE_SECONDS = 2.0
_MOST_SERVICES = 64


def open_tracing(
    endpoint: str | None, service: str, instance: str, count: Callable[[Outcome, int], None]
) -> "Tracing | None":
    """Return the tracing of a service; None if there is no ``endpoint``.

    ``count``: called, from any thread, with the outcome of a number of spans.

    Raises:
        ConfigError: OpenTelemetry is not installed, or one of its variables has an invalid value.
    """
    if endpoint is None:
        return None
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry, and {error.name} is not installed: pip install "
            "'pagewise[otel]'"
        ) from None
    return Tracing(endpoint, service, instance, count)


def traces_url(endpoint: str) -> str:
    """Return the URL for posting spans: ``endpoint`` with the path of OTLP, unless it has a path."""
    parts = urlsplit(endpoint)
    return urlunsplit(parts._replace(path=_PATH)) if parts.path in ("", "/") else endpoint


class Tracing:
    """Makes the spans of one service, and hands them to the thread that sends them.

    The SDK's variables ``OTEL_*`` apply: the sampler, resource attributes, headers, timeouts, sizes of batches.
    """

    def __init__(self, endpoint: str, service: str, instance: str, count: Callable[[Outcome, int], None]) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._processor, self._exporter = _counting_processor(OTLPSpanExporter(traces_url(endpoint)), count)
        self._propagator = TraceContextTextMapPropagator()
        self.tracer = lru_cache(_MOST_SERVICES)(self._make_tracer)
        self._own = self.tracer(service, instance)

    def _make_tracer(self, service: str, instance: str) -> "Tracer":
        """Return a tracer for the spans of a service, which may be another one than this one."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        version = package_version()
        resource = Resource.create(
            {"service.name": service, "service.instance.id": instance, "service.version": version}
        )
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        return provider.get_tracer("pagewise", version)

    def parent(self, headers: Mapping[str, str]) -> "Context":
        """Return the context of a ``traceparent`` and a ``tracestate``; an empty one if they are invalid."""
        from opentelemetry.context import Context

        return self._propagator.extract(headers, Context())

    def begin(
        self,
        name: str,
        parent: "Context",
        began: float,
        *,
        server: bool = False,
        attributes: Attributes | None = None,
        tracer: "Tracer | None" = None,
    ) -> "Span":
        """Begin a span at ``began``, in seconds of the monotonic clock. ``server``: it handles a request of another
        process."""
        from opentelemetry.trace import SpanKind

        return (tracer or self._own).start_span(
            name,
            parent,
            SpanKind.SERVER if server else SpanKind.INTERNAL,
            attributes,
            start_time=wall_ns(began),
        )

    def span(
        self,
        name: str,
        parent: "Context",
        began: float,
        ended: float,
        attributes: Attributes | None = None,
        tracer: "Tracer | None" = None,
    ) -> None:
        """Make a whole span from ``began`` to ``ended``, in seconds of the monotonic clock."""
        self.begin(name, parent, began, attributes=attributes, tracer=tracer).end(wall_ns(max(began, ended)))

    def close(self) -> None:
        """Send the remaining spans for two seconds at most; the rest is lost and counts as failed."""
        closing = threading.Thread(target=self._processor.shutdown, name="last traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)
        # The processor would go on to try batch after batch: for minutes, if the collector does not answer.
        self._exporter.shutdown()


def wall_ns(seconds: float) -> int:
    """Return a time of the monotonic clock in nanoseconds of the wall clock."""
    return time.time_ns() - int((time.monotonic() - seconds) * 1e9)


def child_context(span: "Span") -> "Context":
    """Return the context whose parent is ``span``."""
    from opentelemetry.context import Context
    from opentelemetry.trace import set_span_in_context

    return set_span_in_context(span, Context())


def traceparent_of(span: "Span") -> str:
    """Return the ``traceparent`` of a span for another service; "" if it is not sampled."""
    context = span.get_span_context()
    if not context.trace_flags.sampled:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"


def _positive(name: str, default: int) -> int:
    """Return the value of an environment variable; as in OpenTelemetry, an empty one counts as not set.

    Raises:
        ConfigError: it is no positive number.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"{name}={text!r} is no number above 0")
    return int(text)


def _counting_processor(
    exporter: "SpanExporter", count: Callable[[Outcome, int], None]
) -> "tuple[SpanProcessor, SpanExporter]":
    """Return a batch processor that counts the outcomes of spans, and its exporter.

    The processor drops spans while its queue is full. The exporter takes no more spans after its shutdown.
    """
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    most = _positive("OTEL_BSP_MAX_QUEUE_SIZE", _MOST_QUEUED)
    batch = min(most, _positive("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", _BATCH))

    class Exporter(SpanExporter):
        """Counts the spans that the collector took. ``taken``: spans that have left the queue."""

        taken = 0
        closed = threading.Event()

        def export(self, spans: "Sequence[ReadableSpan]") -> SpanExportResult:
            self.taken += len(spans)
            result = SpanExportResult.FAILURE
            try:
                if not self.closed.is_set():
                    result = exporter.export(spans)
            finally:
                count("sent" if result is SpanExportResult.SUCCESS else "failed", len(spans))
            return result

        def shutdown(self) -> None:
            if not self.closed.is_set():
                self.closed.set()
                exporter.shutdown()

    class Processor(BatchSpanProcessor):
        """Drops a span before the queue would push out another, and counts it. Only one thread ends spans."""

        given = 0

        def on_end(self, span: "ReadableSpan") -> None:
            if not (span.context and span.context.trace_flags.sampled):
                return
            if self.given - counted.taken >= most:
                count("dropped", 1)
                return
            self.given += 1
            super().on_end(span)

    counted = Exporter()
    return Processor(counted, max_queue_size=most, max_export_batch_size=batch), counted
