"""Reads the metrics of ``/metrics``."""

import re
import urllib.request
from typing import NamedTuple


class Sample(NamedTuple):
    """One line of ``/metrics``; the name is without ``pagewise_``, labels are as in ``kind="prompt",...``."""

    name: str
    labels: str
    value: float


def scrape(url: str, seconds: float = 30.0, key: str = "") -> list[Sample]:
    """All samples that a server's ``/metrics`` shows. ``key``: an operator's API key, if the server has any."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/metrics", headers=headers), timeout=seconds) as answer:
        return parse_metrics(answer.read().decode())


def parse_metrics(text: str) -> list[Sample]:
    """The samples of Pagewise in Prometheus' text format."""
    found = re.findall(r"^pagewise_(\w+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE)
    return [Sample(name, labels, float(value)) for name, labels, value in found]


def total(samples: list[Sample], name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels.

    Raises:
        AssertionError: there is no such metric.
    """
    values = [sample for sample in samples if sample.name == name]
    assert values, f"there is no metric {name}"
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(sample.value for sample in values if all(label in sample.labels for label in wanted))
