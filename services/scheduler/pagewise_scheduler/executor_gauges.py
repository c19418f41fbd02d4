"""The gauges of single executors."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector


class ExecutorState(NamedTuple):
    """The state of one executor: its sequences, the blocks of its device, the tasks of its event loop.

    ``fallback``: 1 if it computes by slower kernels than its first choice, or without CUDA graphs, else 0.
    """

    running: int
    waiting: int
    free: int
    cached: int
    in_use: int
    tasks: int
    fallback: int


class ExecutorGauges(Collector):
    """Gauges with the label ``executor``, of the connected executors: series of executors that have gone disappear."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._states: dict[str, ExecutorState] = {}

    def show(self, executors: Iterable[tuple[str, ExecutorState]]) -> None:
        """Show exactly these executors, by name. The values of executors with the same name are added up."""
        states: dict[str, ExecutorState] = {}
        for name, state in executors:
            before = states.get(name)
            states[name] = state if before is None else ExecutorState(*map(sum, zip(before, state, strict=True)))
        self._states = states  # one assignment: a scrape in another thread sees the old or the new states

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges."""
        running = self._family("requests_running", "Sequences in an executor's running batch.")
        waiting = self._family("requests_waiting", "Sequences that wait to run on an executor.")
        usage = self._family("kv_cache_usage_perc", "Share of an executor's KV blocks that are in use; 1 means all.")
        blocks = self._family(
            "kv_blocks", "KV blocks of an executor's device by state; pages if layers have several groups.", "state"
        )
        tasks = self._family("tasks", "Tasks of an executor's event loop.")
        fallback = self._family(
            "fallback",
            "Whether an executor computes by slower kernels than its first choice, or without the CUDA graphs that it "
            "was to have; its log says why.",
        )
        for name, state in self._states.items():
            labels = [self._model_name, name]
            running.add_metric(labels, state.running)
            waiting.add_metric(labels, state.waiting)
            usage.add_metric(labels, state.in_use / max(1, state.free + state.cached + state.in_use))
            blocks.add_metric([*labels, "free"], state.free)
            blocks.add_metric([*labels, "cached"], state.cached)
            blocks.add_metric([*labels, "in_use"], state.in_use)
            tasks.add_metric(labels, state.tasks)
            fallback.add_metric(labels, state.fallback)
        yield from (running, waiting, usage, blocks, tasks, fallback)

    def _family(self, name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily("pagewise_executor_" + name, text, labels=["model_name", "executor", *labels])
