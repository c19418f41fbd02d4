"""Finds requests by our own ids and by the ids that clients have given, fast however many requests there are."""

from bisect import bisect_left, insort
from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Named(Protocol):
    """Something about one request."""

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
    """An index of requests by both names. One that a key may not see takes as long to look up as an unknown one."""

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
