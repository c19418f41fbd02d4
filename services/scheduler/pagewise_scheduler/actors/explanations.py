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

from pagewise_scheduler.actors.client_request import ClientRequest
from pagewise_scheduler.actors.clock import clock
from pagewise_scheduler.actors.engine import Engine
from pagewise_scheduler.actors.request_names import RequestNames
from pagewise_scheduler.core.explanation import Explanation, explain, seen_by
from pagewise_scheduler.core.explanation_text import sentences
from pagewise_scheduler.core.requests.request import Request

log = logging.getLogger(__name__)

MOST_EXPLANATIONS = 2048
"""Explanations of requests that have ended, over all API keys."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Explanation).decode


class _Ended(NamedTuple):
    """``packed``: as msgpack, which takes a fraction of the memory."""

    request_id: str
    packed: bytes


class Explanations:
    """Keeps at most ``most`` explanations; beyond that, the oldest of the key that has the most go first.

    ``live``: finds the newest request that has not ended by its name and key, as ``RequestNames.newest``. ``engines``:
    all that there are now.
    """

    def __init__(
        self,
        live: Callable[[str, str], Request | None],
        engines: Callable[[], Iterable[Engine]],
        most: int = MOST_EXPLANATIONS,
    ) -> None:
        self._complaints = BoundedLog(log)
        self._engines = engines
        self._live = live
        self._most = most
        self._of_keys: dict[str, OrderedDict[str, _Ended]] = {}
        self._sizes: Counter[str] = Counter()
        self._names: RequestNames[_Ended] = RequestNames()

    def __len__(self) -> int:
        return self._sizes.total()

    def ended(self, live: ClientRequest) -> None:
        """Keep the explanation of a request of which nothing runs any more, and which still has its sequences.

        The request ends whatever happens here: an error is logged, and there is no explanation of it then.
        """
        try:
            self._keep(live)
        except Exception:
            self._complaints.warning("request %s cannot be explained: %s", live.request_id, traceback.format_exc())

    def _keep(self, request: ClientRequest) -> None:
        now = clock()
        told = explain(request, now, time.time() - now, ended=True)
        name, key = request.request_id, request.params.key
        kept = self._of_keys.setdefault(key, OrderedDict())
        if kept.pop(name, None) is None:
            self._sizes[key] += 1
        kept[name] = ended = _Ended(name, _encode(told))
        self._names.add(ended, request.params.client_request_id, key, told.arrived)
        if len(self) > self._most:
            self._drop_one()

    def _drop_one(self) -> None:
        key, _ = self._sizes.most_common(1)[0]
        _, dropped = self._of_keys[key].popitem(last=False)
        self._names.remove(dropped)
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
        newest, ended = self._live(name, key), self._names.newest(name, key)
        found = [] if newest is None else [explain(newest, now, time.time() - now)]
        if ended is not None:
            found.append(_decode(ended.packed))
        return min(found, key=lambda one: (one.request_id != name, -one.arrived), default=None)
