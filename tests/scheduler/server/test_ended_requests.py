"""Which of the requests that have ended are remembered."""

from collections import Counter

from pagewise_scheduler.server.ended_requests import EndedRequests
from pagewise_shared.reports import RequestReport, SequenceReport


def record(name: str, key: str, sequences: int = 1) -> RequestReport:
    return RequestReport(
        *(name, "", key, "", "finished", 1, 2, 0, 0, 0, 0, 0, 0.0, None, None),
        arrived=0.0,
        state="ended",
        total_seconds=0.0,
        ended_seconds_ago=0.0,
        executors=[],
        cached_tokens={},
        sequences=[SequenceReport(index, "finished", 1, 1, 2, 0, 0, 0) for index in range(sequences)],
    )


def test_a_busy_key_does_not_push_out_what_is_remembered_of_others() -> None:
    recent = EndedRequests(8)
    for number in range(2):
        recent.add(record(f"quiet-{number}", "quiet"), 1.0)
    for number in range(100):
        recent.add(record(f"busy-{number}", "busy"), 2.0)
    names = [one.request_id for one in recent]
    assert names == ["quiet-0", "quiet-1", *(f"busy-{number}" for number in range(94, 100))]


def test_no_more_are_remembered_however_many_keys_there_are() -> None:
    recent = EndedRequests(8)
    for number in range(100):
        recent.add(record(f"r-{number}", f"key-{number % 30}"), float(number))
        assert len(recent) == len(list(recent)) <= 8
    assert Counter(one.key for one in recent).most_common(1)[0][1] == 1
    assert "r-99" in {one.request_id for one in recent}


def test_one_whose_name_comes_again_is_remembered_once() -> None:
    recent = EndedRequests(2)
    for name in ("a", "b", "a", "c"):
        recent.add(record(name, "key"), 1.0)
    assert [one.request_id for one in recent] == ["a", "c"]


def test_requests_of_many_sequences_take_the_place_of_many() -> None:
    recent = EndedRequests(8)
    recent.add(record("quiet", "quiet", 2), 1.0)
    for number in range(20):
        recent.add(record(f"wide-{number}", "busy", 5), 2.0)
        recent.add(record(f"narrow-{number}", "busy", 0), 2.0)
        assert sum(max(1, len(one.report.sequences)) for one in recent) <= 8
    assert [one.request_id for one in recent] == ["quiet", "wide-19", "narrow-19"]
    recent.add(record("huge", "other", 64), 3.0)
    assert [one.request_id for one in recent] == ["quiet", "wide-19", "narrow-19", "huge"], "the newest stays"
    recent.add(record("next", "other"), 4.0)
    assert [one.request_id for one in recent] == ["quiet", "narrow-19", "next"]
