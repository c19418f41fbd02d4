"""The metrics of all gateways together, connected or gone.

Each gateway sends absolute values. Its counters and histograms stay in the sums when it has gone, so no sum ever falls,
and a scrape of any gateway sees everything once.

A scheduler that is started again counts from zero, as Prometheus expects of a process that was started again. Counts of
gateways from before are therefore left out: else the sum would jump as one gateway after the other comes back, and
Prometheus would take each jump for new events.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pagewise_shared.protocol import MetricFamily, MetricSample
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
_MOST_SAMPLES = 50_000
_MOST_GONE = 64
"""Gateways that are gone and might come back; the counts of others are only in the sum."""

Key = tuple[str, tuple[tuple[str, str], ...]]
"""A sample's name and its labels."""


@dataclass(slots=True)
class _Family:
    """A metric family, and its values by sample."""

    documentation: str
    type: str
    values: dict[Key, float] = field(default_factory=dict)

    def add(self, other: "_Family") -> None:
        """Add the values of the same family of another gateway."""
        if other.type == self.type:
            for key, value in other.values.items():
                self.values[key] = self.values.get(key, 0.0) + value


_Families = dict[str, _Family]


@dataclass(slots=True)
class _Source:
    """The last values of a gateway's process, ``instance``. ``before``: its counts from before it joined."""

    instance: str
    families: _Families
    before: _Families

    def counted(self) -> _Families:
        """Return its counts under this scheduler, and its gauges."""
        return _less(self.families, self.before) if self.before else self.families


class GatewayMetrics(Collector):
    """Adds up the metrics of gateways. Belongs to the coordinator, which also collects."""

    def __init__(self) -> None:
        self._living: dict[bytes, _Source] = {}
        self._gone: dict[str, _Source] = {}
        self._sum_of_gone: _Families = {}

    def take(self, identity: bytes, instance: str, families: Sequence[MetricFamily], *, older: bool = False) -> bool:
        """Take the metrics of the gateway with this connection; False: Prometheus would refuse them.

        ``instance``: of its process, which may have had other connections. ``older``: it had joined a scheduler before,
        this one or another.
        """
        values = _understood(families)
        if values is None:
            return False
        known = self._living.get(identity) or self._left_behind(instance)
        before = known.before if known is not None else _counters(values) if older else {}
        self._living[identity] = _Source(instance, values, before)
        return True

    def _left_behind(self, instance: str) -> _Source | None:
        """The metrics of a process from an earlier connection, whose end this scheduler may not have noticed yet."""
        if (source := self._gone.pop(instance, None)) is not None:
            return source
        another = next((one for one, source in self._living.items() if source.instance == instance), None)
        return self._living.pop(another) if another is not None else None

    def gone(self, identity: bytes) -> None:
        """Note that the gateway with this connection is gone; harmless if it has sent no metrics."""
        source = self._living.pop(identity, None)
        if source is None:
            return
        source.families = _counters(source.families)
        self._gone[source.instance] = source
        if len(self._gone) > _MOST_GONE:
            _add(self._sum_of_gone, self._gone.pop(next(iter(self._gone))).counted())

    def collect(self) -> Iterator[Metric]:
        """Yield the sums."""
        total: _Families = {}
        _add(total, self._sum_of_gone)
        for source in (*self._gone.values(), *self._living.values()):
            _add(total, source.counted())
        for name, family in total.items():
            metric = Metric(name, family.documentation, family.type)
            for (sample, labels), value in family.values.items():
                metric.add_sample(sample, dict(labels), value)
            yield metric


class Merged(Collector):
    """The metrics of this process and of the gateways, each family once.

    Counters and histograms of both are added up; of a gauge, the value of this process counts.
    """

    def __init__(self, own: Collector, gateways: GatewayMetrics) -> None:
        self._own, self._gateways = own, gateways

    def collect(self) -> Iterator[Metric]:
        """Yield each family."""
        theirs = {metric.name: metric for metric in self._gateways.collect()}
        for own in self._own.collect():
            other = theirs.pop(own.name, None)
            if other is None or own.type == "gauge" or other.type != own.type:
                yield own
                continue
            values = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in own.samples}
            for sample in other.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                values[key] = values.get(key, 0.0) + sample.value
            merged = Metric(own.name, own.documentation, own.type)
            for (name, labels), value in values.items():
                merged.add_sample(name, dict(labels), value)
            yield merged
        yield from theirs.values()


def _add(total: _Families, families: _Families) -> None:
    for name, family in families.items():
        if name not in total:
            total[name] = _Family(family.documentation, family.type)
        total[name].add(family)


def _counters(families: _Families) -> _Families:
    return {name: family for name, family in families.items() if family.type != "gauge"}


def _less(families: _Families, before: _Families) -> _Families:
    """Counts since ``before``; gauges as they are."""
    nothing = _Family("", "")
    return {
        name: _Family(
            family.documentation,
            family.type,
            {
                key: max(0.0, value - before.get(name, nothing).values.get(key, 0.0))
                if family.type != "gauge"
                else value
                for key, value in family.values.items()
            },
        )
        for name, family in families.items()
    }


def _understood(families: Sequence[MetricFamily]) -> _Families | None:
    """Metric families by name; None if there are any that Prometheus would not take."""
    if sum(len(family.samples) for family in families) > _MOST_SAMPLES:
        return None
    understood: _Families = {}
    for family in families:
        if family.type not in _SUFFIXES or not _NAME.fullmatch(family.name) or family.name in understood:
            return None
        if not all(_is_sample(sample, family) for sample in family.samples):
            return None
        understood[family.name] = _Family(
            family.documentation,
            family.type,
            {
                (sample.name, tuple(sorted(sample.labels))): sample.value
                for sample in family.samples
                if math.isfinite(sample.value)
            },
        )
    return understood


def _is_sample(sample: MetricSample, family: MetricFamily) -> bool:
    """Whether a sample is one of this family, with names and a value that Prometheus would take."""
    name, suffix = sample.name[: len(family.name)], sample.name[len(family.name) :]
    return (
        name == family.name
        and suffix in _SUFFIXES[family.type]
        and all(_NAME.fullmatch(label) for label, _ in sample.labels)
        and (family.type == "gauge" or not -math.inf < sample.value < 0)
    )
