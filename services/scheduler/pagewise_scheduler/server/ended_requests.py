"""Finds requests by their names, and keeps the reports of requests that have ended.

A busy API key does not push out the reports of other keys.
"""

import logging
import time
import traceback
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from time import monotonic as clock
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec
from pagewise_shared.logs import BoundedLog
from pagewise_shared.reports import RequestReport

from pagewise_scheduler.core.request_report import request_report
from pagewise_scheduler.server.client_request import ClientRequest

log = logging.getLogger(__name__)

MOST_SEQUENCES = 2048
"""Sequences of all requests that are remembered, over all API keys and executors."""
_LISTED = 64
"""Sequences, blocks and events that the report of one request lists."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RequestReport).decode


class Named(Protocol):
    """A record of one request."""

    @property
    def request_id(self) -> str:
        """Our own id."""
        ...


NamedT = TypeVar("NamedT", bound=Named)


@dataclass(slots=True)
class _Entry(Generic[NamedT]):
    arrived: float
    places: Collection[tuple[str, str]]
    key: str
    request: NamedT


class RequestNames(Generic[NamedT]):
    """An index of requests by both names. The look-up of a request that a key may not see takes as long as of an
    unknown one."""

    def __init__(self) -> None:
        self._requests: dict[str, _Entry[NamedT]] = {}
        self._given: dict[tuple[str, str], list[tuple[float, str]]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, request: NamedT, name: str, key: str, arrived: float) -> None:
        """Add a request in the place of another one with the same id of ours.

        ``name``: its client's id, "" if it has none. ``key``: name of its API key. ``arrived``: seconds of any clock.
        """
        if (before := self._requests.get(request.request_id)) is not None:
            self.remove(before.request)
        places: Collection[tuple[str, str]] = {(key, name), ("", name)} if name else ()
        self._requests[request.request_id] = _Entry(arrived, places, key, request)
        for place in places:
            insort(self._given.setdefault(place, []), (arrived, request.request_id))

    def remove(self, request: NamedT) -> None:
        """Forget a request, unless another one has taken its place."""
        entry = self._requests.get(request.request_id)
        if entry is None or entry.request is not request:
            return
        del self._requests[request.request_id]
        for place in entry.places:
            given = self._given[place]
            del given[bisect_left(given, (entry.arrived, request.request_id))]
            if not given:
                del self._given[place]

    def newest(self, name: str, key: str) -> NamedT | None:
        """Return the request of this id, ours before its client's, of which the newest counts; None: there is none.

        ``key``: the API key that it belongs to; "": any.
        """
        own = self._requests.get(name)
        given = self._given.get((key, name))
        if own is not None and key in ("", own.key):
            return own.request
        return self._requests[given[-1][1]].request if given else None


class EndedRequest(NamedTuple):
    """A request that has ended at ``time``, in seconds of ``clock``.

    ``packed``: its report as msgpack, which takes a fraction of the memory. ``num_sequences``: in the report; a report
    without any counts as one, because it takes memory as well.
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


class EndedRequests:
    """Keeps at most ``most`` sequences in all, or more if the newest request alone has more.

    Beyond that, the oldest requests of the key that has the most sequences are dropped. Sequences are counted, not
    requests, because a report takes memory for each of them.
    """

    def __init__(self, most: int = MOST_SEQUENCES) -> None:
        self._most = most
        self._complaints = BoundedLog(log)
        self._of_keys: dict[str, OrderedDict[str, EndedRequest]] = {}
        self._sequences: Counter[str] = Counter()
        self._names: RequestNames[EndedRequest] = RequestNames()

    def ended(self, live: ClientRequest) -> None:
        """Keep the report of a request of which nothing runs any more, and which still has its sequences.

        The request ends even if that fails: the error is logged, and there is no report of it then.
        """
        try:
            now, scheduler = clock(), live.executor.scheduler if live.executor is not None else None
            self.add(request_report(live, scheduler, now, _LISTED, time.time() - now, ended=True), now)
        except Exception:
            self._complaints.warning("request %s cannot be explained: %s", live.request_id, traceback.format_exc())

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
            widest = max(self._sequences, key=self._sequences.__getitem__)
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

    def __len__(self) -> int:
        return sum(map(len, self._of_keys.values()))

    def __iter__(self) -> Iterator[EndedRequest]:
        """Yield each of them, in order for each key."""
        for own in self._of_keys.values():
            yield from own.values()

    def latest(self, most: int) -> Iterator[EndedRequest]:
        """Yield the last ``most`` of each key, the newest first: the last ``most`` of all are among them."""
        for own in self._of_keys.values():
            yield from islice(reversed(own.values()), most)

    def newest(self, name: str, key: str) -> EndedRequest | None:
        """Return the newest request with this id, ours or its client's; None: there is none that this key may see."""
        return self._names.newest(name, key)
