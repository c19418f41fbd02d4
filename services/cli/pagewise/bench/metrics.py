"""Computes latencies, throughput, goodput and errors from the times at which the events of each request came.

The definitions are those of ``vllm bench serve``:

- TTFT: from sending a request to its first event with output.
- ITL: between two events with output of one request. Where an event carries several tokens, it is longer than the time
  between tokens.
- E2E: from sending a request to its last event with output.
- TPOT: (E2E - TTFT) / (output tokens - 1), of requests with at least two tokens.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LATENCIES = ("ttft", "tpot", "itl", "e2el")
SLO_METRICS = ("ttft", "tpot", "e2el")
"""What ``--goodput`` may bound, in milliseconds."""

_SHOWN_ERRORS = 3


@dataclass(slots=True)
class Outcome:
    """The result of one request; times are seconds of one clock.

    Fields:
        due, sent, end: when it should have been sent, when it was, and when its stream had ended.
        events: when each event with output came.
        asked_tokens: how many tokens it was to generate.
        asked_prompt_tokens: about how many its prompt was to have; None: that is not known.
        prompt_tokens, output_tokens, cached_tokens: as the server counts them, None where it does not say.
        error: the kind of error, empty if there was none; ``detail`` says more.
        text: what was generated.
    """

    due: float
    sent: float
    asked_tokens: int
    end: float = 0.0
    asked_prompt_tokens: int | None = None
    events: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    error: str = ""
    detail: str = ""
    text: str = ""

    @property
    def tokens(self) -> int:
        """Generated tokens, as the server counts them, else as many as there were events."""
        return len(self.events) if self.output_tokens is None else self.output_tokens

    @property
    def ttft(self) -> float:
        """Seconds to the first event with output."""
        return self.events[0] - self.sent

    @property
    def e2el(self) -> float:
        """Seconds to the last event with output."""
        return self.events[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first one; None if there was no second one."""
        return (self.events[-1] - self.events[0]) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between events with output."""
        return [later - earlier for earlier, later in itertools.pairwise(self.events)]

    def meets(self, slos: Mapping[str, float]) -> bool:
        """Return whether each of its latencies is within its bound, in milliseconds."""
        if self.error:
            return False
        values = {"ttft": self.ttft, "e2el": self.e2el, "tpot": self.tpot}
        return all((value := values[name]) is None or 1e3 * value <= bound for name, bound in slos.items())


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of values in ascending order, interpolated between neighbours as numpy does."""
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def distribution(seconds: Sequence[float], percents: Sequence[float]) -> dict[str, float] | None:
    """Return mean, median and percentiles in milliseconds; None without values."""
    if not seconds:
        return None
    ordered = sorted(1e3 * value for value in seconds)
    values = {"mean": sum(ordered) / len(ordered), "median": percentile(ordered, 50)}
    values |= {f"p{percent:g}": percentile(ordered, percent) for percent in percents}
    return {name: round(value, 3) for name, value in values.items()}


def latencies(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Return all values of each latency, in seconds, of the requests that succeeded."""
    good = [one for one in outcomes if not one.error]
    return {
        "ttft": [one.ttft for one in good],
        "tpot": [value for one in good if (value := one.tpot) is not None],
        "itl": [gap for one in good for gap in one.gaps],
        "e2el": [one.e2el for one in good],
    }


def summarise(outcomes: Sequence[Outcome], *, slos: Mapping[str, float], percents: Sequence[float]) -> dict[str, Any]:
    """Return the metrics of one load: counts, tokens, rates per second, and latencies in milliseconds.

    The clock runs from the first request that was sent to the last one that ended. Rates count requests that succeeded.
    """
    good = [one for one in outcomes if not one.error]
    seconds = max((one.end for one in outcomes), default=0.0) - min((one.sent for one in outcomes), default=0.0)
    per_second = 1 / seconds if seconds > 0 else 0.0
    prompt = sum(one.prompt_tokens or 0 for one in good)
    output, events = sum(one.tokens for one in good), sum(len(one.events) for one in good)
    told = [one for one in good if one.prompt_tokens is not None]
    cached = [one.cached_tokens for one in good if one.cached_tokens is not None]
    result: dict[str, Any] = {
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "errors": _errors(outcomes),
        "duration_seconds": round(seconds, 3),
        "input_tokens": prompt if told else None,
        "input_tokens_asked_for": _asked_for(told),
        "output_tokens": output,
        "output_tokens_asked_for": sum(one.asked_tokens for one in good),
        "output_tokens_counted_by": "usage" if all(one.output_tokens is not None for one in good) else "events",
        "tokens_per_event": round(output / events, 3) if events else None,
        "cached_tokens": sum(cached) if cached else None,
        "cached_share": round(sum(cached) / prompt, 4) if cached and prompt else None,
        "most_in_flight": most_in_flight(outcomes),
        "request_throughput": round(len(good) * per_second, 4),
        "input_throughput": round(prompt * per_second, 2) if told else None,
        "output_throughput": round(output * per_second, 2),
    }
    if slos:
        meeting = sum(one.meets(slos) for one in outcomes)
        result["goodput"] = round(meeting * per_second, 4)
        result["good_share"] = round(meeting / len(outcomes), 4) if outcomes else None
    values = latencies(outcomes)
    return result | {f"{name}_ms": distribution(values[name], percents) for name in LATENCIES}


def _asked_for(told: Sequence[Outcome]) -> int | None:
    """Return about how many tokens the prompts of requests were to have; None if that is not known of all."""
    asked = [one.asked_prompt_tokens for one in told]
    return sum(known) if asked and len(known := [one for one in asked if one is not None]) == len(asked) else None


def most_in_flight(outcomes: Sequence[Outcome]) -> int:
    """Return the largest number of requests that were in flight at one time."""
    # At one time, ends come before beginnings.
    changes = sorted([(one.sent, 1) for one in outcomes] + [(one.end, -1) for one in outcomes])
    return max(itertools.accumulate(change for _, change in changes), default=0)


def _errors(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return how many errors of each kind there were, and what the first of them said."""
    failed = [one for one in outcomes if one.error]
    return {
        kind: {"count": count, "examples": sorted({one.detail for one in failed if one.error == kind})[:_SHOWN_ERRORS]}
        for kind, count in Counter(one.error for one in failed).most_common()
    }
