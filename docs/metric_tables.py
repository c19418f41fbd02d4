"""What the table of metrics says, from the registries of the processes that count them."""

import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

METRIC_MODULES = {"scheduler": "pagewise_scheduler.metrics", "gateway": "pagewise_gateway.metrics"}
"""Where the class ``Metrics`` of each kind of process is, whose ``registry`` holds them."""

_PREFIX = "pagewise_"
_OF_EVERY_METRIC = ("model_name",)
_UNTOLD_VALUES = ("version", "le", "executor", "gateway", "key")
"""Labels whose values are names that people give, or numbers."""


@dataclass
class Metric:
    """One metric, as documents tell of it. ``of``: kinds of process that count it; ``values``: known ones, by label."""

    name: str
    kind: str
    documentation: str
    labels: list[str]
    values: dict[str, set[str]] = field(default_factory=dict)
    of: list[str] = field(default_factory=list)


def described() -> Iterator[tuple[str, str, str, str]]:
    """A row for each metric, in the order in which processes register them."""
    for metric in metrics():
        labels = ",".join(metric.labels)
        values = [
            (f"{label}: " if len(metric.values) > 1 else "") + ", ".join(sorted(known))
            for label, known in metric.values.items()
        ]
        meaning = metric.documentation.rstrip(".") + "".join(f"; {one}" for one in values)
        name = f"`{metric.name}{{{labels}}}`" if labels else f"`{metric.name}`"
        yield name, metric.kind, ", ".join(metric.of), meaning


def metrics() -> list[Metric]:
    """Every metric of Pagewise, of those services that are installed."""
    found: dict[str, Metric] = {}
    for process, module in METRIC_MODULES.items():
        if importlib.util.find_spec(module.split(".")[0]) is None:
            continue
        made = importlib.import_module(module).Metrics
        required = len(inspect.signature(made).parameters)
        for metric in _registered(made(*["m"] * required).registry):
            found.setdefault(metric.name, metric).of.append(process)
    return list(found.values())


def _registered(registry: CollectorRegistry) -> Iterator[Metric]:
    for collector in list(registry._collector_to_names):
        for family in collector.collect():
            if not family.name.startswith(_PREFIX):
                continue
            # A collector of the library knows the labels of what has no samples yet, ours put them into the family.
            named: Any = getattr(collector, "_labelnames", None) or getattr(family, "_labelnames", ())
            labels = [str(label) for label in named if label not in _OF_EVERY_METRIC]
            values: dict[str, set[str]] = {}
            for sample in family.samples:
                for label, value in sample.labels.items():
                    if label in labels and label not in _UNTOLD_VALUES:
                        values.setdefault(label, set()).add(value)
            name = family.name.removeprefix(_PREFIX) + ("_total" if family.type == "counter" else "")
            yield Metric(name, family.type, family.documentation, labels, values)
