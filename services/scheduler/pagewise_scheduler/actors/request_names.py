"""Finds requests by their names, however many there are: our own ids, and those that clients have given."""

from bisect import bisect_left, insort
from typing import Generic, Protocol, TypeVar


class Named(Protocol):
    """What has the names of a request."""

    @property
    def request_id(self) -> str:
        """Our own id."""
        ...

    @property
    def client_request_id(self) -> str:
        """Its client's."""
        ...

    @property
    def key(self) -> str:
        """The name of its API key."""
        ...


NamedT = TypeVar("NamedT", bound=Named)


class RequestNames(Generic[NamedT]):
    """An index of requests by both names. One that a key may not see takes as long to look up as an unknown one."""

    def __init__(self) -> None:
        self._requests: dict[str, tuple[float, NamedT]] = {}
        self._given: dict[tuple[str, str], list[tuple[float, str]]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, request: NamedT, arrived: float) -> None:
        """Add a request in the place of another one with the same id of ours. ``arrived``: seconds of any clock."""
        if (before := self._requests.get(request.request_id)) is not None:
            self.remove(before[1])
        self._requests[request.request_id] = arrived, request
        for place in self._places(request):
            insort(self._given.setdefault(place, []), (arrived, request.request_id))

    def remove(self, request: NamedT) -> None:
        """Forget a request, unless another one has taken its place."""
        arrived, known = self._requests.get(request.request_id, (0.0, None))
        if known is not request:
            return
        del self._requests[request.request_id]
        for place in self._places(request):
            given = self._given[place]
            del given[bisect_left(given, (arrived, request.request_id))]
            if not given:
                del self._given[place]

    def newest(self, name: str, key: str) -> NamedT | None:
        """Return the request of this id, ours before its client's, of which the newest counts; None: there is none.

        ``key``: the API key that it belongs to; "": any.
        """
        _, own = self._requests.get(name, (0.0, None))
        given = self._given.get((key, name))
        if own is not None and key in ("", own.key):
            return own
        return self._requests[given[-1][1]][1] if given else None

    @staticmethod
    def _places(request: Named) -> set[tuple[str, str]]:
        """Under which keys and names of its client's a request is found."""
        name = request.client_request_id
        return {(request.key, name), ("", name)} if name else set()
