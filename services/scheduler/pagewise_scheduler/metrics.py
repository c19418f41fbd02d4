"""The Prometheus metrics of the scheduler. Gateways count HTTP requests, and latencies as clients see them.

A metric that vLLM has too has vLLM's name behind the prefix ``pagewise_``, so that dashboards are ported by renaming.
There is one exception: ``iteration_tokens`` has no ``_total``, because that suffix is for counters, and ``promtool
check metrics`` refuses it on a histogram. Values are summed over executors; names of metrics of each one begin with
``executor_``.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Literal, TypeVar, get_args

from pagewise_shared.protocol import POOL_TIERS, SOURCES, GroupKind
from pagewise_shared.tracing import TRACE_SPANS, Outcome
from pagewise_shared.version import package_version
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from pagewise_scheduler.core.memory.counters import MemoryCounters
from pagewise_scheduler.core.routing.policies import REASONS
from pagewise_scheduler.executor_gauges import ExecutorGauges
from pagewise_scheduler.gateway_metrics import GatewayMetrics, Merged
from pagewise_scheduler.key_gauges import KeyGauges

MetricT = TypeVar("MetricT", Counter, Gauge, Histogram)

MEMORY_EVENTS = tuple(MemoryCounters().by_name())
"""The names of the core's ``MemoryCounters``."""

LOWER_TIERS = POOL_TIERS[1:]
"""The names of the tiers below the device."""

REFUSALS = (
    "max_waiting",
    "max_waiting_tokens",
    "max_waiting_share",
    "max_waiting_tokens_share",
    "no_executor",
    "key_concurrent",
    "key_requests_per_minute",
    "key_tokens_per_minute",
)
"""Why a request was not accepted."""

RECOVERIES = (("device", "device"), *product(("load", "recompute", "both"), SOURCES[1:]))
"""How KV is recovered, and from where: the ``method`` and the ``origin`` of the core's ``Recovery``."""

KV_BLOCKS = (*product(("device",), ("free", "cached", "in_use")), *product(LOWER_TIERS, ("free", "cached")))
"""The tiers, and the states of their blocks."""

KV_PAGES = tuple(product(POOL_TIERS, get_args(GroupKind), ("cached", "in_use")))
"""The tiers whose pages groups of layers share, the kinds of groups, and the states of their blocks."""

Drop = Literal[
    "undecodable",
    "unknown_sender",
    "stale_epoch",
    "out_of_step",
    "impossible",
    "bad_inventory",
    "refused",
    "wrong_key",
    "too_many_hellos",
]
"""Why a frame from an executor or a gateway was dropped."""

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""Content type of ``Metrics.render``."""

# The classic text format shows creation times as gauges of their own, which would double the number of series.
disable_created_metrics()  # type: ignore[no-untyped-call]

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_DECISION = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1)
_RATIO = (0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 4, 10)
_RESIDENCY = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800
)  # fmt: skip
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Metrics:
    """All metrics of one scheduler, in a registry of their own, and the metrics of gateways (``gateways``).

    The attributes are bound to their labels already, so that ``set``, ``inc`` and ``observe`` take about a microsecond;
    attributes that are functions return the counter of a label's value. All may be called from any thread. Times are
    in seconds.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.gateways = GatewayMetrics()
        self.model_name = model_name
        self._bind_gauges()
        self._bind_counters()
        self._bind_feature_counters()
        self._bind_histograms()
        self._bind_services()
        self.frames_dropped = self._counters(
            "wire_frames_dropped",
            "Frames from executors and gateways that were dropped, by reason.",
            "reason",
            get_args(Drop),
        )
        self.connections_refused = self._counters(
            "wire_connections_refused",
            "Connections of executors and gateways to the scheduler, or of executors to each other, that were refused, "
            "by reason.",
            "reason",
            ("unknown_key", "handshake", "unknown_key_blocks"),
        )
        self._bind_counters_of_heartbeats()
        self.request_moves = self._counters(
            "request_moves",
            "Requests that continued on another executor: the first one left, was lost, or was for the prompt only "
            "(decode).",
            "reason",
            ("left", "lost", "decode"),
        )
        self.trace_spans = self._counters("scheduler_trace_spans", TRACE_SPANS, "outcome", get_args(Outcome))
        self.requests_without_role = self._counters(
            "requests_without_role",
            "Requests placed while no executor was left for this role.",
            "role",
            ("prefill", "decode"),
        )
        build = Gauge(
            "pagewise_build_info",
            "The version of Pagewise, as a label; always 1.",
            ("version",),
            registry=self.registry,
        )
        build.labels(package_version()).set(1)
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def recovery_seconds(self, method: str, source: str, predicted: float, actual: float) -> None:
        """Observe a recovery that has ended."""
        self._recovery_predicted(method, source).observe(predicted)
        self._recovery_actual(method, source).observe(actual)

    def placement_answered(self, predicted: float, actual: float) -> None:
        """Observe the time from a request's placement to its first token, as predicted and as it was, in seconds."""
        self.placement_actual_ratio.observe(actual / max(predicted, 1e-6))

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format, with the metrics of the gateways."""
        return generate_latest(Merged(self.registry, self.gateways))

    def _bind_services(self) -> None:
        self.service_restarts = self._labelled(
            Counter,
            "service_restarts",
            "How often a process of this server was started again after it had ended.",
            "service",
        )
        self.service_failing = self._labelled(
            Gauge,
            "service_failing",
            "1 for a process of this server that is started again and again and does not become ready, else 0.",
            "service",
        )

    def _bind_gauges(self) -> None:
        self.num_requests_running = self._gauge("num_requests_running", "Sequences in the running batches.")
        self.num_requests_waiting = self._gauge("num_requests_waiting", "Sequences that wait to run.")
        self.num_prompt_tokens_waiting = self._gauge(
            "num_prompt_tokens_waiting", "Prompt tokens of the sequences that wait to run."
        )
        self.num_requests_staying = self._gauge(
            "num_requests_staying",
            "Requests that decode where their prompt was computed, because no decode executor has room for them.",
        )
        self.kv_cache_usage_perc = self._gauge(
            "kv_cache_usage_perc", "Share of the KV blocks that are in use; 1 means all."
        )
        self.kv_blocks = self._labelled(
            Gauge, "kv_blocks", "KV blocks by tier and state; pages if layers have several groups.", "tier", "state"
        )
        for tier, state in KV_BLOCKS:
            self.kv_blocks(tier, state)
        self.kv_blocks_pinned = self._gauge(
            "kv_blocks_pinned", "Pinned KV blocks of the device, or pages; a block counts once for each pin."
        )
        self.kv_pages = self._labelled(
            Gauge,
            "kv_pages",
            "Pages by tier, kind of the group of layers whose blocks take them, and state; 0 if there is one group.",
            *("tier", "kind", "state"),
        )
        for tier, kind, state in KV_PAGES:
            self.kv_pages(tier, kind, state)
        self.executors = ExecutorGauges(self.model_name)
        self.registry.register(self.executors)
        self.key_memory = KeyGauges(self.model_name)
        self.registry.register(self.key_memory)
        self.adapters_resident = self._gauge("lora_adapters_resident", "LoRA adapters in the slots of all executors.")
        self.executors_ready = self._gauge("executors_ready", "Executors that take work.")
        self.scheduler_tasks = self._gauge("scheduler_tasks", "Tasks of the scheduler's event loop.")
        self.gateways_ready = self._gauge("gateways_ready", "Gateways that are connected to the scheduler.")

    def _bind_counters(self) -> None:
        self.prefix_cache_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache."
        )
        self.prefix_cache_hits = self._counter(
            "prefix_cache_hits", "Prompt tokens that were found in the prefix cache on the device."
        )
        self.cached_tokens = self._counters(
            "cached_tokens",
            "Tokens that did not have to be computed again, by the tier that had their KV.",
            "source",
            SOURCES,
        )
        self.block_events = self._counters("kv_block_events", "Events of KV blocks, by kind.", "event", MEMORY_EVENTS)
        self.recoveries = self._labelled(
            Counter,
            "recoveries",
            "Sequences that started or resumed with cached KV, by the method of recovery and the tier that had the KV.",
            "method",
            "source",
        )
        self.placements = self._counters(
            "placements", "Requests placed on executors, by the reason of the choice.", "reason", REASONS
        )
        for method, source in RECOVERIES:
            self.recoveries(method, source)
        self.block_transfer_bytes = self._counter(
            "block_transfer_bytes", "Bytes of KV that were fetched from other executors."
        )
        self.block_transfer_seconds = self._counter(
            "block_transfer_seconds", "Seconds that fetching KV from other executors took, summed over transfers."
        )
        self.num_preemptions = self._counter(
            "num_preemptions", "Sequences that were preempted: they gave up their KV blocks."
        )
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.executors_drained = self._counter("executors_drained", "Executors that left after they were drained.")
        self.look_ups_late = self._counter(
            "storage_look_ups_late", "Look-ups in storage that were not answered in time."
        )
        self.kv_events_dropped = self._counter(
            "kv_events_dropped", "Batches of KV events that were lost, because too many waited to be published."
        )
        self.step_errors = self._counter("step_errors", "Steps that failed on an executor.")
        self.grammar_failures = self._counter("grammar_failures", "Requests whose grammar became impossible to follow.")
        self.refresh_errors = self._counter("refresh_errors", "Times that gauges could not be updated.")
        self._bind_admission_counters()

    def _bind_counters_of_heartbeats(self) -> None:
        copied = self._counters(
            "tier_copies",
            "Blocks, or pages, that were copied to tiers below the device, by format: small (in fewer bits), exact, or "
            "above_bound (exactly, to a tier of fewer bits, because the error would be above --tier-error-bound).",
            "format",
            ("small", "exact", "above_bound"),
        )
        self.of_heartbeats: dict[str, Counter] = {
            "refused": self.connections_refused("unknown_key_blocks"),
            "storage_errors": self._counter("storage_errors", "Reads and writes of storage that failed."),
            "grammar_waits": self._counter("grammar_waits", "Steps that waited for a grammar to be compiled."),
            **{f"copied_{kind}": copied(kind) for kind in ("small", "exact", "above_bound")},
        }
        """By the names of the fields of ``Heartbeat``."""

    def _bind_admission_counters(self) -> None:
        self.requests_refused = self._counters(
            "requests_refused", "Requests that were not accepted, by reason.", "reason", REFUSALS
        )
        self.key_requests = self._labelled(
            Counter,
            "key_requests",
            "Accepted requests, by name of the API key; if it has limits, also requests refused for their body.",
            "key",
        )
        self.key_tokens = self._labelled(
            Counter, "key_tokens", "Tokens by name of the API key, and kind.", "key", "kind"
        )

        self.key_spared = self._labelled(
            Counter,
            "key_spared_by_next_gib_tokens",
            "Prompt tokens, by name of the API key, whose evicted KV would have been found with one GiB more for KV at "
            "each executor.",
            "key",
        )

    def _bind_feature_counters(self) -> None:
        """``of_features``: by the names of ``Feature.counts``."""
        texts = {
            "lora_loads": "LoRA adapters that executors have loaded, by themselves or to slots.",
            "lora_load_errors": "LoRA adapters that executors could not load.",
            "lora_evictions": "LoRA adapters that gave up their slots to others.",
            "spec_decode_num_drafts": "Drafts that steps have verified.",
            "spec_decode_num_draft_tokens": "Tokens of these drafts.",
            "spec_decode_num_accepted_tokens": "Tokens of drafts that were drawn, and kept.",
            "advice_accepted": "Advice on cached KV that executors have followed.",
            "advice_clipped": "Advice that executors have followed in part.",
            "advice_refused": "Advice on KV that is cached, which executors have refused.",
            "advice_loaded_blocks": "Blocks that were loaded ahead of their use, by advice or at learned times.",
            "advice_used_blocks": "Blocks that were loaded ahead of their use, and then used.",
            "hints_kept": "Hints of clients after which a session returned in time.",
            "hints_broken": "Hints after which a session returned late or not at all, or although it had ended.",
            "segment_moved_tokens": "Tokens of segments whose KV was moved to where they stand.",
        }
        self.of_features = {name: self._counter(name, text) for name, text in texts.items()}
        segments = self._counters(
            "segment_tokens",
            "Tokens of segments that sequences started with, by whether their KV was found or had to be computed.",
            "outcome",
            ("found", "computed"),
        )
        self.of_features |= {f"segment_tokens_{outcome}": segments(outcome) for outcome in ("found", "computed")}

    def _bind_histograms(self) -> None:
        by_recovery = ("method", "source")
        self._recovery_predicted = self._labelled(
            Histogram,
            "recovery_predicted_seconds",
            "Predicted time of a recovery of KV by the chosen method.",
            *by_recovery,
            buckets=_SECONDS,
        )
        self._recovery_actual = self._labelled(
            Histogram,
            "recovery_actual_seconds",
            "Time from the start of a sequence until all its KV from lower tiers or from peers was on the device.",
            *by_recovery,
            buckets=_SECONDS,
        )
        self.placement_predicted_seconds = self._histogram(
            "placement_predicted_seconds", "Predicted time from a request's placement to its first token.", _SECONDS
        )
        self.placement_actual_ratio = self._histogram(
            "placement_actual_ratio",
            "Actual time from a request's placement to its first token, divided by the predicted time.",
            _RATIO,
        )
        self.placement_decision_seconds = self._histogram(
            "placement_decision_seconds", "Time that choosing an executor for a request took.", _DECISION
        )
        self.iteration_tokens = self._histogram("iteration_tokens", "Tokens computed in one step.", _TOKENS)
        self._bind_block_histograms()

    def _bind_block_histograms(self) -> None:
        self.kv_block_lifetime = self._histogram(
            "kv_block_lifetime_seconds",
            "Time that a sampled block was cached or in use on the device, until it left it (--kv-cache-metrics).",
            _RESIDENCY,
        )
        self.kv_block_idle = self._histogram(
            "kv_block_idle_before_evict_seconds",
            "Time from the last use of a sampled block until it left the device (--kv-cache-metrics).",
            _RESIDENCY,
        )
        self.kv_block_reuse_gap = self._histogram(
            "kv_block_reuse_gap_seconds",
            "Time between two of the last four uses of a sampled block (--kv-cache-metrics).",
            _RESIDENCY,
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return self._labelled(Gauge, name, text)()

    def _counter(self, name: str, text: str) -> Counter:
        return self._labelled(Counter, name, text)()

    def _counters(self, name: str, text: str, label: str, values: Sequence[str]) -> Callable[[str], Counter]:
        """Return a function from each value of the label to its counter, which exists from the start."""
        labels = self._labelled(Counter, name, text, label)
        return {value: labels(value) for value in values}.__getitem__

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return self._labelled(Histogram, name, text, buckets=buckets)()

    def _labelled(
        self, kind: type[MetricT], name: str, text: str, *labels: str, **options: Sequence[float]
    ) -> Callable[..., MetricT]:
        """Return a function from the values of the labels to the metric that is bound to them."""
        metric = kind("pagewise_" + name, text, ("model_name", *labels), registry=self.registry, **options)  # type: ignore[arg-type]
        return partial(metric.labels, self.model_name)
