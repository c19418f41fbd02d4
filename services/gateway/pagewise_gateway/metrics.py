"""The Prometheus metrics of a gateway: HTTP, and latencies as clients see them.

The scheduler has all other metrics. Gateways send their metrics to it once per second; it adds them up and exposes them
with its own, so the name of a metric belongs to one of the two. A metric that vLLM has too has vLLM's name, with the
prefix ``pagewise_``.
"""

import resource
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Literal, get_args

from pagewise_shared.protocol import MetricFamily, MetricSample
from pagewise_shared.service_process import num_tasks
from pagewise_shared.tracing import TRACE_SPANS, Outcome
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

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
"""Why a gateway refuses requests itself: before it submits them, or after the scheduler has accepted them."""

GrammarKind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag", "tool_calls"]
"""The kinds of structured output."""

LeftOutTool = Literal["web_search", "image_generation", "tool_search", "namespace", "custom", "function"]
"""The types of tools that are left out of requests. Functions are left out if the chat template never writes them."""

# Creation times would double the number of series.
disable_created_metrics()  # type: ignore[no-untyped-call]

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_INTER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_SHORT = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_REQUEST = (0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class TokenHistogram(Collector):
    """A histogram that is observed with every token, by one thread.

    It has no lock, so that an observation takes a fifth of the time of prometheus_client's histogram.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float], model_name: str) -> None:
        self._name, self._text, self._model_name = name, text, model_name
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Observe ``value`` ``count`` times. Only the event loop may call this."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the metrics for a scrape."""
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        family.add_metric([self._model_name], buckets, self._sum)
        yield family


class ProcessMetrics(Collector):
    """CPU time, memory and tasks of this process. prometheus_client's own have no label for the gateway."""

    def __init__(self, model_name: str, gateway: str) -> None:
        self._model_name, self._gateway = model_name, gateway
        self._page_bytes = resource.getpagesize()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for a scrape."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        seconds = CounterMetricFamily(
            "pagewise_gateway_cpu_seconds", "CPU time of all gateways together.", labels=["model_name"]
        )
        seconds.add_metric([self._model_name], usage.ru_utime + usage.ru_stime)
        yield seconds
        for name, text, value in (
            ("pagewise_gateway_resident_memory_bytes", "Resident memory of a gateway.", self._resident_bytes()),
            ("pagewise_gateway_tasks", "Tasks of a gateway's event loop.", num_tasks()),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["model_name", "gateway"])
            gauge.add_metric([self._model_name, self._gateway], value)
            yield gauge

    def _resident_bytes(self) -> float:
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):  # not Linux: the peak, in kilobytes, replaces the current size
            return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024
        return float(pages * self._page_bytes)


class Metrics:
    """All metrics of one gateway, in a registry of their own.

    The attributes are bound to their labels already, so that ``set``, ``inc`` and ``observe`` take about a microsecond;
    attributes that are functions return the counter of a label's value. They may be called from any thread. Times are
    in seconds.
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
            "that prefix caching does not reach them: declaring them as segments would save at least as many.",
        )
        self.unsearched_tokens = self._counter(
            "unsearched_tokens", "Prompt tokens in which no such texts were looked for, because too many waited."
        )
        self.request_success = self._counters(
            "request_success",
            "Sequences that ended, by reason.",
            "finished_reason",
            ("stop", "length", "abort", "error"),
        )
        self.trace_spans: Callable[[Outcome], Counter] = self._counters(
            "gateway_trace_spans", TRACE_SPANS, "outcome", get_args(Outcome)
        )
        self.frames_dropped: Callable[[Drop], Counter] = self._counters(
            "gateway_frames_dropped",
            "Frames from the scheduler that were dropped, by reason.",
            "reason",
            get_args(Drop),
        )
        self.requests_refused: Callable[[Refusal], Counter] = self._counters(
            "gateway_requests_refused",
            "Requests that a gateway refused, and not the scheduler.",
            "reason",
            get_args(Refusal),
        )
        self.structured_requests: Callable[[GrammarKind], Counter] = self._counters(
            "structured_requests",
            "Requests for structured output whose grammars were taken, by kind.",
            "kind",
            get_args(GrammarKind),
        )
        self.requests_without_tools: Callable[[LeftOutTool], Counter] = self._counters(
            "requests_without_tools",
            "Requests of which tools were left out, by their type.",
            "type",
            get_args(LeftOutTool),
        )
        self.grammar_check_seconds = self._histogram(
            "grammar_check_seconds", "Time in which the grammar of a request was made and checked.", _SHORT
        )
        self.rejoins = self._counter("gateway_rejoins", "Times a gateway had to join the scheduler again.")
        self.registry.register(ProcessMetrics(model_name, gateway))

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
        outcomes = "done", "failed"
        self.key_reloads = self._counters(
            "key_reloads", "Times the file of API keys was read again, by outcome.", "outcome", outcomes
        )
        self.key_client_errors = self._counters(
            "key_client_errors", "Requests that were the client's error (4xx), by name of the API key.", "key"
        )
        self.certificate_reloads = self._counters(
            "certificate_reloads", "Times the TLS certificate was read again, by outcome.", "outcome", outcomes
        )

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
        counter = Counter("pagewise_" + name, text, ("model_name",), registry=self.registry)
        return counter.labels(self._model_name)

    def _counters(self, name: str, text: str, label: str, values: Iterable[str] = ()) -> Callable[[str], Counter]:
        """Bind a counter with a further label, so that ``values`` have series before their first event."""
        counter = Counter("pagewise_" + name, text, ("model_name", label), registry=self.registry)
        for value in values:
            counter.labels(self._model_name, value)
        return lambda value: counter.labels(self._model_name, value)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram("pagewise_" + name, text, ("model_name",), buckets=tuple(buckets), registry=self.registry)
        return histogram.labels(self._model_name)
