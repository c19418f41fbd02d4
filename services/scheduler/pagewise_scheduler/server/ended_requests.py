"""Keeps a record of requests that have ended, so that a busy API key does not push out those of others."""

import logging
import time
import traceback
from collections import Counter, OrderedDict
from collections.abc import Iterator
from itertools import islice
from time import monotonic as clock
from typing import NamedTuple

import msgspec
from msgspec import Struct
from pagewise_shared.logs import BoundedLog

from pagewise_scheduler.core.explanation import Explanation, explain
from pagewise_scheduler.core.inspection import request_report, unplaced_report
from pagewise_scheduler.core.memory_reports import RequestReport
from pagewise_scheduler.server.client_request import ClientRequest
from pagewise_scheduler.server.request_names import RequestNames

log = logging.getLogger(__name__)

MOST_SEQUENCES = 2048
"""Sequences of all requests that are remembered, over all API keys and executors."""
_LISTED = 64
"""Sequences of one request, and events of each, that its record lists."""


class Record(Struct):
    """Where the time of a request went, and what it held, at its end."""

    explanation: Explanation
    report: RequestReport


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


class EndedRequest(NamedTuple):
    """A request that has ended at ``time``, in seconds of ``clock``.

    ``packed``: its record as msgpack, which takes a fraction of the memory. ``num_sequences``: in the record; one
    without any counts as one, because it takes memory as well.
    """

    request_id: str
    key: str
    num_sequences: int
    time: float
    packed: bytes

    @property
    def record(self) -> Record:
        """The record, unpacked."""
        return _decode(self.packed)


class EndedRequests:
    """Keeps at most ``most`` sequences in all, or more if the newest request alone has more.

    Beyond that, the oldest requests of the key that has the most sequences are dropped. Sequences are counted, not
    requests, because a record takes memory for each of them.
    """

    def __init__(self, most: int = MOST_SEQUENCES) -> None:
        self._most = most
        self._complaints = BoundedLog(log)
        self._of_keys: dict[str, OrderedDict[str, EndedRequest]] = {}
        self._sequences: Counter[str] = Counter()
        self._names: RequestNames[EndedRequest] = RequestNames()

    def ended(self, live: ClientRequest) -> None:
        """Keep the record of a request of which nothing runs any more, and which still has its sequences.

        The request ends whatever happens here: an error is logged, and there is no record of it then.
        """
        try:
            now = clock()
            if live.executor is None:
                report = unplaced_report(live, now)
            else:
                report = request_report(live, live.executor.scheduler, now, _LISTED)
            report.ended_seconds_ago = 0.0
            self.add(Record(explain(live, now, time.time() - now, ended=True), report), now)
        except Exception:
            self._complaints.warning("request %s cannot be explained: %s", live.request_id, traceback.format_exc())

    def add(self, record: Record, now: float) -> None:
        """Keep a record that was made at ``now``, in seconds of ``clock``."""
        report = record.report
        name, key, size = report.request_id, report.key, max(1, len(report.sequences))
        if name in self._of_keys.get(key, ()):
            self._drop(key, name)
        ended = EndedRequest(name, key, size, now, _encode(record))
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
        """The last ``most`` of each key, the newest first: those that ended last are among them."""
        for own in self._of_keys.values():
            yield from islice(reversed(own.values()), most)

    def newest(self, name: str, key: str) -> EndedRequest | None:
        """The newest request that is called so, by our id or its client's; None: there is none for this key to see."""
        return self._names.newest(name, key)
