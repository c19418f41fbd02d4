"""Fair shares of one executor's rows and blocks, by preemption.

The waiting queue decides which key is next. That is not enough where the sequences of another key have all rows or all
blocks, because they run for as long as their outputs are long. So sequences of keys that have more than their share
are preempted for the key that is next and has less. With one key, the feature is not in use.

Preemption costs time, because the dropped blocks may have to be computed again. Three rules bound that cost:

- A sequence has to be next for ``PATIENCE_STEPS`` steps without being able to start before others are preempted for it.
- A sequence is preempted for another key only if it has generated ``LEAST_PROGRESS`` tokens since its last preemption.
- After a preemption for another key, the next one has to wait until the steps can compute ``PATIENCE_STEPS`` times the
  tokens that were dropped.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pagewise_scheduler.core.features.feature import Feature
from pagewise_scheduler.core.memory.block_table import BlockTable
from pagewise_scheduler.core.requests.request import Request, RequestSequence, SequenceStatus
from pagewise_scheduler.core.requests.virtual_tokens import Account

if TYPE_CHECKING:
    from pagewise_scheduler.core.scheduling.scheduler import Scheduler

PATIENCE_STEPS = 8
"""How many steps a sequence that is next waits for room before sequences of other keys are preempted for it."""
LEAST_PROGRESS = 16
"""How many output tokens a sequence generates at least between two preemptions for other keys."""


class FairShares(Feature):
    """Chooses the sequences to preempt for other keys.

    All keys that have requests at the executor have the same share: its rows, and the blocks of its pool, divided by
    the number of these keys. The sequence for which others were preempted last is ``Admission.favoured`` until it
    starts or another one is next: it may take the blocks of the watermark, so that the preemption was not in vain.
    """

    def __init__(self, scheduler: "Scheduler") -> None:
        super().__init__(scheduler)
        self._kv, self._admission = scheduler.kv, scheduler.prefilling.admission
        self._requests_of: dict[Account, set[Request]] = {}
        self.clear()
        for request in scheduler.requests:  # of the first key, which was alone up to now
            request.features = (*request.features, self)
        for request in scheduler.entered.values():
            self.entered(request)

    def clear(self) -> None:
        self._requests_of.clear()
        self._next: RequestSequence | None = None
        self._admission.favoured = None
        self._preempts_at = 0

    def entered(self, request: Request) -> None:
        self._requests_of.setdefault(request.account, set()).add(request)

    def leave(self, request: Request, last_step: int) -> None:
        self.taken_back(request)

    def taken_back(self, request: Request) -> None:
        requests = self._requests_of.get(request.account, set())
        requests.discard(request)
        if not requests:
            self._requests_of.pop(request.account, None)

    @property
    def contended(self) -> bool:
        """Whether several keys have requests here."""
        return len(self._requests_of) > 1

    def may_rejoin(self, sequence: RequestSequence) -> bool:
        # Otherwise a beam search, whose hypotheses leave their rows after each token, would keep its rows for ever.
        head, account = self.scheduler.waiting.peek(), sequence.request.account
        if head is None or head.request.account is account or not self.contended:
            return True
        return _rows_of(self.scheduler.running)[account] < self._share(self.scheduler.limits.max_num_seqs)

    def _share(self, number: int) -> int:
        """One key's share of ``number`` rows or blocks."""
        return max(1, number // len(self._requests_of))

    def victim(self, running: list[RequestSequence]) -> RequestSequence | None:
        """Among sequences of the lowest priority, a sequence of the key that has the most blocks, if it has more than
        its share."""
        if not self.contended:
            return None
        lowest = max(sequence.request.params.priority for sequence in running)
        held = self._blocks_of(sequence for sequence in running if sequence.request.params.priority == lowest)
        account, most = held.most_common(1)[0]
        over = most > self._share(self._kv.num_total)
        return self.scheduler.recoveries.planner.choose_victim(running, account) if over else None

    def begin_step(self, step: int) -> None:
        """Preempt for the sequence that is next, if it has waited long enough and can start then."""
        head = self.scheduler.waiting.peek()
        if head is not self._next:
            if not self.contended:
                return
            self._next, self._admission.favoured = head, None
            self._preempts_at = max(self._preempts_at, step + PATIENCE_STEPS)
        if head is None or step < self._preempts_at or not self.contended:
            return
        needed = self.scheduler.prefilling.num_needed(head, self.scheduler.steps_in_flight)
        for victim in self._victims(head, step, needed) if needed is not None else ():
            self.scheduler.preempt(victim, "another key has less than its share", head)

    def _victims(self, head: RequestSequence, step: int, needed: int) -> list[RequestSequence]:
        """The sequences to preempt before ``step`` so that ``head`` can start soon, which takes ``needed`` blocks; none
        if no choice suffices."""
        scheduler, kv = self.scheduler, self._kv
        self._preempts_at = step + PATIENCE_STEPS
        running = scheduler.running
        rows, held = _rows_of(running), self._blocks_of(running)
        row_share, block_share = self._share(scheduler.limits.max_num_seqs), self._share(kv.num_total)
        lacks_row, missing = self._lacks(needed)
        account = head.request.account
        if (lacks_row and rows[account] >= row_share) or held[account] + needed > block_share:
            return []
        over_rows, over_blocks = Counter(rows), Counter(held)
        over_rows.subtract(dict.fromkeys(rows, row_share))
        over_blocks.subtract(dict.fromkeys(held, block_share))
        candidates = [one for one in running if _is_preemptible(one, head)]
        chosen: dict[RequestSequence, int] = {}
        while lacks_row or missing > sum(chosen.values()):
            victim = self._victim_above_share(over_rows if lacks_row else over_blocks, candidates)
            earlier = (one.table for one in chosen)
            if victim is None or not (frees := lacks_row + kv.num_freed(victim.table, earlier)):
                return []
            chosen[victim] = frees - lacks_row
            candidates.remove(victim)
            over_rows[victim.request.account] -= 1
            over_blocks[victim.request.account] -= chosen[victim]
            lacks_row = False
        self._admission.favoured = head
        tokens = sum(chosen.values()) * kv.block_size // kv.num_for_next
        steps = -(-tokens // scheduler.limits.max_num_batched_tokens)
        self._preempts_at = step + PATIENCE_STEPS * max(1, steps)
        return list(chosen)

    def _lacks(self, needed: int) -> tuple[bool, int]:
        """Whether a sequence that takes ``needed`` blocks lacks a row, and how many blocks it lacks."""
        scheduler, kv = self.scheduler, self._kv
        num_decoding, in_flight = len(scheduler.decoding), len(scheduler.steps_in_flight)
        # Blocks that are freed now are available only after the steps in flight. Until then decoding sequences take
        # further blocks, ``coming`` on average.
        coming = (1 + (1 + in_flight) * num_decoding // kv.block_size) * kv.num_for_next
        owed = scheduler.prefilling.blocks_owed()
        missing = needed + owed + coming - kv.num_available - kv.num_retiring
        return not scheduler.prefilling.has_row(num_decoding), missing

    def _blocks_of(self, sequences: Iterable[RequestSequence]) -> Counter[Account]:
        """The number of blocks that the sequences of each key hold; blocks that they share count once."""
        tables = defaultdict[Account, list[BlockTable]](list)
        for sequence in sequences:
            tables[sequence.request.account].append(sequence.table)
        return Counter({account: self._kv.num_held(held) for account, held in tables.items()})

    def _victim_above_share(
        self, over: dict[Account, int], candidates: list[RequestSequence]
    ) -> RequestSequence | None:
        """The candidate to preempt, of the key that is the furthest above its share; None: no key is above its share.

        ``over``: the rows or blocks by which each key exceeds its share.
        """
        accounts = {sequence.request.account for sequence in candidates}
        most = max(filter(accounts.__contains__, over), key=over.__getitem__, default=None)
        if most is None or over[most] <= 0:
            return None
        return self.scheduler.recoveries.planner.choose_victim(
            [one for one in candidates if one.request.account is most]
        )


def _is_preemptible(sequence: RequestSequence, head: RequestSequence) -> bool:
    """Whether a running sequence may be preempted for ``head``, of another key: it is not more urgent, and has made
    progress."""
    request = sequence.request
    if request.account is head.request.account or request.params.priority < head.request.params.priority:
        return False
    # Sequences that never decode, such as hypotheses, run one token at a time too.
    decodes = sequence.status is SequenceStatus.DECODE or not all(one.decodes(sequence) for one in request.features)
    return decodes and len(sequence.output_token_ids) - sequence.num_tokens_preempted >= LEAST_PROGRESS


def _rows_of(running: Iterable[RequestSequence]) -> Counter[Account]:
    return Counter(sequence.request.account for sequence in running)
