"""A collector of traces: it takes OTLP over HTTP, decodes it, and keeps the spans."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass
class SpanReport:
    """One span. Ids are hex, times seconds of the wall clock; ``service``: the process that has made it, or its
    subject."""

    name: str
    service: str
    instance: str
    trace: str
    id: str
    parent: str
    began: float
    ended: float
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    status: int


@dataclass
class Collector:
    """Received spans. ``paths``: of the requests; ``refuses``: it answers with an error, and keeps nothing."""

    url: str = ""
    spans: list[SpanReport] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    bytes: bytes = b""
    refuses: bool = False

    def of_trace(self, trace: str) -> list[SpanReport]:
        return [span for span in self.spans if span.trace == trace]

    def wait(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        """Wait until the condition holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, [(span.service, span.name) for span in self.spans]
            time.sleep(0.05)

    def take(self, body: bytes) -> None:
        self.bytes += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = _values(resource.resource.attributes)
            for scope in resource.scope_spans:
                self.spans += [
                    SpanReport(
                        span.name,
                        about["service.name"],
                        about["service.instance.id"],
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano / 1e9,
                        span.end_time_unix_nano / 1e9,
                        _values(span.attributes),
                        [(event.name, _values(event.attributes)) for event in span.events],
                        span.status.code,
                    )
                    for span in scope.spans
                ]


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.paths.add(self.path)
            if not collector.refuses:
                collector.take(body)
            self.send_response(400 if collector.refuses else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
