"""Metrics of a load, from timings that are known."""

import itertools
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagewise.bench.comparison import NEEDED_ROUNDS, medians, paired_ratios
from pagewise.bench.metrics import Outcome, latencies, most_in_flight, percentile, summarise
from pagewise.bench.plot import output_over_time

seconds = st.floats(0.001, 10.0)


def outcome(sent: float, gaps: list[float], **fields: int) -> Outcome:
    """A request of which each event came a gap after the one before, and whose stream ended then."""
    events = list(itertools.accumulate(gaps, initial=sent))[1:]
    return Outcome(sent, sent, fields.pop("asked_tokens", len(gaps)), end=events[-1], events=events, **fields)  # type: ignore[arg-type]


def failed(sent: float, kind: str = "HTTP 500") -> Outcome:
    return Outcome(sent, sent, 8, end=sent + 1, error=kind, detail="scripted")


loads = st.lists(
    st.builds(outcome, st.floats(0, 100), st.lists(seconds, min_size=1, max_size=20))
    | st.builds(failed, st.floats(0, 100)),
    min_size=1,
    max_size=12,
)


def test_known_timings_give_known_numbers() -> None:
    one = outcome(10.0, [0.2, 0.05, 0.15], prompt_tokens=100, output_tokens=5, cached_tokens=64)
    other = outcome(11.0, [0.4, 0.1, 0.1], prompt_tokens=60, output_tokens=3, cached_tokens=0)
    got = summarise([one, other, failed(10.5)], slos={"ttft": 300, "tpot": 60}, percents=[90])
    assert (got["completed"], got["failed"], got["input_tokens"], got["output_tokens"]) == (2, 1, 160, 8)
    assert got["errors"] == {"HTTP 500": {"count": 1, "examples": ["scripted"]}}
    assert got["duration_seconds"] == pytest.approx(1.6)
    assert got["request_throughput"] == pytest.approx(2 / 1.6)
    assert got["output_throughput"] == pytest.approx(8 / 1.6)
    assert got["goodput"] == pytest.approx(1 / 1.6), "the second is late, the third has failed"
    assert got["good_share"] == pytest.approx(1 / 3, abs=1e-4)
    assert got["ttft_ms"] == {"mean": 300.0, "median": 300.0, "p90": 380.0}
    assert got["tpot_ms"]["mean"] == 75.0, "0.2 s for 4 tokens and 0.2 s for 2"
    assert got["itl_ms"]["median"] == 100.0
    assert got["e2el_ms"]["mean"] == 500.0
    assert got["cached_share"] == 0.4
    assert got["tokens_per_event"] == pytest.approx(8 / 6, abs=1e-3)
    assert got["most_in_flight"] == 2


@given(loads)
def test_latencies_fit_together(outcomes: list[Outcome]) -> None:
    for one in outcomes:
        if one.error:
            continue
        assert one.e2el == pytest.approx(one.ttft + sum(one.gaps))
        assert one.e2el == pytest.approx(one.ttft + (one.tpot or 0.0) * (one.tokens - 1))
    got = summarise(outcomes, slos={}, percents=[50, 99])
    assert got["completed"] + got["failed"] == len(outcomes)
    for name, values in latencies(outcomes).items():
        told = got[f"{name}_ms"]
        assert (told is None) == (not values)
        if told is not None:
            assert told["p50"] == told["median"] == pytest.approx(1e3 * statistics.median(values), abs=0.001)
            assert told["median"] <= told["p99"] <= 1e3 * max(values) + 0.001


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_are_numpy_s(values: list[float], percent: float) -> None:
    expected = float(np.percentile(values, percent))
    assert percentile(sorted(values), percent) == pytest.approx(expected, rel=1e-9, abs=1e-6)


@given(loads, st.floats(1, 1e4), st.floats(1, 1e4))
def test_looser_bounds_never_lose_a_request(outcomes: list[Outcome], bound: float, more: float) -> None:
    strict = sum(one.meets({"ttft": bound}) for one in outcomes)
    assert strict <= sum(one.meets({"ttft": bound + more}) for one in outcomes) <= len(outcomes)
    assert sum(one.meets({"ttft": bound, "e2el": bound}) for one in outcomes) <= strict
    assert sum(one.meets({}) for one in outcomes) == sum(not one.error for one in outcomes)


@given(loads)
def test_in_flight_is_what_counting_at_every_beginning_gives(outcomes: list[Outcome]) -> None:
    expected = max(sum(o.sent <= at.sent < o.end for o in outcomes) for at in outcomes)
    assert most_in_flight(outcomes) == max(1, expected)


@given(loads)
def test_no_token_is_lost_in_the_output_over_time(outcomes: list[Outcome]) -> None:
    times, rates = output_over_time(outcomes)
    total = sum((b - a) * rate for (a, b), rate in zip(itertools.pairwise(times), rates, strict=False))
    assert total == pytest.approx(sum(one.tokens for one in outcomes), rel=1e-6)


def test_a_token_without_usage_is_an_event() -> None:
    got = summarise([outcome(0.0, [0.1, 0.1])], slos={}, percents=[])
    assert (got["output_tokens"], got["output_tokens_counted_by"]) == (2, "events")
    assert got["input_tokens"] is got["input_throughput"] is got["cached_tokens"] is None


def test_nothing_at_all_is_a_result_too() -> None:
    got = summarise([failed(0.0)], slos={"ttft": 1}, percents=[99])
    assert got["ttft_ms"] is None
    assert got["goodput"] == got["request_throughput"] == 0


def metrics(rate: float) -> dict[str, object]:
    return {"output_throughput": rate, "ttft_ms": {"median": 1000 / rate}}


def test_ratios_are_those_of_the_same_round() -> None:
    """A machine that gets slower from round to round makes no difference to them."""
    slower = [1.0, 0.5, 0.25, 0.2, 0.1, 0.05]
    ours, theirs = ([metrics(rate * speed) for speed in slower] for rate in (110, 100))
    ratio = paired_ratios(ours, theirs)["output_throughput"]
    assert ratio == {"median": 1.1, "lowest": 1.1, "highest": 1.1, "differs": True}
    assert paired_ratios(ours, theirs)["ttft_ms.median"]["median"] == pytest.approx(1 / 1.1, abs=1e-4)
    assert medians(ours)["output_throughput"] == pytest.approx(110 * 0.225)


def test_few_rounds_or_rounds_that_disagree_tell_no_winner() -> None:
    few = [metrics(200.0)] * (NEEDED_ROUNDS - 1), [metrics(100.0)] * (NEEDED_ROUNDS - 1)
    assert paired_ratios(*few)["output_throughput"]["differs"] is False
    ours = [metrics(rate) for rate in (120, 120, 120, 120, 120, 90)]
    assert paired_ratios(ours, [metrics(100.0)] * 6)["output_throughput"]["differs"] is False
