"""The Prometheus metrics of a gateway: HTTP, and latencies as clients see them.

The scheduler has all other metrics. Gateways send theirs to it once per second; it adds them up and exposes them beside
its own, so a name of a metric belongs to one of the two. A metric that vLLM has too is called as there, with the prefix
``pagewise_``.
"""

from collections.abc import Sequence
from typing import Literal, get_args

from pagewise_shared.protocol import MetricFamily, MetricSample
from pagewise_shared.tracing import TRACE_SPANS, Outcome
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from pagewise_gateway.collectors import ProcessMetrics, TokenHistogram

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""Content type of the text in which the scheduler renders the metrics of all processes."""

Drop = Literal["undecodable", "stale_epoch", "impossible"]
"""Why a frame from the scheduler was dropped."""

Refusal = Literal[
    "no_scheduler",
    "no_executor",
    "shutting_down",
    "body_memory",
    "key_body_memory",
    "answer_memory",
    "key_answer_memory",
    "key_unread",
]
"""Why a gateway refuses requests itself: before the scheduler is asked, or although it has accepted them."""

GrammarKind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag", "tool_calls"]
"""What a request for structured output asks for."""

LeftOutTool = Literal["web_search", "image_generation", "tool_search", "namespace", "custom", "function"]
"""The types of tools that are left out of requests; functions are if the chat template never writes them."""

# Creation times would double the number of series.
disable_created_metrics()  # type: ignore[no-untyped-call]

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_INTER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_SHORT = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_REQUEST = (0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class Metrics:
    """All metrics of one gateway, in a registry of their own.

    The attributes are bound to their labels already, so that ``set``, ``inc`` and ``observe`` take about a microsecond.
    They may be called from any thread. Times are in seconds.
    """

    def __init__(self, model_name: str, gateway: str = "") -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._bind_http()
        self._bind_latencies()
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self.repeated_tokens = self._counter(
            "repeated_tokens",
            "Prompt tokens of texts that earlier prompts of the same cache salt contain too, behind other prefixes, so "
            "that prefix caching does not reach them: what declaring them as segments would save, at least.",
        )
        self.unsearched_tokens = self._counter(
            "unsearched_tokens", "Prompt tokens in which no such texts were looked for, because too many waited."
        )
        self._request_success = self._raw_counter(
            "request_success", "Sequences that ended, by reason.", ("finished_reason",)
        )
        for reason in ("stop", "length", "abort", "error"):
            self.request_success(reason)
        self._trace_spans = self._raw_counter("gateway_trace_spans", TRACE_SPANS, ("outcome",))
        for outcome in get_args(Outcome):
            self.trace_spans(outcome)
        self._frames_dropped = self._raw_counter(
            "gateway_frames_dropped", "Frames from the scheduler that were dropped, by reason.", ("reason",)
        )
        for drop in get_args(Drop):
            self.frames_dropped(drop)
        self._requests_refused = self._raw_counter(
            "gateway_requests_refused",
            "Requests that a gateway refused, and not the scheduler.",
            ("reason",),
        )
        for refusal in get_args(Refusal):
            self.requests_refused(refusal)
        self._structured_requests = self._raw_counter(
            "structured_requests", "Requests for structured output whose grammars were taken, by kind.", ("kind",)
        )
        for kind in get_args(GrammarKind):
            self.structured_requests(kind)
        self._requests_without_tools = self._raw_counter(
            "requests_without_tools", "Requests of which tools were left out, by their type.", ("type",)
        )
        for left_out in get_args(LeftOutTool):
            self.requests_without_tools(left_out)
        self.grammar_check_seconds = self._histogram(
            "grammar_check_seconds", "Time in which the grammar of a request was made and checked.", _SHORT
        )
        self.rejoins = self._counter("gateway_rejoins", "Times a gateway had to join the scheduler again.")
        self.registry.register(ProcessMetrics(model_name, gateway))

    def request_success(self, finished_reason: str) -> Counter:
        """The counter of sequences that ended with this finish reason (stop, length, abort, error)."""
        return self._request_success.labels(self._model_name, finished_reason)

    def trace_spans(self, outcome: Outcome) -> Counter:
        """The counter of spans by what became of them."""
        return self._trace_spans.labels(self._model_name, outcome)

    def frames_dropped(self, reason: Drop) -> Counter:
        """The counter of frames from the scheduler that were dropped for this reason."""
        return self._frames_dropped.labels(self._model_name, reason)

    def requests_refused(self, reason: Refusal) -> Counter:
        """The counter of requests that this gateway refused for this reason."""
        return self._requests_refused.labels(self._model_name, reason)

    def structured_requests(self, kind: GrammarKind) -> Counter:
        """The counter of requests with a grammar of this kind."""
        return self._structured_requests.labels(self._model_name, kind)

    def requests_without_tools(self, kind: LeftOutTool) -> Counter:
        """The counter of requests of which tools of this type were left out."""
        return self._requests_without_tools.labels(self._model_name, kind)

    def key_client_errors(self, key: str) -> Counter:
        """The counter of requests of an API key that were answered with a status from 400 to 498."""
        return self._key_client_errors.labels(self._model_name, key)

    def key_reloads(self, outcome: str) -> Counter:
        """The counter of times that the file of API keys was read again: outcome is "done" or "failed"."""
        return self._key_reloads.labels(self._model_name, outcome)

    def certificate_reloads(self, outcome: str) -> Counter:
        """The counter of times that the TLS certificate was read again: outcome is "done" or "failed"."""
        return self._certificate_reloads.labels(self._model_name, outcome)

    def snapshot(self) -> tuple[MetricFamily, ...]:
        """Return the current values of all metrics. Counters count from the start of the process."""
        return tuple(
            MetricFamily(
                family.name,
                family.documentation,
                family.type,
                tuple(MetricSample(one.name, tuple(one.labels.items()), float(one.value)) for one in family.samples),
            )
            for family in self.registry.collect()
        )

    def _bind_http(self) -> None:
        self.http_requests_in_progress = self._gauge("http_requests_in_progress", "HTTP requests being answered.")
        self.http_connections = self._gauge("http_connections", "Connections of clients.")
        self.http_body_bytes = self._gauge(
            "http_body_bytes", "Bytes of HTTP request bodies that are being read, parsed or tokenized."
        )
        self.http_answer_bytes = self._gauge(
            "http_answer_bytes", "Bytes of answers that are being collected or written, beyond 64 KiB of each."
        )
        self.http_connections_refused = self._counter(
            "http_connections_refused", "Connections refused because of --max-connections."
        )
        self.unauthorized = self._counter("http_unauthorized", "HTTP requests without a valid API key.")
        self.slow_readers = self._counter("http_slow_readers", "Responses ended because their client stopped reading.")
        self.consoles_open = self._gauge("consoles_open", "Consoles that are open.")
        self.console_frames_dropped = self._counter(
            "console_frames_dropped", "Frames for consoles that were dropped because their clients read slowly."
        )
        self._key_reloads = self._raw_counter(
            "key_reloads", "Times the file of API keys was read again, by outcome.", ("outcome",)
        )
        self._key_client_errors = self._raw_counter(
            "key_client_errors",
            "Requests that were the client's error (4xx), by name of the API key.",
            ("key",),
        )
        self._certificate_reloads = self._raw_counter(
            "certificate_reloads", "Times the TLS certificate was read again, by outcome.", ("outcome",)
        )
        for outcome in ("done", "failed"):
            self.key_reloads(outcome)
            self.certificate_reloads(outcome)

    def _bind_latencies(self) -> None:
        self.time_to_first_token_seconds = self._histogram(
            "time_to_first_token_seconds", "Time from a request's arrival to its first token.", _FIRST_TOKEN
        )
        self.inter_token_latency_seconds = TokenHistogram(
            "pagewise_inter_token_latency_seconds",
            "Time between two tokens of one sequence.",
            _INTER_TOKEN,
            self._model_name,
        )
        self.registry.register(self.inter_token_latency_seconds)
        self.e2e_request_latency_seconds = self._histogram(
            "e2e_request_latency_seconds", "Time from a request's arrival to its end.", _REQUEST
        )
        self.request_queue_time_seconds = self._histogram(
            "request_queue_time_seconds", "Time from a request's arrival to its first step.", _REQUEST
        )
        self.request_prefill_time_seconds = self._histogram(
            "request_prefill_time_seconds", "Time from a request's first step to its first token.", _REQUEST
        )
        self.request_decode_time_seconds = self._histogram(
            "request_decode_time_seconds", "Time from a request's first token to its end.", _REQUEST
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge("pagewise_" + name, text, ("model_name",), registry=self.registry)
        return gauge.labels(self._model_name)

    def _counter(self, name: str, text: str) -> Counter:
        return self._raw_counter(name, text).labels(self._model_name)

    def _raw_counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter("pagewise_" + name, text, ("model_name", *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram("pagewise_" + name, text, ("model_name",), buckets=tuple(buckets), registry=self.registry)
        return histogram.labels(self._model_name)
