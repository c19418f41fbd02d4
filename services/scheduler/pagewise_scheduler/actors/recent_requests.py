"""Keeps reports of requests that have ended, so that a busy API key does not push out those of others."""

from collections import Counter, OrderedDict
from collections.abc import Iterator

from pagewise_scheduler.core.memory_reports import RequestReport


class RecentRequests:
    """Keeps reports of at most ``most`` sequences in all, or more if the newest request alone makes them more.

    Beyond that, the oldest requests of the key that has the most sequences are dropped. Sequences are counted, not
    requests, because a report takes memory for each of them.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._of_keys: dict[str, OrderedDict[str, tuple[RequestReport, float]]] = {}
        self._sequences: Counter[str] = Counter()

    def add(self, report: RequestReport, now: float) -> None:
        """Keep a report that was made at ``now``, in seconds of ``clock``."""
        if report.request_id in self._of_keys.get(report.key, ()):
            self._drop(report.key, report.request_id)
        self._of_keys.setdefault(report.key, OrderedDict())[report.request_id] = report, now
        self._sequences[report.key] += _size(report)
        while self._sequences.total() > self._most:
            key, _ = self._sequences.most_common(1)[0]
            oldest = next(iter(self._of_keys[key]))
            if oldest == report.request_id and key == report.key:
                break
            self._drop(key, oldest)

    def _drop(self, key: str, request_id: str) -> None:
        report, _ = self._of_keys[key].pop(request_id)
        self._sequences[key] -= _size(report)
        if not self._of_keys[key]:
            del self._of_keys[key], self._sequences[key]

    def __iter__(self) -> Iterator[tuple[RequestReport, float]]:
        """Yield each report, and when it was made."""
        for own in self._of_keys.values():
            yield from own.values()


def _size(report: RequestReport) -> int:
    """Return how many sequences a report counts as; one without any takes memory as well."""
    return max(1, len(report.sequences))
