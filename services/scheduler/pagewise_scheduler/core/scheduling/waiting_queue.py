"""The queue of sequences that wait for admission, in order of priority, then arrival."""

import heapq
from collections.abc import Iterator
from itertools import count

from pagewise_scheduler.core.scheduling.request import Sequence, SequenceStatus


class WaitingQueue:
    """A heap of waiting sequences; one that was aborted while it waited is skipped when it comes up."""

    __slots__ = ("_heap", "_length", "_tie")

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, Sequence]] = []
        self._tie = count()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait; a preempted one comes before those that arrived after it."""
        sequence.status = SequenceStatus.WAITING
        priority, arrival = sequence.request.order
        heapq.heappush(self._heap, (priority, arrival, next(self._tie), sequence))
        self._length += 1

    def peek(self) -> Sequence | None:
        """The sequence that is next, left in the queue."""
        heap = self._heap
        while heap and heap[0][3].status is not SequenceStatus.WAITING:
            heapq.heappop(heap)
        return heap[0][3] if heap else None

    def pop(self) -> Sequence:
        """Take the sequence that is next.

        Raises:
            IndexError: nothing waits.
        """
        if self.peek() is None:
            raise IndexError("pop from an empty waiting queue")
        self._length -= 1
        return heapq.heappop(self._heap)[3]

    def clear(self) -> None:
        """Let nobody wait any more. Unlike ``discard``, this lets a sequence be pushed again."""
        self._heap.clear()
        self._length = 0

    def discard(self, sequence: Sequence, status: SequenceStatus) -> None:
        """Take a waiting sequence out by giving it another status."""
        assert sequence.status is SequenceStatus.WAITING
        sequence.status = status
        self._length -= 1
        if len(self._heap) > 64 and self._length * 2 < len(self._heap):
            # Most entries are dead: without this, aborted requests would keep their prompts in memory.
            self._heap = [entry for entry in self._heap if entry[3].status is SequenceStatus.WAITING]
            heapq.heapify(self._heap)

    def __iter__(self) -> Iterator[Sequence]:
        """Waiting sequences in no particular order."""
        return (entry[3] for entry in self._heap if entry[3].status is SequenceStatus.WAITING)
