"""Explains requests: where their time went, and where their prefixes were lost. Keeps the last that have ended."""

import logging
import time
import traceback
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec
from msgspec.structs import replace
from pagewise_shared.logs import BoundedLog
from pagewise_shared.protocol import Query

from pagewise_scheduler.actors.clock import clock
from pagewise_scheduler.actors.engine import Engine
from pagewise_scheduler.actors.live_request import LiveRequest
from pagewise_scheduler.actors.recent_requests import is_called, newest_called
from pagewise_scheduler.core.explanation import Explanation, explain, seen_by
from pagewise_scheduler.core.explanation_text import sentences

log = logging.getLogger(__name__)

MOST_EXPLANATIONS = 2048
"""Explanations of requests that have ended, over all API keys."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Explanation).decode


class _Ended(NamedTuple):
    """``packed``: as msgpack, which takes a fraction of the memory."""

    request_id: str
    client_request_id: str
    key: str
    arrived: float
    packed: bytes


class Explanations:
    """Keeps at most ``most`` explanations; beyond that, the oldest of the key that has the most go first.

    ``live``: the requests that have not ended. ``engines``: all that there are now.
    """

    def __init__(
        self,
        live: Callable[[], Iterable[LiveRequest]],
        engines: Callable[[], Iterable[Engine]],
        most: int = MOST_EXPLANATIONS,
    ) -> None:
        self._complaints = BoundedLog(log)
        self._engines = engines
        self._live = live
        self._most = most
        self._of_keys: dict[str, OrderedDict[str, _Ended]] = {}
        self._sizes: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._sizes.total()

    def ended(self, live: LiveRequest) -> None:
        """Keep the explanation of a request of which nothing runs any more, and which still has its sequences.

        The request ends whatever happens here: an error is logged, and there is no explanation of it then.
        """
        try:
            self._keep(live)
        except Exception:
            self._complaints.warning(
                "request %s cannot be explained: %s", live.request.request_id, traceback.format_exc()
            )

    def _keep(self, live: LiveRequest) -> None:
        request, now = live.request, clock()
        told = explain(request, now, time.time() - now, ended=True)
        kept = self._of_keys.setdefault(request.key, OrderedDict())
        if kept.pop(request.request_id, None) is None:
            self._sizes[request.key] += 1
        name, theirs = request.request_id, request.client_request_id
        kept[name] = _Ended(name, theirs, request.key, told.arrived, _encode(told))
        if len(self) > self._most:
            self._drop_one()

    def _drop_one(self) -> None:
        key, _ = self._sizes.most_common(1)[0]
        self._of_keys[key].popitem(last=False)
        self._sizes[key] -= 1
        if not self._sizes[key]:
            del self._sizes[key], self._of_keys[key]

    def answer(self, query: Query) -> bytes | None:
        """The explanation of a request, by our id or its client's, as JSON; None: there is none for this key to see."""
        if not query.argument or (told := self._find(query.argument, query.key)) is None:
            return None
        if query.key:
            told = seen_by(told, query.key)
        names = {engine.scheduler.recoveries.endpoint: engine.executor_id for engine in self._engines()}
        told.recoveries = [replace(one, peer=names.get(one.peer or "")) for one in told.recoveries]
        told.sentences = sentences(told)
        return msgspec.json.encode(told)

    def _find(self, name: str, key: str) -> Explanation | None:
        """The newest request that is called so, by our own id before any that a client has given."""
        now = clock()
        newest = newest_called((one.request for one in self._live()), name, key)
        found = [] if newest is None else [explain(newest, now, time.time() - now)]
        # All are looked at, whosever they are: how long this takes tells nobody which ids others have.
        ended = [one for kept in self._of_keys.values() for one in kept.values() if is_called(one, name, key)]
        if ended:
            found.append(_decode(min(ended, key=lambda one: (one.request_id != name, -one.arrived)).packed))
        return min(found, key=lambda one: (one.request_id != name, -one.arrived), default=None)
