"""Prompts: which waiting sequence starts next and behind which prefix, and how far each prefill gets in a step.

Inside a window of the queue the sequence with the longest cached prefix starts first, before its prefix is evicted. A
sequence whose next block another one is computing waits for it instead of computing it twice. A sequence also waits for
its features, until its grammar is compiled for instance.
"""

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING
from weakref import proxy

from pagewise_shared.protocol.limits import MAX_JOINED_BYTES

from pagewise_scheduler.core.memory.block_table import BlockTable, CachedPrefix
from pagewise_scheduler.core.memory.eviction_history import RequestRef
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, block_keys
from pagewise_scheduler.core.requests.request import RequestSequence, SequenceStatus
from pagewise_scheduler.core.requests.timeline import Activity, WaitCause
from pagewise_scheduler.core.requests.virtual_tokens import OUTPUT_WEIGHT, PROMPT_WEIGHT
from pagewise_scheduler.core.requests.waiting_queue import WaitingQueue, queue_time
from pagewise_scheduler.core.scheduling.missed_prefix import find_missed
from pagewise_scheduler.core.scheduling.step import Chunks, StepInFlight
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager
from pagewise_scheduler.core.tiers.recovery_plan import RecoveryPlan

if TYPE_CHECKING:
    from pagewise_scheduler.core.scheduling.scheduler import Scheduler

_WINDOW = 16
_MOST_PASSED = 32
"""Times the head of the queue may be passed over by others with longer prefixes."""
_WATERMARK = 0.01
"""The share of all blocks that stay free at admission while sequences run."""


class Admission:
    """Chooses the sequence of the waiting queue that starts next. In the queue it changes only the count of how often
    the head has been passed over. (Features that prepare a sequence may add requests, for segments for instance, or
    remove them.)

    ``held``: the sequences that could not start since ``computing`` was called, each with the cause, and with the
    request that computes its prefix, if that is the cause and the request is known. ``lacked_room``: whether the last
    sequence was not started because blocks were lacking. ``favoured``: a sequence that may use the blocks of the
    watermark.
    """

    def __init__(self, kv: KVCacheManager, waiting: WaitingQueue) -> None:
        self._kv = kv
        self._waiting = waiting
        # Blocks that are being computed or fetched, by parent and tokens, and the request that computes each.
        self._busy: dict[tuple[Hashable, bytes], RequestRef | None] = {}
        self.held: dict[RequestSequence, tuple[WaitCause, RequestRef | None]] = {}
        self.lacked_room = False
        self.favoured: RequestSequence | None = None

    def computing(self, sequences: Iterable[RequestSequence]) -> None:
        """Begin a step in which the prompts of ``sequences`` are being computed; called before ``next``."""
        self._busy.clear()
        self.held.clear()
        self.lacked_room = False
        for sequence in sequences:
            self.computing_too(sequence)

    def computing_too(self, sequence: RequestSequence) -> None:
        """Note that the prompt of one more sequence is being computed, beginning with its next full block."""
        start = sequence.table.num_known * self._kv.block_size
        stop = start + self._kv.block_size
        if stop <= sequence.num_tokens:
            parent = self._parent(sequence.cache_salt, sequence.table.last_node)
            self._busy[parent, sequence.tokens_between(start, stop)] = sequence.request.owner.ref

    def coming(self, table: BlockTable, tokens: bytes) -> None:
        """Note that the next blocks of ``table``, which will hold ``tokens`` (int32 bytes), come from another
        executor."""
        start, size = 4 * table.num_known * self._kv.block_size, 4 * self._kv.block_size
        if start + size <= len(tokens):
            self._busy[self._parent(table.cache_salt, table.last_node), tokens[start : start + size]] = None

    def next(
        self, room: int, oldest_step: int | None, watermark: int = 0
    ) -> tuple[RequestSequence, CachedPrefix] | None:
        """The sequence that starts, and the longest prefix it begins with; None: none can start.

        ``room``: the number of free blocks, of which ``watermark`` stay free unless ``favoured`` is next.
        ``oldest_step``: the oldest step in flight, if any; a sequence that takes part in it or a later step has to
        wait.
        """
        if room <= (watermark if self.favoured is None else 0):
            self.lacked_room = True
            return None
        changes = self._waiting.num_changes
        for head in self._waiting.heads(_WINDOW):  # of several keys, until one of them can start a sequence
            # Preparing the sequences of an earlier head may have ended this one: it was to compute a segment that
            # another request has computed meanwhile.
            if head.status is not SequenceStatus.WAITING:
                break
            own_room = room if head is self.favoured else room - watermark
            available = self._kv.num_available
            best = None if _is_in_flight(head, oldest_step) else self._best(head, oldest_step, own_room)
            # Features that prepare a sequence hold blocks that were counted as room.
            held = available - self._kv.num_available
            room -= held
            if best is not None and best.status is SequenceStatus.WAITING:
                return self._start(head, best, own_room - held)
        if changes == self._waiting.num_changes:
            return None
        return self.next(room, oldest_step, watermark)  # the queue has changed meanwhile

    def cached_prefix(self, sequence: RequestSequence) -> tuple[CachedPrefix, int]:
        """The prefix with which a waiting sequence would begin now, and for how many of its tokens features have to
        prepare nothing."""
        found = self._find(sequence)
        return self._longest_prefix(sequence), self._num_cached(found)

    def num_needed(self, sequence: RequestSequence, oldest_step: int | None) -> int | None:
        """The blocks that a waiting sequence takes when it starts; None: it could not start if it had more room."""
        if not self._may_begin(sequence, oldest_step):
            return None
        found = self._find(sequence)
        if self._is_computed_elsewhere(sequence, found) or not self._is_ready(sequence, found):
            return None
        return self._kv.num_taken(self._kv.without_copy(self._longest_prefix(sequence)), sequence.num_tokens)

    def _may_begin(self, sequence: RequestSequence, oldest_step: int | None) -> bool:
        """Whether a waiting sequence may start, whatever is cached of it. Notes it in ``held`` if a feature does not
        permit that."""
        # A sequence that was to compute a segment has ended, and its request has no sequences any more, if another
        # request has computed the segment meanwhile.
        if sequence.status is not SequenceStatus.WAITING or not _first_has_begun(sequence):
            return False
        holding = next((one for one in sequence.request.features if not one.may_start(sequence)), None)
        if holding is not None and holding.cause is not None:
            self.held[sequence] = holding.cause, None
        return holding is None and not _is_in_flight(sequence, oldest_step)

    def _best(self, head: RequestSequence, oldest_step: int | None, room: int) -> RequestSequence | None:
        """The sequence of the window of ``head`` that can start with the longest cached prefix; None: none can, and it
        is the turn of the next key. ``room``: the number of blocks that it may take."""
        best, longest = None, -1
        for sequence in self._waiting.window(head, _WINDOW if head.num_passed < _MOST_PASSED else 1):
            if not self._may_begin(sequence, oldest_step):
                continue
            found = self._find(sequence)
            if len(found) <= longest or self._is_computed_elsewhere(sequence, found):
                continue
            if self._is_ready(sequence, found) or self._prepare(sequence, found, room):
                best, longest = sequence, len(found)
            elif sequence is head and not _is_preparing(head):
                return None  # the head lacks room to prepare: later sequences must not take the room it waits for
        return best

    def _start(
        self, head: RequestSequence, best: RequestSequence, room: int
    ) -> tuple[RequestSequence, CachedPrefix] | None:
        """``best`` if there is room for it, else ``head`` if there is, else none. No other sequence of the window is
        tried, because a large head would wait for ever while smaller sequences take the room."""
        prefix = self._fitting(best, room)
        if prefix is None and best is not head:
            best, found = head, self._find(head)
            ready = self._may_begin(head, None) and self._is_ready(head, found)
            if ready and not self._is_computed_elsewhere(head, found):
                prefix = self._fitting(head, room)
        if prefix is None:
            self.lacked_room = True
            return None
        if best is not head and all(feature.may_start(head) for feature in head.request.features):
            head.num_passed += 1
        return best, prefix

    def _is_ready(self, sequence: RequestSequence, found: list[CachedBlock]) -> bool:
        """Whether the features have prepared everything that a sequence needs behind its cached blocks ``found``."""
        if not (features := sequence.request.features) or self._shares_with_first(sequence):
            return True
        num_cached = self._num_cached(found)
        return all(feature.is_ready(sequence, num_cached) for feature in features)

    def _prepare(self, sequence: RequestSequence, found: list[CachedBlock], room: int) -> bool:
        """Let the features begin to prepare a sequence, if there is room; returns whether it is ready now."""
        features, num_cached = sequence.request.features, self._num_cached(found)
        return all(not one.is_preparing(sequence) and one.prepare(sequence, num_cached, room) for one in features)

    def _num_cached(self, found: list[CachedBlock]) -> int:
        """Tokens of a cached prefix for which features have to prepare nothing.

        Blocks in lower tiers count if the prefix has no gap, because then they are loaded.
        """
        size = self._kv.block_size
        if all(node.num_tiers for node in found):
            return len(found) * size
        return size * next(number for number, node in enumerate(found) if node.block < 0)

    def _find(self, sequence: RequestSequence) -> list[CachedBlock]:
        """The cached full blocks of a sequence, without its newest token. Blocks that were found before are only
        checked for changes."""
        tree, size = self._kv.pool.tree, self._kv.block_size
        path, most = sequence.path, (sequence.num_tokens - 1) // size
        del path[most:]
        tree.still_there(path)
        if len(path) < most:
            last = path[-1] if path else tree.root_of(sequence.cache_salt)
            start = len(path) * size
            # Most prompts share no further block: look for one before cutting all their tokens into keys.
            if last is not None and sequence.tokens_between(start, start + size) in last.children:
                path += tree.walk(last, block_keys(sequence.tokens_between(start, most * size), size))
        return path

    def _is_computed_elsewhere(self, sequence: RequestSequence, found: list[CachedBlock]) -> bool:
        if not self._busy:
            return False
        start = len(found) * self._kv.block_size
        stop = start + self._kv.block_size
        if stop >= sequence.num_tokens:
            return False
        parent = self._parent(sequence.cache_salt, found[-1] if found else None)
        block = parent, sequence.tokens_between(start, stop)
        if block not in self._busy:
            return False
        self.held[sequence] = "prefix", self._busy[block]
        return True

    def _parent(self, salt: str | None, last_node: CachedBlock | None) -> Hashable:
        """The parent in the tree of the block after ``last_node``: ``last_node``, the root of ``salt``, or a stand-in
        for a root that the tree does not have yet."""
        return last_node or self._kv.pool.tree.root_of(salt) or ("root", salt)

    def _fitting(self, sequence: RequestSequence, room: int) -> CachedPrefix | None:
        """The longest prefix of a sequence, or None if its known tokens take more than ``room`` blocks beside it."""
        kv, num_tokens = self._kv, sequence.num_tokens
        # A first output has no blocks to share but the cached ones: often enough to see that it does not fit.
        least = kv.blocks_for(num_tokens) - len(sequence.path)
        if least > room and sequence is sequence.request.sequences[0]:
            return None
        prefix = self._longest_prefix(sequence)
        if kv.num_taken(prefix, num_tokens) > room:
            prefix = kv.without_copy(prefix)
        return prefix if kv.num_taken(prefix, num_tokens) <= room else None

    def _longest_prefix(self, sequence: RequestSequence) -> CachedPrefix:
        if sequence.sampling.prompt_logprobs is not None:
            return self._kv.nothing()  # they come from computing the prompt
        if self._shares_with_first(sequence):
            return self._kv.fork(sequence.request.sequences[0].table, sequence.num_tokens - 1)
        start = len(sequence.path) * self._kv.block_size
        stop = min(start + self._kv.block_size, sequence.num_tokens - 1)
        return self._kv.begin_with(sequence.cache_salt, list(sequence.path), sequence.tokens_between(start, stop))

    def _shares_with_first(self, sequence: RequestSequence) -> bool:
        """Whether a sequence begins with its whole prompt, because the first output of its request holds it."""
        first = sequence.request.sequences[0]
        if sequence is first or sequence.output_token_ids or first.table.cache_salt != sequence.cache_salt:
            return False
        return first.row >= 0 and first.prefilled and self._kv.can_fork(first.table, sequence.num_tokens - 1)


class PrefillSet:
    """Ordered set of sequences in prefill.

    ``admission``: chooses which sequences start. ``activity``: counts the work for which waiting sequences wait.
    ``num_queries``: tokens of requests that started for the first time; ``num_hits``: those found on the device.
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
        # otherwise sequences would start that preempt each other before they have computed anything.
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
        self._waiting.take(sequence, SequenceStatus.PREFILL)
        sequence.path = []
        plan = self._recoveries.choose(prefix, share, sequence)
        if plan.parts:
            prefix = kv.without_copy(prefix)
            if not all(feature.holds(sequence, prefix.num_tokens) for feature in sequence.request.features):
                # The plan would recompute tokens of segments whose originals are not held, because admission counted
                # the blocks in lower tiers as cached. So all of these blocks are loaded.
                plan = self._recoveries.choose(prefix, share)
                plan.method = "load"
        if plan.method == "load":
            loaded = kv.loaded_to(prefix, plan.end)
            if kv.num_taken(loaded, sequence.num_tokens) <= kv.num_available:
                prefix = loaded
            else:  # other sequences use the windows that it would share, but not those that it would load
                plan = RecoveryPlan("device", start=len(prefix.blocks))
        self._plan.copy(kv.take(table, prefix))
        kv.expect_snapshots(table, prefix, sequence.num_tokens)
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
        self._join(sequence, prefix.num_tokens)
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


def _is_in_flight(sequence: RequestSequence, oldest_step: int | None) -> bool:
    """Whether a token of the sequence may still come back."""
    return oldest_step is not None and sequence.last_step >= oldest_step


def _is_preparing(sequence: RequestSequence) -> bool:
    return any(feature.is_preparing(sequence) for feature in sequence.request.features)


def _first_has_begun(sequence: RequestSequence) -> bool:
    """Whether a sequence need not wait for the first output of its request, whose prefill the other outputs share.

    If the first output was preempted during its prefill, the others may start before it, except where the client gets
    log-probabilities of the prompt: they come with the first output, before any token. Sequences of which any may start
    first, such as the hypotheses of a beam search, all have the index 0.
    """
    request, first = sequence.request, sequence.request.sequences[0]
    if not sequence.index or first.prefilled or first.finished:
        return True
    return first.row < 0 and (request.params.sampling.prompt_logprobs is None or bool(first.output_token_ids))
