"""Shares of one executor's rows and blocks: a key that has less than its share need not wait for others to end.

The waiting queue decides which key is next. That is not enough where the sequences of another key have all rows or all
blocks, because those run for as long as their outputs are long. So sequences of keys that have more than their share
are preempted for the key that is next and has less. With one key, nothing is preempted for this reason.

Preemption costs time, because the blocks that are dropped may have to be computed again. Three rules bound that cost:

- A sequence has to be next for ``PATIENCE_STEPS`` steps without being able to start before others are preempted for it.
- A sequence is preempted for another key only if it has generated ``LEAST_PROGRESS`` tokens since its last preemption.
- After a preemption for another key, the next one has to wait until the steps can compute ``PATIENCE_STEPS`` times the
  tokens that were dropped.
"""

import heapq
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pagewise_shared.protocol import DEVICE

from pagewise_scheduler.core.requests.request import Request, Sequence, SequenceStatus
from pagewise_scheduler.core.requests.virtual_tokens import Account
from pagewise_scheduler.core.requests.waiting_queue import WaitingQueue
from pagewise_scheduler.core.tiers.cost_model import CostModel
from pagewise_scheduler.core.tiers.device import BlockPool
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager

if TYPE_CHECKING:
    from pagewise_scheduler.core.scheduling.step import StepLimits

PATIENCE_STEPS = 8
"""How many steps a sequence that is next waits for room before sequences of other keys are preempted for it."""
LEAST_PROGRESS = 16
"""How many output tokens a sequence generates at least between two preemptions for other keys."""
_CANDIDATES = 16
"""How many sequences are weighed when one is to be preempted."""


class FairShares:
    """Counts the requests and rows of each key at one executor, and chooses whom to preempt for other keys.

    All keys that have requests at the executor have the same share: its rows, and the blocks of its pool, divided by
    the number of these keys. ``favoured``: the sequence for which others were preempted last, until it starts or
    another one is next. When it starts, it may take blocks that the watermark keeps free from others.
    """

    def __init__(self, kv: KVCacheManager, waiting: WaitingQueue, limits: "StepLimits", costs: CostModel) -> None:
        self.favoured: Sequence | None = None
        self._kv = kv
        self._waiting = waiting
        self._limits = limits
        self._costs = costs
        self._requests: Counter[Account] = Counter()
        self._rows: Counter[Account] = Counter()
        self._next: Sequence | None = None
        self._preempts_at = 0

    # ---- accounting ---------------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """Count a request that the scheduler takes on."""
        self._requests[request.account] += 1

    def leave(self, request: Request) -> None:
        """Count a request out that has ended or moves to another executor."""
        _take_one(self._requests, request.account)

    def clear(self) -> None:
        """Forget all requests; their rows have been left."""
        self._requests.clear()
        self._next = self.favoured = None
        self._preempts_at = 0

    def take_row(self, sequence: Sequence) -> None:
        """Count a row that the sequence has got."""
        self._rows[sequence.request.account] += 1

    def leave_row(self, sequence: Sequence) -> None:
        """Count a row out that the sequence has left."""
        _take_one(self._rows, sequence.request.account)

    @property
    def contended(self) -> bool:
        """Whether several keys have requests here."""
        return len(self._requests) > 1

    @property
    def num_rows(self) -> int:
        """The rows of one key's share."""
        return max(1, self._limits.max_num_seqs // len(self._requests))

    @property
    def num_blocks(self) -> int:
        """The blocks of one key's share."""
        return max(1, self._kv.pool.num_blocks // len(self._requests))

    # ---- preemption -------------------------------------------------------------------------------

    def may_keep_row(self, sequence: Sequence) -> bool:
        """Whether a hypothesis of a beam search, which leaves its row after every token, may have a row again at once.

        It may not if its key has its share of the rows, and a sequence of another key is next.
        """
        if not self.contended or self._rows[sequence.request.account] < self.num_rows:
            return True
        head = self._waiting.peek()
        return head is None or head.request.account is sequence.request.account

    def victim(self, running: list[Sequence]) -> Sequence:
        """Choose the sequence to preempt when running sequences need more blocks than there are.

        As ``choose_victim`` does; among sequences of the lowest priority, those of the key with the most blocks come
        first if it has more than its share.
        """
        if not self.contended:
            return choose_victim(running, self._kv.pool, self._costs)
        lowest = max(sequence.request.params.priority for sequence in running)
        held = _blocks_of(sequence for sequence in running if sequence.request.params.priority == lowest)
        most = max(held, key=lambda account: held[account])
        over = most if held[most] > self.num_blocks else None
        return choose_victim(running, self._kv.pool, self._costs, over)

    def starved(self, step: int) -> Sequence | None:
        """The sequence that is next, if others may be preempted for it before ``step``: it has waited long enough."""
        if not self.contended:
            return None
        head = self._waiting.peek()
        if head is not self._next:
            self._next, self.favoured = head, None
            self._preempts_at = max(self._preempts_at, step + PATIENCE_STEPS)
        return head if step >= self._preempts_at else None

    def victims(
        self, head: Sequence, step: int, running: list[Sequence], *, rows: int, needed: int, missing: int
    ) -> list[Sequence]:
        """Choose the sequences to preempt before ``step`` so that ``head`` can start soon.

        Returns none if all that may be preempted would not suffice.

        ``running``: the sequences that have rows. ``rows``, ``missing``: the rows and blocks that ``head`` lacks.
        ``needed``: the blocks that it will take.
        """
        self._preempts_at = step + PATIENCE_STEPS
        account, held = head.request.account, _blocks_of(running)
        if (rows > 0 and self._rows[account] >= self.num_rows) or held[account] + needed > self.num_blocks:
            return []
        over_rows = {one: number - self.num_rows for one, number in self._rows.items() if number > self.num_rows}
        over_blocks = {one: number - self.num_blocks for one, number in held.items() if number > self.num_blocks}
        candidates = [one for one in running if one.request.account is not account and _is_preemptible(one, head)]
        chosen: list[Sequence] = []
        dropped = 0
        while rows > 0 or missing > 0:
            victim = self._victim_above_share(over_rows if rows > 0 else over_blocks, candidates)
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
        self._preempts_at = step + PATIENCE_STEPS * max(1, steps)
        return chosen

    def _victim_above_share(self, over: dict[Account, int], candidates: list[Sequence]) -> Sequence | None:
        """The candidate to preempt, of the key that is the furthest above its share; None: there is no such candidate.

        ``over``: rows or blocks by which keys exceed their shares.
        """
        accounts = {sequence.request.account for sequence in candidates}
        above = {account: number for account, number in over.items() if number > 0 and account in accounts}
        if not above:
            return None
        most = max(above, key=lambda account: above[account])
        own = [sequence for sequence in candidates if sequence.request.account is most]
        return choose_victim(own, self._kv.pool, self._costs)


def _is_preemptible(sequence: Sequence, head: Sequence) -> bool:
    """Whether a running sequence may be preempted for ``head``: it is not more urgent, and has made progress."""
    decodes = sequence.status is SequenceStatus.DECODE or sequence.request.params.beam is not None
    progress = len(sequence.output_token_ids) - sequence.num_tokens_preempted
    return decodes and sequence.request.params.priority >= head.request.params.priority and progress >= LEAST_PROGRESS


def _blocks_of(sequences: Iterable[Sequence]) -> Counter[Account]:
    """The number of blocks that the sequences of each key hold; blocks that they share count once."""
    blocks: dict[Account, set[int]] = {}
    for sequence in sequences:
        blocks.setdefault(sequence.request.account, set()).update(sequence.table.blocks)
    return Counter({account: len(held) for account, held in blocks.items()})


def _take_one(counter: Counter[Account], account: Account) -> None:
    counter[account] -= 1
    if not counter[account]:
        del counter[account]


def choose_victim(
    running: list[Sequence], pool: BlockPool, costs: CostModel, account: Account | None = None
) -> Sequence:
    """The sequence to preempt: of the lowest priority, the cheapest to recover per block that really becomes free.

    Only the latest arrivals are weighed, and never the first in line: somebody always gets on. A block that others
    share becomes nobody's gain. ``account``: the key whose sequences are preferred, if it has candidates.
    """
    lowest = max(sequence.request.params.priority for sequence in running)
    first = min(running, key=_arrival_order)
    others = [s for s in running if s.request.params.priority == lowest and s is not first]
    if account is not None:
        others = [s for s in others if s.request.account is account] or others
    latest = heapq.nlargest(_CANDIDATES, others, key=_arrival_order)
    if not latest:
        return first
    return min(latest, key=lambda sequence: _seconds_per_block(sequence, pool, costs))


def _arrival_order(sequence: Sequence) -> tuple[int, float, int]:
    return (*sequence.request.order, sequence.index)


def _seconds_per_block(sequence: Sequence, pool: BlockPool, costs: CostModel) -> float:
    references, blocks = pool.references, sequence.table.blocks
    freed = sum(1 for block in blocks if references(block) == 1)
    if not freed:
        return float("inf")
    start, link = (len(blocks) - freed) * costs.block_size, costs.link_below(DEVICE)
    if link is None:
        return costs.compute_seconds(start, freed * costs.block_size) / freed
    estimate = costs.estimate(start, freed, link)
    return min(estimate.load, estimate.both, estimate.recompute) / freed
