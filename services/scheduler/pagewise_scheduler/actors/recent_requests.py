"""Keeps reports of requests that have ended, so that a busy API key does not push out those of others."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import msgspec

from pagewise_scheduler.actors.request_names import RequestNames
from pagewise_scheduler.core.memory_reports import RequestReport, later
from pagewise_scheduler.core.requests.request import Request

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RequestReport).decode


class EndedRequest(NamedTuple):
    """A request that has ended: its id, its key, and what it held when its report was made.

    ``time``: when that was, in seconds of ``clock``. ``packed``: the report as msgpack, which takes a fraction of the
    memory. ``num_sequences``: in the report; one without any counts as one, because it takes memory as well.
    """

    request_id: str
    key: str
    num_sequences: int
    time: float
    packed: bytes

    @property
    def report(self) -> RequestReport:
        """The report, unpacked."""
        return _decode(self.packed)


class RecentRequests:
    """Keeps at most ``most`` sequences in all, or more if the newest request alone has more.

    Beyond that, the oldest requests of the key that has the most sequences are dropped. Sequences are counted, not
    requests, because a report takes memory for each of them.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._of_keys: dict[str, OrderedDict[str, EndedRequest]] = {}
        self._sequences: Counter[str] = Counter()
        self._names: RequestNames[EndedRequest] = RequestNames()

    def add(self, report: RequestReport, now: float) -> None:
        """Keep a report that was made at ``now``, in seconds of ``clock``."""
        name, key, size = report.request_id, report.key, max(1, len(report.sequences))
        if name in self._of_keys.get(key, ()):
            self._drop(key, name)
        ended = EndedRequest(name, key, size, now, _encode(report))
        self._of_keys.setdefault(key, OrderedDict())[name] = ended
        self._names.add(ended, report.client_request_id, key, now - report.arrived_seconds_ago)
        self._sequences[key] += size
        while self._sequences.total() > self._most:
            widest, _ = self._sequences.most_common(1)[0]
            oldest = next(iter(self._of_keys[widest].values()))
            if oldest is ended:
                break
            self._drop(widest, oldest.request_id)

    def _drop(self, key: str, request_id: str) -> None:
        dropped = self._of_keys[key].pop(request_id)
        self._names.remove(dropped)
        self._sequences[key] -= dropped.num_sequences
        if not self._of_keys[key]:
            del self._of_keys[key], self._sequences[key]

    def __iter__(self) -> Iterator[EndedRequest]:
        """Yield each of them, in order for each key."""
        for own in self._of_keys.values():
            yield from own.values()

    def latest(self, most: int) -> Iterator[EndedRequest]:
        """The last ``most`` of each key, the newest first: those that ended last are among them."""
        for own in self._of_keys.values():
            yield from islice(reversed(own.values()), most)

    def newest_called(self, name: str, key: str, now: float) -> RequestReport | None:
        """The report of the newest request that is called so, as of ``now``; None: there is none."""
        ended = self._names.newest(name, key)
        return None if ended is None else later(ended.report, now - ended.time)


def newest_called(requests: Iterable[Request], name: str) -> Request | None:
    """The newest of the requests that have this id, one of our own before its client's; None: there is none."""
    found = [one for one in requests if name in (one.request_id, one.params.client_request_id)]
    return min(found, key=lambda one: (one.request_id != name, -one.arrival_time), default=None)
