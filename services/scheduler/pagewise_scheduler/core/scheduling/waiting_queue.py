"""The queue of sequences that wait for admission, in order of priority and arrival, with ageing."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import count, islice

from pagewise_scheduler.core.scheduling.request import Sequence, SequenceStatus

AGEING_SECONDS = 60.0
"""A request overtakes those of the next better priority that arrived this much after it, so that nothing starves."""


def queue_time(sequence: Sequence) -> float:
    """Who has the smaller one goes first.

    Linear ageing never changes the order of two sequences, so it is fixed: no queue has to be sorted again.
    """
    return sequence.request.arrival_time + AGEING_SECONDS * sequence.request.priority


class WaitingQueue:
    """A sorted list of waiting sequences."""

    __slots__ = ("_entries", "_keys", "_tie")

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Sequence]] = []
        self._keys: dict[Sequence, tuple[float, int]] = {}
        self._tie = count()

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait; a preempted one comes before those that arrived after it."""
        sequence.status = SequenceStatus.WAITING
        key = queue_time(sequence), next(self._tie)
        self._keys[sequence] = key
        insort(self._entries, (*key, sequence))

    def peek(self) -> Sequence | None:
        """The sequence that is next, left in the queue."""
        return self._entries[0][2] if self._entries else None

    def first(self, number: int) -> list[Sequence]:
        """The first ``number`` sequences at most, in order."""
        return [entry[2] for entry in islice(self._entries, number)]

    def take(self, sequence: Sequence, status: SequenceStatus) -> None:
        """Take a waiting sequence out and give it another status."""
        del self._entries[bisect_left(self._entries, self._keys.pop(sequence))]
        sequence.status = status

    def clear(self) -> None:
        """Let nobody wait any more."""
        self._entries.clear()
        self._keys.clear()

    def __iter__(self) -> Iterator[Sequence]:
        """Waiting sequences in order."""
        return (entry[2] for entry in self._entries)
