"""Keeps reports of requests that have ended, so that a busy API key does not push out those of others."""

from collections import OrderedDict
from collections.abc import Iterator

from pagewise_scheduler.core.memory_reports import RequestReport


class RecentRequests:
    """Keeps ``most`` reports. Beyond that, the oldest report of the key that has the most reports is dropped."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._of_keys: dict[str, OrderedDict[str, tuple[RequestReport, float]]] = {}

    def add(self, report: RequestReport, now: float) -> None:
        """Keep a report that was made at ``now``, in seconds of ``clock``."""
        own = self._of_keys.setdefault(report.key, OrderedDict())
        self._count += report.request_id not in own
        own[report.request_id] = report, now
        own.move_to_end(report.request_id)
        if self._count > self._most:
            key = max(self._of_keys, key=lambda key: len(self._of_keys[key]))
            self._of_keys[key].popitem(last=False)
            self._count -= 1
            if not self._of_keys[key]:
                del self._of_keys[key]

    def __iter__(self) -> Iterator[tuple[RequestReport, float]]:
        """Yield each report, and when it was made."""
        for own in self._of_keys.values():
            yield from own.values()
