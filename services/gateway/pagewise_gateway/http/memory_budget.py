"""A bound on the memory of all requests of a gateway, of which each API key may use a part."""

from collections.abc import Callable

from pagewise_gateway.http.errors import OverloadedError

SHARE = 4
"""An API key may use this fraction of the memory: one part in ``SHARE``."""


class MemoryBudget:
    """Counts the bytes that requests take for one purpose, all together and by API key.

    Fields:
        total: the most bytes of all requests. share: the most bytes of one API key, if there are keys.
    """

    def __init__(self, total: int, share: int, *, what: str, option: str, refused: Callable[[bool], None]) -> None:
        """``what``: what the bytes are for, in the plural. ``option``: the option that sets ``total``. ``refused`` is
        called when there are not enough bytes; its argument says whether the key's share was the reason."""
        self.total, self.share = total, share
        self._what, self._option, self._refused = what, option, refused
        self._used = 0
        self._by_key: dict[str, int] = {}

    @property
    def used(self) -> int:
        """The number of bytes that are taken."""
        return self._used

    def reserve(self, key: str, size: int) -> None:
        """Take bytes for a request of a key's holder.

        Raises:
            OverloadedError: the key's share or the total does not suffice; nothing was taken.
        """
        used = self._by_key.get(key, 0)
        if key and used + size > self.share:
            self._refused(True)
            raise OverloadedError(
                f"API key {key}: {self._what} of its requests take {used} bytes, and this one needs {size}; the limit "
                f"is {self.share} (a part of {self._option})"
            )
        if self._used + size > self.total:
            self._refused(False)
            raise OverloadedError(
                f"{self._what} of requests take {self._used} bytes, and this one needs {size}; the limit is "
                f"{self.total} ({self._option})"
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
    """The bytes that are taken for one request. ``size``: their number."""

    def __init__(self, memory: MemoryBudget, key: str) -> None:
        self.size = 0
        self._memory, self._key = memory, key

    def grow_to(self, size: int) -> None:
        """Take the bytes that are missing to ``size``.

        Raises:
            OverloadedError: as in ``MemoryBudget.reserve``.
        """
        if size > self.size:
            self._memory.reserve(self._key, size - self.size)
            self.size = size

    def shrink_to(self, size: int) -> None:
        """Give back the bytes beyond ``size``."""
        if size < self.size:
            self._memory.release(self._key, self.size - size)
            self.size = size

    def release(self) -> None:
        """Give all bytes back. Calling it again does nothing."""
        self.shrink_to(0)
