"""Admission: which waiting sequence starts next, and behind which prefix.

Inside a window of the queue the sequence with the longest cached prefix starts first, before its prefix is evicted. A
sequence whose next block another one is computing waits for it instead of computing it twice. A sequence also waits for
its features, until its grammar is compiled for instance.
"""

from collections.abc import Hashable, Iterable

from pagewise_scheduler.core.memory.block_table import BlockTable, CachedPrefix
from pagewise_scheduler.core.memory.eviction_history import RequestRef
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, block_keys
from pagewise_scheduler.core.requests.request import RequestSequence, SequenceStatus
from pagewise_scheduler.core.requests.timeline import WaitCause
from pagewise_scheduler.core.requests.waiting_queue import WaitingQueue
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager

_WINDOW = 16
_MOST_PASSED = 32
"""Times the head of the queue may be passed over by others with longer prefixes."""


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
        """Whether a waiting sequence may start, with any cached prefix. Notes it in ``held`` if a feature does not
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
        admitted, because a large head would wait for ever while smaller sequences take the room."""
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
