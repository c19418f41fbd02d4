"""The limits of API keys, counted by the scheduler."""

import pytest
from pagewise_scheduler.metrics import Metrics
from pagewise_scheduler.server.request_limits import AdmissionError, KeyUsages
from pagewise_shared.protocol import KeyLimits


def test_gateways_that_disagree_about_a_limit_do_not_lift_it() -> None:
    """One of them has not read the new file of keys yet; all requests come in the same second."""
    usages, taken = KeyUsages(Metrics("m")), 0
    for number in range(1000):
        usage = usages.of("k", KeyLimits(requests_per_minute=10 if number % 2 else 11), 0.0)
        try:
            usage.begin(0.0)
        except AdmissionError:
            continue
        taken += 1
        usage.end(1.0)
    assert taken in (10, 11)


def test_what_a_key_has_used_stays_used_when_its_limit_changes() -> None:
    usages = KeyUsages(Metrics("m"))
    for _ in range(8):
        usages.of("k", KeyLimits(requests_per_minute=10), 0.0).begin(0.0)
    usage = usages.of("k", KeyLimits(requests_per_minute=20), 0.0)
    for _ in range(12):
        usage.begin(0.0)
    with pytest.raises(AdmissionError, match="requests per minute"):
        usage.begin(0.0)


def test_requests_that_are_not_accepted_use_nothing() -> None:
    usage = KeyUsages(Metrics("m")).of("k", KeyLimits(concurrent=1, requests_per_minute=2), 0.0)
    usage.begin(0.0)
    usage.end(60.0)
    for _ in range(20):  # the queue is full
        usage.begin(0.0)
        usage.cancel(charged=False)
    usage.begin(0.0)
    with pytest.raises(AdmissionError) as refused:
        usage.begin(0.0)
    assert refused.value.retry_after is not None
    assert refused.value.retry_after > 10, "as long as requests of this key take"
