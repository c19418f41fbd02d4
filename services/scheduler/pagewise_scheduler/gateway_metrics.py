"""The metrics of all gateways together: of those that are there, and of those that are gone.

Each gateway tells the absolute values of its own. What a counter or a histogram has counted stays counted when its
gateway is gone: so no sum ever falls, and whoever scrapes any gateway sees everything once.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pagewise_shared.protocol import MetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_TYPES = ("counter", "gauge", "histogram")
_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
_MOST_SAMPLES = 50_000
_MOST_GONE = 64
"""Gateways that are gone and might come back under their name; what others have counted is only in the sum."""

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
    """What a gateway has told last. ``name``: for people; one that is started again may have the same."""

    name: str
    families: _Families


class GatewayMetrics(Collector):
    """Adds up what gateways tell. Belongs to the coordinator, which also collects."""

    def __init__(self) -> None:
        self._living: dict[bytes, _Source] = {}
        self._gone: dict[str, _Families] = {}
        self._sum_of_gone: _Families = {}

    def take(self, identity: bytes, name: str, families: Iterable[MetricFamily]) -> bool:
        """The gateway with this connection tells what it has counted so far; False: that makes no sense."""
        told = _understood(families)
        if told is None:
            return False
        # One that was given up and is back goes on from what it had counted; a new process of its name begins anew.
        before = self._living[identity].families if identity in self._living else self._gone.pop(name, None)
        if before is not None and _has_fallen(before, told):
            _add(self._sum_of_gone, before)
        self._living[identity] = _Source(name, told)
        return True

    def gone(self, identity: bytes) -> None:
        """The gateway with this connection is gone; harmless if it has never told anything."""
        source = self._living.pop(identity, None)
        if source is None:
            return
        counted = {name: family for name, family in source.families.items() if family.type != "gauge"}
        if (before := self._gone.pop(source.name, None)) is not None:  # another one of that name
            _add(self._sum_of_gone, before)
        self._gone[source.name] = counted
        if len(self._gone) > _MOST_GONE:
            _add(self._sum_of_gone, self._gone.pop(next(iter(self._gone))))

    def collect(self) -> Iterator[Metric]:
        """What a scrape gets to see."""
        total: _Families = {}
        _add(total, self._sum_of_gone)
        for families in (*self._gone.values(), *(source.families for source in self._living.values())):
            _add(total, families)
        for name, family in total.items():
            metric = Metric(name, family.documentation, family.type)
            for (sample, labels), value in family.values.items():
                metric.add_sample(sample, dict(labels), value)
            yield metric


class Merged(Collector):
    """The metrics of this process and those of the gateways, each family once.

    What both count is added up; a gauge that both have is this process's.
    """

    def __init__(self, own: Collector, gateways: GatewayMetrics) -> None:
        self._own, self._gateways = own, gateways

    def collect(self) -> Iterator[Metric]:
        """What a scrape gets to see."""
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


def _has_fallen(before: _Families, now: _Families) -> bool:
    """Whether anything that only ever rises is less than before: then it is counted anew."""
    return any(
        value > (now[name].values.get(key, 0.0) if name in now else 0.0)
        for name, family in before.items()
        if family.type != "gauge"
        for key, value in family.values.items()
    )


def _understood(families: Iterable[MetricFamily]) -> _Families | None:
    """Metric families by name; None if there are any that Prometheus would not take."""
    understood: _Families = {}
    samples = 0
    for family in families:
        if family.type not in _TYPES or not _NAME.fullmatch(family.name) or family.name in understood:
            return None
        samples += len(family.samples)
        if samples > _MOST_SAMPLES:
            return None
        mine = understood[family.name] = _Family(family.documentation, family.type)
        for sample in family.samples:
            suffix = sample.name.removeprefix(family.name)
            good_labels = all(_NAME.fullmatch(label) for label, _ in sample.labels)
            least = -math.inf if family.type == "gauge" else 0.0
            if suffix == sample.name or suffix not in _SUFFIXES[family.type] or not good_labels:
                return None
            if not math.isfinite(sample.value):
                continue
            if sample.value < least:
                return None
            mine.values[sample.name, tuple(sorted(sample.labels))] = sample.value
    return understood
