"""The values of snapshots of states: each is valued by itself, as they are few, large, and differ in what they save."""

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagewise_scheduler.core.tiers.snapshots import Snapshot


class StateQueue:
    """Snapshots by the ``value`` of a page of each, the lowest first; ``value`` returns None for one that was dropped.

    Values change with time, and with the neighbours of a snapshot. A value that has risen is noticed when its turn
    comes, one that has fallen when all are valued again: after as many changes as a share of them.
    """

    def __init__(self, value: Callable[["Snapshot"], float | None]) -> None:
        self._value = value
        self._heap: list[tuple[float, int, Snapshot]] = []
        self._tie, self._until_look = 0, 1

    def push(self, snapshot: "Snapshot", rank: int) -> None:
        """A snapshot is new, or it was used."""
        self._tie += 1
        snapshot.entry = self._tie
        if (value := self._value(snapshot)) is not None:
            heapq.heappush(self._heap, (value, self._tie, snapshot))
        self._changed()

    def pop(self) -> "Snapshot | None":
        """Take the snapshot that goes first; None: there is none."""
        if (snapshot := self.peek()) is not None:
            heapq.heappop(self._heap)
            self._changed()
        return snapshot

    def peek(self) -> "Snapshot | None":
        """The snapshot that goes first."""
        while self._heap:
            known, tie, snapshot = self._heap[0]
            value = self._value(snapshot) if snapshot.entry == tie else None
            if value is None:
                heapq.heappop(self._heap)
            elif value > known:
                heapq.heapreplace(self._heap, (value, tie, snapshot))
            else:
                return snapshot
        return None

    def _changed(self) -> None:
        self._until_look -= 1
        if not self._until_look:
            live = [(self._value(one), tie, one) for _, tie, one in self._heap if one.entry == tie]
            self._heap = [(value, tie, one) for value, tie, one in live if value is not None]
            heapq.heapify(self._heap)
            self._until_look = 8 + len(self._heap) // 8

    def shrink(self, num_evictable: int) -> None:
        """Entries that are of no use go whenever all are valued."""
