"""Prompts that are being computed: how far each prefill gets in a step."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING
from weakref import proxy

from pagewise_shared.protocol.limits import MAX_JOINED_BYTES

from pagewise_scheduler.core.memory.block_table import CachedPrefix
from pagewise_scheduler.core.requests.request import RequestSequence, SequenceStatus
from pagewise_scheduler.core.requests.timeline import Activity, WaitCause
from pagewise_scheduler.core.requests.virtual_tokens import OUTPUT_WEIGHT, PROMPT_WEIGHT
from pagewise_scheduler.core.requests.waiting_queue import queue_time
from pagewise_scheduler.core.scheduling.admission import Admission
from pagewise_scheduler.core.scheduling.missed_prefix import find_missed
from pagewise_scheduler.core.scheduling.step import Chunks, StepInFlight
from pagewise_scheduler.core.tiers.recovery_plan import RecoveryPlan

if TYPE_CHECKING:
    from pagewise_scheduler.core.scheduling.scheduler import Scheduler

_WATERMARK = 0.01
"""The share of all blocks that stay free at admission while sequences run."""


class PrefillSet:
    """Ordered set of sequences in prefill.

    ``admission``: chooses which sequences start. ``activity``: counts the work for which waiting sequences wait.
    ``num_queries``: tokens of requests that started for the first time; ``num_hits``: the tokens of them found on the
    device.
    """

    def __init__(self, scheduler: "Scheduler") -> None:
        self._kv, self._waiting, self._recoveries = scheduler.kv, scheduler.waiting, scheduler.recoveries
        self._limits, self._plan, self._features = scheduler.limits, scheduler.plan, scheduler.features
        self._free_rows, self._num_rows = scheduler.free_rows, len(scheduler.free_rows)
        self._scheduler = proxy(scheduler)  # see ``Scheduler.features``
        self.num_queries = self.num_hits = 0
        self.admission, self.activity = Admission(self._kv, self._waiting), Activity()
        self._held: set[RequestSequence] = set()
        self._members: dict[RequestSequence, None] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[RequestSequence]:
        return iter(self._members)

    def clear(self) -> None:
        """All requests leave; their sequences have left their rows."""
        self._held.clear()

    def remove(self, sequence: RequestSequence) -> None:
        """Remove a member."""
        del self._members[sequence]

    def rejoin(self, sequence: RequestSequence) -> bool:
        """Give a row to a sequence that has kept its blocks and knows one more token; False: there is no room."""
        if self._num_rows - len(self._free_rows) >= self._limits.max_num_seqs or self._plan_is_full:
            return False
        if (
            sequence.table.cache_salt != sequence.cache_salt
            or self._kv.num_to_write(sequence.table) > self._kv.num_available
        ):
            return False
        if not all(feature.may_rejoin(sequence) for feature in self._features.in_use):
            return False
        sequence.status = SequenceStatus.PREFILL
        self._take_row(sequence)
        sequence.num_scheduled_tokens = sequence.num_computed_tokens = sequence.num_tokens - 1
        sequence.request.account.served += OUTPUT_WEIGHT
        if self._kv.windows:  # blocks behind the windows go before the plan names them, not with the chunk
            self.grow_windows(sequence, sequence.num_tokens - 1, sequence.num_tokens - 1)
        self._join(sequence, sequence.num_tokens - 1)
        return True

    def _join(self, sequence: RequestSequence, num_computed: int) -> None:
        self._members[sequence] = None
        self._plan.join(sequence, num_computed, self._kv.pool.tree.root_hash(sequence.table.cache_salt))
        for feature in sequence.request.features:
            feature.joined(sequence)

    def _take_row(self, sequence: RequestSequence) -> None:
        sequence.row = self._free_rows.pop()
        sequence.prefilled = False

    def has_row(self, num_decoding: int) -> bool:
        """Whether a sequence could take a row beside the members and ``num_decoding`` decoding sequences."""
        return bool(self._free_rows) and num_decoding + len(self._members) < self._limits.max_num_seqs

    def num_needed(self, head: RequestSequence, in_flight: Sequence[StepInFlight]) -> int | None:
        """The blocks that a waiting sequence takes when it starts; None: it could not start if it had more room."""
        self._note_computing(in_flight)
        return self.admission.num_needed(head, in_flight[0].step if in_flight else None)

    def chunks(self, budget: int, num_decoding: int, in_flight: Sequence[StepInFlight], now: float) -> Chunks:
        """The known tokens that a step computes, at most ``budget``: chunks of members and of sequences that start.

        ``now``: seconds.
        """
        for sequence, num_computed in self._recoveries.settle(now):
            sequence.num_scheduled_tokens = num_computed
            self._plan.computed.append((sequence.row, num_computed))
        # All in the order of the waiting queue: members that come before its head, then the sequences that start, then
        # the other members. Otherwise a long prompt would hold up an urgent one for all of its chunks.
        members, head = sorted(self._members, key=queue_time), self._waiting.peek()
        first = len(members) if head is None else bisect_right(members, queue_time(head), key=queue_time)
        chunks = self._continued(members[:first], budget)
        budget -= _num_computed(chunks)
        started = self._started(budget, num_decoding, in_flight, now)
        budget -= _num_computed(started)
        chunks += self._continued(members[first:], budget) + started
        if self.admission.held or self._held:
            self._note_held(now)
        cause = self._cause(budget, num_decoding) if head is not None and self._waiting else None
        self.activity.planned(num_decoding, chunks, cause, now)
        return chunks

    def _note_held(self, now: float) -> None:
        """Note in timelines which requests wait for a grammar or a prefix from this step on, or do not any more."""
        before, self._held = self._held, set()
        for sequence, (cause, computes) in self.admission.held.items():
            if sequence.index == 0 and sequence.status is SequenceStatus.WAITING:
                sequence.request.timeline.held(cause, computes, now)
                self._held.add(sequence)
        for sequence in before - self._held:
            sequence.request.timeline.released(now)

    def _cause(self, budget: int, num_decoding: int) -> WaitCause:
        """The resource that waiting sequences lack. ``budget``: the tokens that the planned step has left."""
        if not self.has_row(num_decoding):
            return "rows"
        if budget <= 0 or self._plan_is_full:
            return "prefill"
        return "memory" if self.admission.lacked_room else "turn"

    def _continued(self, members: list[RequestSequence], budget: int) -> Chunks:
        """Schedule the next chunks of ``members``, as far as tokens and blocks suffice."""
        chunks: Chunks = []
        for sequence in members:
            table = sequence.table
            start, kv = sequence.num_scheduled_tokens, self._kv
            room = table.num_slots - start + kv.num_available // kv.num_for_next * kv.block_size
            size = min(self._size(sequence, budget), room)
            if size <= 0:
                continue
            held = len(table.blocks)
            sequence.num_scheduled_tokens += size
            if kv.windows:
                self.grow_windows(sequence, start, sequence.num_scheduled_tokens)
            added, copies = kv.grow(table, sequence.num_scheduled_tokens)
            self._plan.copy(copies)
            self._plan.set_blocks(sequence.row, held, added)
            chunks.append(self._chunk(sequence, size))
            budget -= sequence.num_to_compute(size)
        return chunks

    def grow_windows(self, sequence: RequestSequence, start: int, stop: int, ends: Sequence[int] = ()) -> None:
        """Let a sequence hold the windows of its tokens from ``start`` to ``stop``, and states at the end of each of
        ``ends`` blocks."""
        self._kv.eviction_history.reserves_for(sequence.table.owner)
        added, copies = self._kv.grow_windows(sequence.table, start, stop, self._scheduler.newest_in_flight, ends)
        self._plan.copy(copies)
        joins = sequence not in self._members and sequence.status is not SequenceStatus.DECODE
        self._plan.set_windows(sequence.row, added, joins=joins)

    def _started(self, budget: int, num_decoding: int, in_flight: Sequence[StepInFlight], now: float) -> Chunks:
        """Start waiting sequences and schedule their first chunks, while all their known tokens fit beside the running
        sequences."""
        chunks: Chunks = []
        if budget <= 0 or not self._waiting:
            self.admission.held.clear()  # no sequence is chosen in this step
            return chunks
        # Running prefills take their blocks chunk by chunk. The blocks that they have yet to take count as taken:
        # otherwise sequences would start that preempt each other before they have computed a token.
        owed = self.blocks_owed()
        self._note_computing(in_flight)
        oldest = in_flight[0].step if in_flight else None
        share = 1.0 - num_decoding / self._limits.max_num_batched_tokens
        while budget > 0 and self.has_row(num_decoding) and not self._plan_is_full:
            watermark = self._watermark(num_decoding + len(self._members))
            start = self.admission.next(self._kv.num_available - owed, oldest, watermark)
            if start is None:
                break
            sequence, prefix = start
            if size := self._start(sequence, prefix, budget, share, now):
                chunks.append(self._chunk(sequence, size))
                budget -= sequence.num_to_compute(size)
            self.admission.computing_too(sequence)
            owed += self._kv.num_missing(sequence.table, sequence.num_tokens)
        return chunks

    def _chunk(self, sequence: RequestSequence, size: int) -> tuple[RequestSequence, int]:
        """The chunk of the last ``size`` tokens that were scheduled."""
        for feature in sequence.request.features:
            feature.add_chunk(sequence, sequence.num_scheduled_tokens - size, sequence.num_scheduled_tokens)
        return sequence, size

    def num_spare(self, num_decoding: int) -> int:
        """The available blocks, without the blocks that members have yet to take and the watermark."""
        return self._kv.num_available - self.blocks_owed() - self._watermark(num_decoding + len(self._members))

    def blocks_owed(self) -> int:
        """The number of blocks that members have yet to take for their known tokens."""
        return sum(self._kv.num_missing(sequence.table, sequence.num_tokens) for sequence in self._members)

    def _note_computing(self, in_flight: Sequence[StepInFlight]) -> None:
        """Report to admission which prompts are being computed, also by steps in flight, or fetched."""
        self.admission.computing(chain(self._members, (one for step in in_flight for one, _ in step.computed)))
        for feature in self._features.in_use:
            for table, tokens in feature.coming():
                self.admission.coming(table, tokens)

    def _start(self, sequence: RequestSequence, prefix: CachedPrefix, budget: int, share: float, now: float) -> int:
        """Start a waiting sequence behind its cached ``prefix``; returns the size of its first chunk, possibly 0."""
        kv, table = self._kv, sequence.table
        table.cache_salt = sequence.cache_salt
        kv.eviction_history.reserves_for(table.owner)
        self._waiting.take(sequence, SequenceStatus.PREFILL)
        sequence.path = []
        plan = self._recoveries.planner.choose(prefix, share, sequence)
        if plan.parts:
            prefix = kv.without_copy(prefix)
            if not all(feature.holds(sequence, prefix.num_tokens) for feature in sequence.request.features):
                # The plan would recompute tokens of segments whose originals are not held, because admission counted
                # the blocks in lower tiers as cached. So all of these blocks are loaded.
                plan = self._recoveries.planner.choose(prefix, share)
                plan.method = "load"
        if plan.method == "load":
            loaded = kv.loaded_to(prefix, plan.end)
            if kv.num_taken(loaded, sequence.num_tokens) <= kv.num_available:
                prefix = loaded
            else:  # other sequences use the windows that it would share, but not the windows that it would load
                plan = RecoveryPlan("device", start=len(prefix.blocks))
        self._plan.copy(kv.take(table, prefix))
        params = sequence.request.params
        forks = params.n > 1 and params.beam is None and not (sequence.index or sequence.output_token_ids)
        fork = sequence.num_tokens - 1 if forks else 0
        kv.expect_snapshots(table, prefix, sequence.num_tokens, sequence.request.places, fork)
        sequence.num_scheduled_tokens = sequence.num_computed_tokens = prefix.num_tokens
        # ``begin`` pins the blocks to be loaded. It comes before ``grow``, which may demote blocks of the device: these
        # must not evict the blocks to be loaded from their tier.
        recovery = self._recoveries.begin(sequence, prefix, plan, now)
        self._plan.copy(kv.begin_windows(table, recovery.windows))
        size = self._size(sequence, budget)
        num_tokens = max(prefix.num_tokens + size, plan.end * kv.block_size if recovery.locations else 0)
        self._plan.copy(kv.grow(table, num_tokens)[1])
        self._take_row(sequence)
        sequence.num_scheduled_tokens += size
        if kv.windows:
            self.grow_windows(sequence, prefix.num_tokens, sequence.num_scheduled_tokens)
        # Windows that are loaded count as computed from ``settle`` on. Before, no inventory may name their blocks, even
        # if the full layers' blocks of the same tokens are there. (States are named once a step has read them.)
        lacking = zip(kv.windows, recovery.windows, strict=False)
        loading = [(plan.end - len(one)) * kv.block_size for group, one in lacking if one and not group.has_states]
        self._join(sequence, min([prefix.num_tokens, *loading]))
        self._note(sequence, prefix, plan, now)
        return size

    @property
    def _plan_is_full(self) -> bool:
        return self._plan.joined_bytes >= MAX_JOINED_BYTES

    def _size(self, sequence: RequestSequence, budget: int) -> int:
        start, whole = sequence.num_scheduled_tokens, sequence.num_tokens
        size = min(whole - start, budget)
        for feature in sequence.request.features:
            size = feature.chunk_end(sequence, start, start + size, budget) - start
        recovering = self._recoveries.room(sequence)
        return size if recovering is None else min(size, recovering)

    def _watermark(self, running: int) -> int:
        """Blocks that stay free at admission: at least one for every running sequence, so that none is preempted when
        it crosses its next block boundary."""
        kv = self._kv
        return max(running * kv.num_for_next, int(kv.num_total * _WATERMARK)) if running else 0

    def _note(self, sequence: RequestSequence, prefix: CachedPrefix, plan: RecoveryPlan, now: float) -> None:
        request = sequence.request
        request.timeline.started(now)
        if request.scheduled_time != request.scheduled_time:  # NaN: the first time
            request.scheduled_time = now
            if request.computes_for is not None:  # the request of the client is charged for the cached part
                request.account.served += PROMPT_WEIGHT * (sequence.num_tokens - prefix.num_tokens)
                return
            request.account.served += PROMPT_WEIGHT * len(request.prompt_token_ids)
            request.num_cached_tokens = prefix.num_tokens
            for feature in request.features:
                request.num_cached_tokens += feature.started(sequence, prefix.num_tokens)
            request.ref.started = now
            self.num_queries += sequence.num_tokens
            self.num_hits += prefix.num_tokens
            # Blocks that come from another executor or from storage are not missed.
            if max(prefix.num_tokens, plan.end * self._kv.block_size) < sequence.num_tokens - 1:
                known = prefix.offloaded or prefix.blocks
                last_node = known[-1] if known else None
                request.timeline.missed = find_missed(self._kv, sequence, last_node, prefix.path)


def _num_computed(chunks: Chunks) -> int:
    return sum(sequence.num_to_compute(size) for sequence, size in chunks)
