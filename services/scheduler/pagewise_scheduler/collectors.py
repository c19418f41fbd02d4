"""Metrics that the library has no fitting kind for."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from prometheus_client.metrics_core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class TokenHistogram(Collector):
    """A histogram for what is observed with every token: one thread, no locks, a fifth of what the library's costs."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], model_name: str) -> None:
        self._name, self._text, self._model_name = name, text, model_name
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value; from the event loop only."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """What a scrape gets to see."""
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        family.add_metric([self._model_name], buckets, self._sum)
        yield family


class ExecutorState(NamedTuple):
    """What one executor does now: its sequences, and the blocks of its device."""

    running: int
    waiting: int
    free: int
    cached: int
    in_use: int


class ExecutorGauges(Collector):
    """Gauges with the label ``executor``: of those that are there, so that nothing is left of those that have gone."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._states: dict[str, ExecutorState] = {}

    def show(self, executors: Iterable[tuple[str, ExecutorState]]) -> None:
        """These, by name, are all there are. Two may have the same one: they are added up."""
        states: dict[str, ExecutorState] = {}
        for name, state in executors:
            before = states.get(name)
            states[name] = state if before is None else ExecutorState(*map(sum, zip(before, state, strict=True)))
        self._states = states  # one assignment: whoever collects meanwhile sees the old ones

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """What a scrape gets to see."""
        running = self._family("requests_running", "Sequences in an executor's running batch.")
        waiting = self._family("requests_waiting", "Sequences that wait to run on an executor.")
        usage = self._family("kv_cache_usage_perc", "Share of an executor's KV blocks that are in use; 1 means all.")
        blocks = self._family("kv_blocks", "KV blocks of an executor's device by state.", "state")
        for name, state in self._states.items():
            labels = [self._model_name, name]
            running.add_metric(labels, state.running)
            waiting.add_metric(labels, state.waiting)
            usage.add_metric(labels, state.in_use / max(1, state.free + state.cached + state.in_use))
            blocks.add_metric([*labels, "free"], state.free)
            blocks.add_metric([*labels, "cached"], state.cached)
            blocks.add_metric([*labels, "in_use"], state.in_use)
        yield from (running, waiting, usage, blocks)

    def _family(self, name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily("pagewise_executor_" + name, text, labels=["model_name", "executor", *labels])
