"""When a silent process is suspected: neither before its heartbeats let one, nor after the upper bound."""

from hypothesis import given
from hypothesis import strategies as st
from pagewise_shared.failure_detector import FailureDetector

LEAST, MOST = 1.5, 10.0

gaps = st.lists(st.floats(0.001, 9.9), max_size=300)


def after(gaps: list[float], least: float = LEAST, most: float = MOST) -> tuple[FailureDetector, float]:
    """A detector that has heard heartbeats with these gaps, and the time of the last one."""
    detector, now = FailureDetector(0.0, least=least, most=most), 0.0
    detector.beat(now)
    for gap in gaps:
        detector.beat(now := now + gap)
    return detector, now


@given(gaps, st.floats(0.0, 30.0))
def test_the_bounds_hold_whatever_was_measured(gaps: list[float], silence: float) -> None:
    detector, now = after(gaps)
    suspected = detector.suspects(now + silence)
    assert not (suspected and silence < LEAST - 1e-6)
    assert suspected or silence < MOST + 1e-6


@given(gaps, st.floats(0.0, 30.0), st.floats(0.0, 30.0))
def test_who_is_suspected_stays_so_until_something_is_heard(gaps: list[float], one: float, other: float) -> None:
    detector, now = after(gaps)
    sooner, later = sorted((one, other))
    assert detector.suspects(now + later) or not detector.suspects(now + sooner)
    detector.heard(now + later)
    assert not detector.suspects(now + later)


@given(gaps)
def test_the_time_out_follows_the_longest_gap_of_the_last_minute(gaps: list[float]) -> None:
    detector, _ = after(gaps)
    if len(gaps) < 8:
        assert (detector.longest_gap, detector.timeout) == (None, MOST)
    else:
        longest = max(gaps[-240:])
        assert abs((detector.longest_gap or 0.0) - longest) < 1e-6
        assert abs(detector.timeout - min(MOST, max(LEAST, 3 * longest))) < 1e-5


@given(st.lists(st.floats(0.001, 3.0), min_size=8, max_size=300), st.floats(0.0, 1.0))
def test_a_pause_like_those_before_is_no_reason_for_suspicion(gaps: list[float], share: float) -> None:
    detector, now = after(gaps)
    assert not detector.suspects(now + share * max(gaps[-240:]))


@given(gaps, st.floats(0.0, 100.0), st.floats(0.0, 1.4))
def test_seconds_in_which_the_caller_stood_still_are_not_silence(gaps: list[float], still: float, rest: float) -> None:
    detector, now = after(gaps)
    before = detector.timeout
    now += still
    detector.stood_still(still, now)
    assert not detector.suspects(now + rest)
    detector.beat(now + rest)  # nor are they a gap: the measured gaps are as long as the rest
    assert detector.timeout <= max(before, LEAST, 3 * rest + 1e-6)


@given(st.floats(0.01, 0.5), st.integers(1, 20))
def test_further_signs_of_life_change_no_gap(gap: float, signs: int) -> None:
    """An executor sends results at any moment; only the rhythm of its heartbeats determines how late one may be."""
    detector, now = FailureDetector(0.0, least=LEAST, most=MOST), 0.0
    for _ in range(20):
        for sign in range(signs):
            detector.heard(now + gap * sign / signs)
        detector.beat(now := now + gap)
    assert abs((detector.longest_gap or 0.0) - gap) < 1e-6


def test_an_upper_bound_below_the_lower_one_wins() -> None:
    detector, now = after([0.25] * 20, most=0.5)
    assert (detector.suspects(now + 0.4), detector.suspects(now + 0.6)) == (False, True)
