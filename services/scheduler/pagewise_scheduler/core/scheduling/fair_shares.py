"""Shares of one executor's rows and blocks: a key that has less than its share need not wait for others to end.

The waiting queue decides which key is next. That is not enough where the sequences of another key have all rows or all
blocks, because those run for as long as their outputs are long. So sequences of keys that have more than their share
are preempted for the key that is next and has less. With one key nothing of this happens.

Preempting costs time: what is dropped may have to be computed again. It is bounded in three ways. The one who waits has
to have been next for ``_PATIENCE`` steps, in which nobody left; a sequence is only preempted for another key if it has
got ``_LEAST_PROGRESS`` tokens since it was preempted last; and after each time comes a pause that is so long that
computing again what was dropped takes at most one part in ``_PATIENCE`` of the tokens that the steps can compute.
"""

from collections import Counter
from collections.abc import Iterable

from pagewise_scheduler.core.memory.kv_cache_manager import KVCacheManager
from pagewise_scheduler.core.recovery.cost_model import CostModel
from pagewise_scheduler.core.requests.account import Account
from pagewise_scheduler.core.requests.request import Request, Sequence, SequenceStatus
from pagewise_scheduler.core.scheduling.step_limits import StepLimits
from pagewise_scheduler.core.scheduling.victims import choose_victim
from pagewise_scheduler.core.scheduling.waiting_queue import WaitingQueue

_PATIENCE = 8
"""Steps."""
_LEAST_PROGRESS = 16
"""Output tokens."""


class FairShares:
    """Who has how much of one executor, and who gives way to whom.

    Each key that has requests here has the same share: the rows, and the blocks of the pool, divided by their number.
    ``favoured``: the sequence for which room was made last, until it starts or another one is next.
    """

    def __init__(self, kv: KVCacheManager, waiting: WaitingQueue, limits: StepLimits, costs: CostModel) -> None:
        self.favoured: Sequence | None = None
        self._kv = kv
        self._waiting = waiting
        self._limits = limits
        self._costs = costs
        self._requests: Counter[Account] = Counter()
        self._rows: Counter[Account] = Counter()
        self._next: Sequence | None = None
        self._preempts_at = 0

    # ---- who is here ---------------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """A request comes in."""
        self._requests[request.account] += 1

    def leave(self, request: Request) -> None:
        """A request has ended or leaves."""
        _take_one(self._requests, request.account)

    def clear(self) -> None:
        """All requests leave."""
        self._requests.clear()
        self._next = self.favoured = None
        self._preempts_at = 0

    def take_row(self, sequence: Sequence) -> None:
        """A sequence takes a row."""
        self._rows[sequence.request.account] += 1

    def leave_row(self, sequence: Sequence) -> None:
        """A sequence leaves its row."""
        _take_one(self._rows, sequence.request.account)

    @property
    def contended(self) -> bool:
        """Whether there is more than one key."""
        return len(self._requests) > 1

    @property
    def num_rows(self) -> int:
        """The rows of one key's share."""
        return max(1, self._limits.max_num_seqs // len(self._requests))

    @property
    def num_blocks(self) -> int:
        """The blocks of one key's share."""
        return max(1, self._kv.pool.num_blocks // len(self._requests))

    # ---- who gives way -------------------------------------------------------------------------------

    def may_keep_row(self, sequence: Sequence) -> bool:
        """Whether a hypothesis of a beam search that has left its row may have one at once, for its next token: not if
        its key has its share, and another one is next."""
        if not self.contended or self._rows[sequence.request.account] < self.num_rows:
            return True
        head = self._waiting.peek()
        return head is None or head.request.account is sequence.request.account

    def victim(self, running: list[Sequence]) -> Sequence:
        """Whom to preempt because those that run need more blocks than there are: as with one key (see
        ``choose_victim``), but of keys with the same priority one that has more than its share."""
        if not self.contended:
            return choose_victim(running, self._kv.pool, self._costs)
        lowest = max(sequence.request.priority for sequence in running)
        held = _blocks_of(sequence for sequence in running if sequence.request.priority == lowest)
        most = max(held, key=lambda account: held[account])
        over = most if held[most] > self.num_blocks else None
        return choose_victim(running, self._kv.pool, self._costs, over)

    def waits_in_vain(self, step: int) -> Sequence | None:
        """The sequence that is next if it has been for a while, and room may be made for it before ``step``."""
        if not self.contended:
            return None
        head = self._waiting.peek()
        if head is not self._next:
            self._next, self.favoured = head, None
            self._preempts_at = max(self._preempts_at, step + _PATIENCE)
        return head if step >= self._preempts_at else None

    def victims(
        self, head: Sequence, step: int, running: list[Sequence], *, rows: int, needed: int, missing: int
    ) -> list[Sequence]:
        """Whom to preempt before ``step`` so that ``head`` can start soon; nobody if that would not be enough.

        ``running``: the sequences on rows. ``rows``, ``missing``: how many rows and blocks ``head`` lacks; ``needed``:
        how many blocks it will take.
        """
        self._preempts_at = step + _PATIENCE
        account, held = head.request.account, _blocks_of(running)
        if (rows > 0 and self._rows[account] >= self.num_rows) or held[account] + needed > self.num_blocks:
            return []
        over_rows = {one: number - self.num_rows for one, number in self._rows.items() if number > self.num_rows}
        over_blocks = {one: number - self.num_blocks for one, number in held.items() if number > self.num_blocks}
        candidates = [one for one in running if one.request.account is not account and _gives_way(one, head)]
        chosen: list[Sequence] = []
        dropped = 0
        while rows > 0 or missing > 0:
            victim = self._most_over(over_rows if rows > 0 else over_blocks, candidates)
            if victim is None:
                return []
            freed = sum(1 for block in victim.table.blocks if self._kv.pool.references(block) == 1)
            if rows <= 0 and not freed:
                return []
            candidates.remove(victim)
            chosen.append(victim)
            dropped += freed
            rows, missing = rows - 1, missing - freed
            over_rows[victim.request.account] = over_rows.get(victim.request.account, 0) - 1
            over_blocks[victim.request.account] = over_blocks.get(victim.request.account, 0) - freed
        self.favoured = head
        steps = -(-dropped * self._kv.block_size // self._limits.max_num_batched_tokens)
        self._preempts_at = step + _PATIENCE * max(1, steps)
        return chosen

    def _most_over(self, over: dict[Account, int], candidates: list[Sequence]) -> Sequence | None:
        """Of the key that is the furthest above its share, and has sequences among the candidates."""
        accounts = {sequence.request.account for sequence in candidates}
        above = {account: number for account, number in over.items() if number > 0 and account in accounts}
        if not above:
            return None
        most = max(above, key=lambda account: above[account])
        own = [sequence for sequence in candidates if sequence.request.account is most]
        return choose_victim(own, self._kv.pool, self._costs)


def _gives_way(sequence: Sequence, head: Sequence) -> bool:
    """Whether a running sequence may be preempted for ``head``: no more urgent, and it has got on."""
    decodes = sequence.status is SequenceStatus.DECODE or sequence.request.beam is not None
    progress = len(sequence.output_token_ids) - sequence.num_tokens_preempted
    return decodes and sequence.request.priority >= head.request.priority and progress >= _LEAST_PROGRESS


def _blocks_of(sequences: Iterable[Sequence]) -> Counter[Account]:
    """Blocks that the sequences of each key hold, those that they share counted once."""
    blocks: dict[Account, set[int]] = {}
    for sequence in sequences:
        blocks.setdefault(sequence.request.account, set()).update(sequence.table.blocks)
    return Counter({account: len(held) for account, held in blocks.items()})


def _take_one(counter: Counter[Account], account: Account) -> None:
    counter[account] -= 1
    if not counter[account]:
        del counter[account]
