"""The sequences that compute one token in every step, and calendars of the steps in which they need a block or end.

All of them advance in lockstep. So it is known steps ahead in which step a sequence crosses a block boundary or reaches
its length, and this is filed under the step's number. A step in which nothing is due costs nothing per sequence. Only a
draft brings its sequence further; the sequence is filed anew then.
"""

from collections import defaultdict

from pagewise_scheduler.core.requests.request import RequestSequence, SequenceStatus
from pagewise_scheduler.core.requests.virtual_tokens import OUTPUT_WEIGHT, Account

_Calendar = defaultdict[int, dict[RequestSequence, None]]


class DecodeSet:
    """Ordered set of decoding sequences; the executor keeps its rows in the same order."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._members: dict[RequestSequence, None] = {}
        self._accounts: dict[Account, float] = {}
        self._order: list[RequestSequence] | None = None
        self._block_calendar: _Calendar = defaultdict(dict)
        self._length_calendar: _Calendar = defaultdict(dict)

    def __len__(self) -> int:
        return len(self._members)

    def order(self) -> list[RequestSequence]:
        """Members in order. The list is never changed afterwards, so a step in flight can keep it."""
        if self._order is None:
            self._order = list(self._members)
        return self._order

    def add(self, sequence: RequestSequence, first_step: int) -> None:
        """Let a sequence decode from ``first_step`` on, where it computes position ``num_scheduled_tokens``."""
        sequence.status = SequenceStatus.DECODE
        sequence.decode_base = sequence.num_scheduled_tokens
        self._file(sequence, first_step, sequence.decode_base)
        self._members[sequence] = None
        self._order = None
        account = sequence.request.account
        self._accounts[account] = self._accounts.get(account, 0.0) + OUTPUT_WEIGHT
        account.served += OUTPUT_WEIGHT  # for the token that the end of its prefill samples

    def remove(self, sequence: RequestSequence) -> None:
        """Remove a member."""
        del self._members[sequence]
        self._order = None
        self._unfile(sequence)
        account = sequence.request.account
        self._accounts[account] -= OUTPUT_WEIGHT
        if not self._accounts[account]:
            del self._accounts[account]

    def go_on(self, sequence: RequestSequence, step: int, position: int) -> None:
        """File a member anew, which computes ``position`` in ``step``: a draft has brought it further than one token,
        or has brought it blocks that it does not need yet."""
        self._unfile(sequence)
        self._file(sequence, step, position)

    def charge(self) -> None:
        """Charge the accounts of the members' keys for a token of each member, in a time per key, not per member."""
        for account, weight in self._accounts.items():
            account.served += weight

    def length_due(self, step: int) -> list[RequestSequence]:
        """Members that have nothing left to compute in ``step``: their last token is in flight or has come back."""
        return list(self._length_calendar[step]) if step in self._length_calendar else []

    def blocks_due(self, step: int) -> list[RequestSequence]:
        """Members that write the first slot of a new block in ``step``."""
        return list(self._block_calendar[step]) if step in self._block_calendar else []

    def take_blocks_due(self, step: int) -> list[RequestSequence]:
        """Remove and return the members of ``blocks_due``, which get their blocks now: they are due again one block
        later."""
        due, later = self._block_calendar.pop(step, {}), step + self._block_size
        for sequence in due:
            sequence.block_due = later
        if due:
            self._block_calendar[later].update(due)
        return list(due)

    def _file(self, sequence: RequestSequence, step: int, position: int) -> None:
        """Enter a sequence into the calendars that computes ``position`` in ``step``, and then one more per step."""
        sequence.block_due = step + sequence.table.num_slots - position
        # The step before has sampled token position + 1; each step from this one on samples one more.
        sequence.length_due = max(step, step + sequence.run_until - position - 1)
        self._block_calendar[sequence.block_due][sequence] = None
        self._length_calendar[sequence.length_due][sequence] = None

    def _unfile(self, sequence: RequestSequence) -> None:
        calendars = (self._block_calendar, sequence.block_due), (self._length_calendar, sequence.length_due)
        for calendar, step in calendars:
            del calendar[step][sequence]
            if not calendar[step]:
                del calendar[step]
