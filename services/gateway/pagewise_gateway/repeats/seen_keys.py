"""A set of 64-bit keys in a fixed amount of memory."""

import numpy as np

from pagewise_gateway.repeats.windows import Hashes, Positions

_WAYS = 4
_SPREAD, _TWO_BITS = np.uint64(0xD6E8FEB86659FD93), np.uint64(62)


class SeenKeys:
    """A set that forgets: a table of buckets of four keys each, as in a set-associative cache.

    A key that comes into a full bucket takes the place of one of the four. So a table of n slots forgets a key after
    about n others that are new.

    Fields:
        num_slots: keys that it has room for. num_bytes: what it takes, however many there are.
        forgotten: keys that others have replaced.
    """

    def __init__(self, num_slots: int) -> None:
        """``num_slots``: a power of two, at least 4."""
        assert num_slots >= _WAYS
        assert num_slots.bit_count() == 1
        self.num_slots = num_slots
        self.forgotten = 0
        self._buckets = np.zeros((num_slots // _WAYS, _WAYS), np.uint64)  # 0: an empty slot
        self._slots = self._buckets.reshape(-1)
        self.num_bytes = self._buckets.nbytes
        self._mask = np.uint64(num_slots // _WAYS - 1)

    def find(self, keys: Hashes) -> Positions:
        """Return the slot of each key, -1 where it is not known."""
        bucket = (keys & self._mask).astype(np.intp)
        equal = self._buckets[bucket] == keys[:, None]
        return np.where(equal.any(axis=1), bucket * _WAYS + equal.argmax(axis=1), -1)

    def add(self, keys: Hashes) -> Positions:
        """Take in keys that are not known. Returns the slot of each."""
        bucket = (keys & self._mask).astype(np.intp)
        empty = self._buckets[bucket] == 0
        free = empty.any(axis=1)
        way = empty.argmax(axis=1)
        if (replaced := len(keys) - int(np.count_nonzero(free))) > 0:
            self.forgotten += replaced
            # The sample prefers small hashes, so the highest bits are spread first.
            way = np.where(free, way, ((keys * _SPREAD) >> _TWO_BITS).astype(np.intp))
        slots: Positions = bucket * _WAYS + way
        self._slots[slots] = keys
        lost = np.flatnonzero(self._slots[slots] != keys)  # two of them have chosen the same slot
        if len(lost):
            slots[lost] = self.add(keys[lost])
        return slots
