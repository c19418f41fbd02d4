"""The gauges of the memory that API keys use, and of their budgets."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector


class KeyMemory(NamedTuple):
    """The memory that an owner of cached KV uses in one tier, and its budget there, in bytes over all executors.

    ``owner``: the name of an API key, or ``group:`` and the name of a group. ``min``: the minimum in effect, which is
    below the configured minimum if the minima of all keys are too large together. ``high``: None is no bound.
    """

    owner: str
    tier: str
    used: int
    min: int
    low: int
    high: int | None


class KeyGauges(Collector):
    """Gauges with the labels ``key`` and ``tier``, of the keys and groups that have budgets."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._uses: list[KeyMemory] = []

    def show(self, uses: Iterable[KeyMemory]) -> None:
        """Show exactly these uses."""
        self._uses = list(uses)  # one assignment: a scrape in another thread sees the old or the new uses

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges."""
        used = self._family("", "Bytes of cached KV of an API key or group with a budget, in use or not, by tier.")
        least = self._family("min_", "Bytes of cached KV up to which nothing of an API key or group is evicted.")
        low = self._family("low_", "Bytes of cached KV up to which other keys' blocks are evicted first.")
        high = self._family("high_", "Bytes of cached KV beyond which blocks of an API key or group are evicted first.")
        for use in self._uses:
            labels = [self._model_name, use.owner, use.tier]
            used.add_metric(labels, use.used)
            least.add_metric(labels, use.min)
            low.add_metric(labels, use.low)
            if use.high is not None:
                high.add_metric(labels, use.high)
        yield from (used, least, low, high)

    def _family(self, name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"pagewise_key_memory_{name}bytes", text, labels=["model_name", "key", "tier"])
