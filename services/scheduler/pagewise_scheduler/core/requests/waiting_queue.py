"""The queue of sequences that wait for admission: by priority and arrival, with ageing, and in turn between keys."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import count
from typing import Literal, NamedTuple

from pagewise_scheduler.core.requests.request import Request, RequestSequence, SequenceStatus
from pagewise_scheduler.core.requests.virtual_tokens import Account, VirtualTokens

AGEING_SECONDS = 60.0
"""A request overtakes requests of the next better priority that arrived this much after it, so that none starves."""

_Entry = tuple[float, int, int, int, RequestSequence]
"""Queue time, number of the request, index of the output, number of the entry, and the sequence."""


def queue_time(sequence: RequestSequence) -> float:
    """See ``queue_time_of``, for the sequence's request."""
    return queue_time_of(sequence.request)


def queue_time_of(request: Request) -> float:
    """Seconds. Of the requests of a key, the one with the smallest queue time is served first.

    Linear ageing never changes the order of two requests, so the time is fixed: no queue has to be sorted again.
    """
    return request.arrival_time + AGEING_SECONDS * request.params.priority


class QueueLoad(NamedTuple):
    """A number of sequences, and the prompt tokens of their requests."""

    sequences: int = 0
    tokens: int = 0

    def plus(self, other: "QueueLoad") -> "QueueLoad":
        """The sum."""
        return QueueLoad(self.sequences + other.sequences, self.tokens + other.tokens)

    def minus(self, other: "QueueLoad") -> "QueueLoad":
        """The difference."""
        return QueueLoad(self.sequences - other.sequences, self.tokens - other.tokens)

    def fits(self, most: "QueueLoad") -> bool:
        """Whether neither number exceeds its limit in ``most``."""
        return self.sequences <= most.sequences and self.tokens <= most.tokens


class KeyLoads:
    """The load of requests that wait outside of the waiting queues: ``total``, and of each API key."""

    def __init__(self) -> None:
        self.total = QueueLoad()
        self._of_key: dict[str, QueueLoad] = {}

    def of(self, key: str) -> QueueLoad:
        """The load of one key."""
        return self._of_key.get(key, QueueLoad())

    def add(self, key: str, load: QueueLoad) -> None:
        """A request begins to wait."""
        self.total = self.total.plus(load)
        self._of_key[key] = self.of(key).plus(load)

    def remove(self, key: str, load: QueueLoad) -> None:
        """The counterpart of ``add``."""
        self.total = self.total.minus(load)
        left = self._of_key.pop(key).minus(load)
        if left != QueueLoad():
            self._of_key[key] = left


class WaitingQueue:
    """A sorted line for each priority and key.

    The sequence with the smallest ``queue_time`` determines the priority that is next. Among the keys with sequences of
    that priority or a better one, the key that has been served the least is next, with its sequence of the smallest
    ``queue_time``. With one key, this is the order of ``queue_time``. Better priorities take part because otherwise a
    priority that is next by its age would overtake all keys that have no sequence of that priority.

    ``num_prompt_tokens``: prompt tokens of the waiting requests. ``num_changes``: how often a sequence has come or
    gone.
    """

    def __init__(self, virtual_tokens: VirtualTokens | None = None) -> None:
        self.num_prompt_tokens = self.num_changes = 0
        self._virtual_tokens = virtual_tokens or VirtualTokens()
        self._lines: dict[int, dict[Account, list[_Entry]]] = {}
        self._entries: dict[RequestSequence, _Entry] = {}
        self._numbers = count()
        self._first_ones: dict[Request, int] = {}
        self._pending: dict[Request, int] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        """The waiting sequences of clients' requests, including sequences that are still to be created."""
        return self._num_waiting

    def __bool__(self) -> bool:
        return bool(self._entries)

    def account(self, key: str) -> Account:
        """The account of a key, which all queues with the same virtual tokens share."""
        return self._virtual_tokens.account(key)

    def arrive(self, request: Request) -> None:
        """A request arrives; the caller pushes its sequences that have been created next."""
        request.account = self._virtual_tokens.account(request.params.key)
        request.queue_number = next(self._numbers)
        self._virtual_tokens.arrive(request.account)
        self.count_pending(request)

    def push(self, sequence: RequestSequence) -> None:
        """Let a sequence wait. A preempted one comes before sequences of its key that arrived after it, and before
        later outputs of its request."""
        sequence.status = SequenceStatus.WAITING
        request = sequence.request
        entry = queue_time(sequence), request.queue_number, sequence.index, next(self._numbers), sequence
        self._entries[sequence] = entry
        self.num_changes += 1
        insort(self._lines.setdefault(request.params.priority, {}).setdefault(request.account, []), entry)
        if request.computes_for is not None:
            return
        self._num_waiting += 1
        tokens = self._prompt_tokens(sequence, 1)
        self._virtual_tokens.wait(request.account, tokens)
        self.num_prompt_tokens += tokens

    def count_pending(self, request: Request) -> None:
        """Update how many sequences of a request count as waiting because they are still to be created."""
        more = request.num_pending - self._pending.pop(request, 0)
        if request.num_pending:
            self._pending[request] = request.num_pending
        self._num_waiting += more
        if more > 0:
            self._virtual_tokens.wait(request.account, 0, more)
        elif more:
            self._virtual_tokens.leave(request.account, 0, -more)

    def peek(self) -> RequestSequence | None:
        """The sequence that is next, left in the queue."""
        return next(iter(self.heads(1)), None)

    def heads(self, number: int) -> list[RequestSequence]:
        """The first sequence of each key that may be next: at most ``number``, in order."""
        lines = self._next_lines()
        if len(lines) > 1:
            return [line[0][-1] for _, line in heapq.nsmallest(number, lines.items(), key=_turn)]
        return [line[0][-1] for line in lines.values()]

    def window(self, head: RequestSequence, number: int) -> list[RequestSequence]:
        """Of the first ``number`` sequences of the head's key, from ``head`` on, the ones of its priority."""
        account, priority, start = head.request.account, head.request.params.priority, self._entries[head]
        lines = [line for lines in self._lines.values() if (line := lines.get(account)) is not None]
        if len(lines) == 1:
            return [entry[-1] for entry in lines[0][:number]]
        parts = [line[(first := bisect_left(line, start)) : first + number] for line in lines]
        entries = sorted(entry for part in parts for entry in part)[:number]
        return [entry[-1] for entry in entries if entry[-1].request.params.priority == priority]

    def take(self, sequence: RequestSequence, status: SequenceStatus) -> None:
        """Remove a waiting sequence and give it another status. If a further sequence of its request is pending, it is
        created and waits from now on."""
        request = sequence.request
        self._remove(sequence)
        sequence.status = status
        if request.num_pending and sequence is request.sequences[-1]:
            self.push(request.create_next())
            self.count_pending(request)

    def withdraw(self, request: Request) -> None:
        """Remove all sequences of a request, also the ones that are still to be created."""
        for sequence in request.sequences:
            if sequence in self._entries:
                self._remove(sequence)
        self.forget_pending(request)

    def forget_pending(self, request: Request) -> None:
        """Stop counting the sequences of a request that are still to be created."""
        if pending := self._pending.pop(request, 0):
            self._num_waiting -= pending
            self._virtual_tokens.leave(request.account, 0, pending)

    def _remove(self, sequence: RequestSequence) -> None:
        entry, request = self._entries.pop(sequence), sequence.request
        self.num_changes += 1
        lines = self._lines[request.params.priority]
        line = lines[request.account]
        del line[bisect_left(line, entry)]
        if not line:
            del lines[request.account]
            if not lines:
                del self._lines[request.params.priority]
        if request.computes_for is not None:
            return
        self._num_waiting -= 1
        tokens = self._prompt_tokens(sequence, -1)
        self._virtual_tokens.leave(request.account, tokens)
        self.num_prompt_tokens -= tokens

    def clear(self) -> None:
        """Remove all sequences."""
        for sequence in self._entries:
            if sequence.request.computes_for is not None:
                continue
            self._virtual_tokens.leave(sequence.request.account, self._prompt_tokens(sequence, -1))
        for request, pending in self._pending.items():
            self._virtual_tokens.leave(request.account, 0, pending)
        self._lines.clear()
        self._entries.clear()
        self._pending.clear()
        self.num_prompt_tokens = self._num_waiting = 0

    def __iter__(self) -> Iterator[RequestSequence]:
        """Waiting sequences of all keys by ``queue_time``."""
        return (entry[-1] for entry in sorted(self._entries.values()))

    def _prompt_tokens(self, sequence: RequestSequence, change: Literal[1, -1]) -> int:
        """The prompt tokens by which the queue changes with a sequence: a request's prompt counts once."""
        if sequence.index:
            return 0
        request = sequence.request
        before = self._first_ones.pop(request, 0)  # several: all hypotheses of a beam search have the index 0
        if before + change:
            self._first_ones[request] = before + change
        return sequence.num_prompt_tokens if min(before, before + change) == 0 else 0

    def _next_lines(self) -> dict[Account, list[_Entry]]:
        """For each key that may be next, the line with its first sequence."""
        if len(self._lines) > 1:
            last = min(self._lines, key=lambda priority: min(line[0] for line in self._lines[priority].values()))
            first: dict[Account, list[_Entry]] = {}
            for priority, lines in self._lines.items():
                if priority <= last:
                    for account, line in lines.items():
                        if account not in first or line[0] < first[account][0]:
                            first[account] = line
            return first
        for lines in self._lines.values():
            return lines
        return {}


def _turn(of_key: tuple[Account, list[_Entry]]) -> tuple[float, _Entry]:
    account, line = of_key
    return account.served, line[0]
