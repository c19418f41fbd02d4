"""The report of a replay: one JSON document."""

from collections import Counter
from collections.abc import Sequence
from math import isnan
from statistics import fmean
from typing import Any

from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.recovery_plan import Recovery
from pagewise_scheduler.replay.simulation import Outcome, Served

_LAST_TOKENS = 16


def summarise(
    outcome: Outcome, schedulers: Sequence[Scheduler], *, slo_first_token: float, slo_per_token: float
) -> dict[str, Any]:
    """Hit rates, waste, preemptions, recoveries, goodput and latencies.

    ``slo_first_token``, ``slo_per_token``: the most seconds of a request that counts for goodput.
    """
    served = [one for one in outcome.served if not isnan(one.finished)]
    num_good = sum(_is_good(one, slo_first_token, slo_per_token) for one in served)
    counters = [scheduler.kv.pool.counters.by_name() for scheduler in schedulers]
    output_tokens = sum(one.trace.num_output_tokens for one in served)
    return {
        "requests": {"finished": len(served), "never_fit": outcome.refused},
        **_cached(served, output_tokens),
        "blocks": {name: sum(one[name] for one in counters) for name in counters[0]},
        "preemptions": sum(scheduler.num_preemptions for scheduler in schedulers),
        "recoveries": _recoveries(outcome.recoveries),
        "waste": _waste(outcome),
        "virtual_seconds": round(outcome.seconds, 1),
        "device_busy": _ratio(sum(one.busy for one in outcome.executors), max(outcome.seconds, 1e-9) * len(schedulers)),
        "steps": outcome.steps,
        "routing": _routing(outcome, served),
        "throughput_tokens_per_second": _rate(output_tokens, outcome.seconds, 1),
        "goodput_requests_per_second": _rate(num_good, outcome.seconds, 3),
        "good_requests": _ratio(num_good, len(served)),
        "seconds": _latencies(served),
    }


def _cached(served: Sequence[Served], output_tokens: int) -> dict[str, Any]:
    """Numbers of tokens, and how many tokens of prompts were cached in which tier."""
    prompt = sum(one.trace.num_prompt_tokens for one in served)
    everywhere = sum(one.request.num_cached_tokens for one in served)
    host, peer = (sum(one.request.cached_tokens[tier] for one in served) for tier in ("host", "peer"))
    cached = {"device": everywhere - host - peer, "host": host, "peer": peer}
    of_blocks = _ratio(sum(map(_blocks_hit, served)), sum(len(one.trace.blocks) for one in served))
    rates = {tier: _ratio(tokens, prompt) for tier, tokens in cached.items()}
    return {
        "tokens": {"prompt": prompt, "output": output_tokens, **{f"cached_{tier}": n for tier, n in cached.items()}},
        "hit_rate": rates | {"all": _ratio(everywhere, prompt), "of_trace_blocks": of_blocks},
    }


def _latencies(served: Sequence[Served]) -> dict[str, Any]:
    return {
        "first_token": _percentiles([one.first_token - one.arrival for one in served]),
        "per_output_token": _percentiles([_per_token(one) for one in served if one.trace.num_output_tokens > 1]),
        "end_to_end": _percentiles([one.finished - one.arrival for one in served]),
        "queue": _percentiles([one.request.scheduled_time - one.arrival for one in served]),
    }


def _recoveries(recoveries: Sequence[Recovery]) -> dict[str, Any]:
    methods = Counter(recovery.method for recovery in recoveries)
    timed = [recovery for recovery in recoveries if recovery.estimate is not None and not isnan(recovery.ended)]
    return {
        "by_method": dict(sorted(methods.items())),
        "resumed": sum(recovery.resumed for recovery in recoveries),
        "predicted_seconds": round(sum(recovery.predicted for recovery in timed), 3),
        "actual_seconds": round(sum(recovery.ended - recovery.began for recovery in timed), 3),
    }


def _routing(outcome: Outcome, served: Sequence[Served]) -> dict[str, Any]:
    """Reasons of placements, how evenly executors were loaded, and how good predictions were."""
    ratios = [(one.first_token - one.arrival) / one.predicted for one in served if one.predicted > 0]
    return {
        "reasons": dict(sorted(Counter(one.reason for one in outcome.served).items())),
        "busiest_of_mean": {
            "busy_seconds": _busiest([executor.busy for executor in outcome.executors]),
            "computed_tokens": _busiest([executor.computed for executor in outcome.executors]),
        },
        "actual_of_predicted": _quantiles(ratios, (10, 50, 90), 3) or dict.fromkeys(("p10", "p50", "p90")),
    }


def _busiest(loads: Sequence[float]) -> float | None:
    """The largest load as a multiple of the mean."""
    return round(max(loads) * len(loads) / sum(loads), 3) if sum(loads) else None


def _waste(outcome: Outcome) -> dict[str, Any]:
    """The share of the slots of running sequences that hold no token, over all samples."""
    allocated = sum(sample.allocated for sample in outcome.samples)
    used = sum(sample.used for sample in outcome.samples)
    running = sum(sample.running for sample in outcome.samples)
    return {
        "slots_without_token": _ratio(allocated - used, allocated),
        "mean_running": _rate(running, len(outcome.samples), 2),
    }


def _blocks_hit(one: Served) -> int:
    """The number of cached blocks of the trace's own block size."""
    trace = one.trace
    # The last block counts although its newest tokens are always computed: the last one, and a partial block.
    whole = one.request.num_cached_tokens // trace.block_tokens
    left = trace.num_prompt_tokens - one.request.num_cached_tokens
    return len(trace.blocks) if left <= _LAST_TOKENS else min(len(trace.blocks), whole)


def _per_token(one: Served) -> float:
    return (one.finished - one.first_token) / (one.trace.num_output_tokens - 1)


def _is_good(one: Served, first_token: float, per_token: float) -> bool:
    if one.first_token - one.arrival > first_token:
        return False
    return one.trace.num_output_tokens < 2 or _per_token(one) <= per_token


def _percentiles(values: list[float]) -> dict[str, float | None]:
    known = [value for value in values if not isnan(value)]
    return _quantiles(known, (50, 90, 99), 4) | ({"mean": round(fmean(known), 4)} if known else {})


def _quantiles(values: list[float], percents: Sequence[int], digits: int) -> dict[str, float | None]:
    ordered = sorted(values)
    return {f"p{n}": round(ordered[len(ordered) * n // 100], digits) for n in percents} if ordered else {}


def _rate(number: int, seconds: float, digits: int) -> float | None:
    return round(number / seconds, digits) if seconds else None


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0
