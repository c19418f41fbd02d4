"""Compares several servers that were measured in turns, over all rounds."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

NEEDED_ROUNDS = 6
"""Of two equal servers, all ratios lie on one side of 1 in 3% of the comparisons of so many rounds, and in 25% of 3."""

_RATES = ("request_throughput", "input_throughput", "output_throughput", "goodput")
_LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")


def flat(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return rates and latencies by name (``ttft_ms.median``), without those that are not known."""
    values = {name: metrics[name] for name in (*_RATES, "cached_share") if metrics.get(name) is not None}
    for name in _LATENCIES:
        values |= {f"{name}.{which}": value for which, value in (metrics.get(name) or {}).items()}
    return values


def medians(rounds: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median of each metric over rounds, of those rounds in which it is known."""
    every = [flat(one) for one in rounds]
    names = dict.fromkeys(name for one in every for name in one)
    return {name: statistics.median(one[name] for one in every if name in one) for name in names}


def paired_ratios(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, float | bool]]:
    """Return the ratios of two servers' metrics in the same rounds: their median, the lowest and the highest.

    ``differs``: whether all ratios lie on the same side of 1, in at least ``NEEDED_ROUNDS`` rounds, so that
    chance hardly explains it. If not, the difference may be noise.
    """
    pairs = [(flat(one), flat(other)) for one, other in zip(ours, theirs, strict=True)]
    ratios: dict[str, list[float]] = {}
    for one, other in pairs:
        for name in one.keys() & other.keys():
            if other[name]:
                ratios.setdefault(name, []).append(one[name] / other[name])
    return {
        name: {
            "median": round(statistics.median(values), 4),
            "lowest": round(min(values), 4),
            "highest": round(max(values), 4),
            "differs": len(values) >= NEEDED_ROUNDS and (min(values) > 1 or max(values) < 1),
        }
        for name, values in sorted(ratios.items())
    }
