"""How much memory the bodies of requests may take before the requests run."""

from pagewise_gateway.http.errors import OverloadedError
from pagewise_gateway.metrics import Metrics

SHARE = 4
"""An API key may use one part in so many."""


class BodyMemory:
    """The bytes of all bodies that this gateway is reading, parsing or tokenizing.

    Fields:
        total: how many there may be. largest: how many one body may have.
        share: how many of all may belong to one API key; without keys, all of them.
    """

    def __init__(self, total: int, largest_body: int, metrics: Metrics) -> None:
        self.total, self.largest = total, largest_body
        self.share = max(total // SHARE, largest_body)
        self._metrics = metrics
        self._used = 0
        self._by_key: dict[str, int] = {}
        metrics.http_body_bytes.set_function(lambda: self._used)

    def reserve(self, key: str, size: int) -> None:
        """Take bytes for a body of a key's holder.

        Raises:
            OverloadedError: the key's share, or all there is, does not suffice; nothing was taken.
        """
        used = self._by_key.get(key, 0)
        if key and used + size > self.share:
            self._metrics.requests_refused("key_body_memory").inc()
            raise OverloadedError(
                f"API key {key}: the bodies of its requests take {used} bytes, and this one needs {size}; the limit is "
                f"{self.share} (a part of --max-body-memory)"
            )
        if self._used + size > self.total:
            self._metrics.requests_refused("body_memory").inc()
            raise OverloadedError(
                f"the bodies of requests take {self._used} bytes, and this one needs {size}; the limit is {self.total} "
                "(--max-body-memory)"
            )
        self._used += size
        self._by_key[key] = used + size

    def release(self, key: str, size: int) -> None:
        """Give bytes back."""
        self._used -= size
        self._by_key[key] -= size
        if not self._by_key[key]:
            del self._by_key[key]


class Reservation:
    """The bytes that are taken for one body. ``size``: how many."""

    def __init__(self, memory: BodyMemory, key: str) -> None:
        self.size = 0
        self._memory, self._key = memory, key

    def grow_to(self, size: int) -> None:
        """Take what is missing.

        Raises:
            OverloadedError: as in ``BodyMemory.reserve``.
        """
        if size > self.size:
            self._memory.reserve(self._key, size - self.size)
            self.size = size

    def release(self) -> None:
        """Give all back; harmless the second time."""
        if self.size:
            self._memory.release(self._key, self.size)
            self.size = 0
