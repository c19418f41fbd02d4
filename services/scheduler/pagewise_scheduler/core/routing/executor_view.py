"""An executor as routing sees it: the cached part of a prompt, and the load of the requests that were placed there.

A placement counts at once, before the executor's scheduler has the request: otherwise a burst of requests would all go
to the same executor.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import ceil, exp
from typing import NamedTuple

from pagewise_shared.protocol import DEVICE, Role

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.routing.prompts import PendingPrefixes, PrefixQuery
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.cost_model import CostModel

_LOOKED_AT = 8
"""The number of waiting placements, the oldest first, of which the part that is computed already is estimated."""
_LATELY = 60.0
"""Seconds over which an executor's use is averaged."""
_MOST_BUSY = 0.9


class Match(NamedTuple):
    """Leading tokens of a prompt that are cached: ``device`` on the device, ``lower`` more in tiers below it.

    ``expected``: the tokens that are cached or will be when the prompts placed before are computed.
    ``spared``: further tokens that need not be computed, because the originals of segments are cached or will be.
    ``gap``, ``offloaded``: see ``CachedPrefix``.
    """

    device: int
    lower: int
    expected: int
    spared: int = 0
    gap: int = 0
    offloaded: tuple[CachedBlock, ...] = ()

    @property
    def reused(self) -> int:
        """Tokens that need not be computed."""
        return self.expected + self.spared


_NO_MATCH = Match(0, 0, 0)


class CostEstimate(NamedTuple):
    """The predicted costs of a prompt on an executor; times in seconds.

    Fields:
        queue: until earlier placements are computed, there is room for the prompt, and its adapter is in a slot.
        recovery: from then on until its own KV is loaded or computed.
        evicted: the expected cost of recovering the blocks that are evicted for it.
        busy: the share of its time in which the executor computes prompts, including this one.
        start: leading tokens that are not computed for it, because others compute them or because they are fetched.
    """

    queue: float
    recovery: float
    evicted: float
    busy: float
    start: int

    @property
    def first_token(self) -> float:
        """Seconds until its first token."""
        return self.queue + self.recovery


@dataclass(slots=True, eq=False)
class Placement:
    """A request at the executor on which it was placed, and its predicted costs there.

    Fields:
        reason: of the choice. predicted: seconds from ``time`` to its first token.
        start: leading tokens that are not computed for it, see ``CostEstimate``.
        seconds: for computing the other tokens, without the fixed costs of steps, which are shared.
        num_blocks: blocks that it takes beside the blocks that are cached or expected.
        decoder: the executor to which it migrates after its prompt; None: it stays.
        on_end: called once with the request when it has left the executor or ended.
        waits: its first token has not come back. ended: it has left the executor or ended.
    """

    executor: "ExecutorView"
    request: Request
    query: PrefixQuery
    reason: str
    predicted: float
    time: float
    start: int
    seconds: float
    num_blocks: int
    decoder: "ExecutorView | None" = None
    on_end: Callable[[Request], None] | None = None
    waits: bool = True
    ended: bool = False

    def answered(self, now: float) -> None:
        """Its first token has come back: its prompt is computed and cached. Harmless the second time."""
        if self.waits:
            self.waits = False
            self.executor.answered(self, now)

    def end(self, now: float) -> None:
        """It has finished, failed, or leaves the executor; harmless the second time."""
        self.answered(now)
        if not self.ended:
            self.ended = True
            self.executor.ended(self, now)
            self.set_decoder(None)
            if self.on_end is not None:
                self.on_end(self.request)

    def set_decoder(self, decoder: "ExecutorView | None") -> None:
        """Set the executor to which it migrates after its prompt, and which expects it from now on; None: none."""
        for view, change in ((self.decoder, -1), (decoder, 1)):
            if view is not None:
                view.num_expected += change * self.query.params.num_sequences
        self.decoder = decoder


class _DecayingSum:
    """A sum whose addends decay by 1/e in ``_LATELY`` seconds."""

    def __init__(self) -> None:
        self._sum = self._at = 0.0

    def add(self, amount: float, now: float) -> None:
        self._sum, self._at = self.sum(now) + amount, now

    def sum(self, now: float) -> float:
        return self._sum * exp((self._at - now) / _LATELY) if self._sum else 0.0


class ExecutorView:
    """An executor for routing. ``costs``: of computing and loading there. ``grammars``: whether it supports grammars.

    Routing only reads the scheduler, with one exception: ``find`` may enter blocks into its prefix tree.

    ``load``: unfinished sequences that were placed here. ``num_expected``: sequences that migrate here after their
    prompts. ``num_decoding``: placed sequences whose first token has come back, and which take a token of every step.
    """

    def __init__(self, scheduler: Scheduler, role: Role = "both", *, grammars: bool = True) -> None:
        self.scheduler, self.role, self.grammars = scheduler, role, grammars
        self.costs: CostModel = scheduler.costs
        self.load = self.num_expected = 0
        self.num_decoding = 0
        self._waiting: dict[Placement, None] = {}
        self._work: dict[int, tuple[int, float]] = {}  # waiting tokens, and seconds to compute them, by priority
        self._num_blocks = 0
        self._answered_at = 0.0
        self._pending = PendingPrefixes()
        self._victim: CachedBlock | None = None
        self._victim_seconds = 0.0
        self._computed = _DecayingSum()
        self._ended = _DecayingSum()

    # ---- cached blocks -------------------------------------------------------------------------------

    def serves(self, request: Request) -> bool:
        """Whether the executor supports the request's grammar and adapter, if it has any."""
        if request.params.sampling.grammar and not self.grammars:
            return False
        return request.params.adapter is None or self.scheduler.features.adapters.can_take(request.params.adapter)

    def find(self, query: PrefixQuery) -> Match:
        """How much of a prompt is cached. O(blocks found)."""
        kv = self.scheduler.kv
        # After a scheduler's restart an executor reports the hashes of its cached blocks, not their tokens. Blocks of
        # this prompt enter the prefix tree now, so that the prompt is placed where they are.
        kv.restore(query.cache_salt, lambda: query.tokens)
        size, keys, tree = kv.block_size, query.keys(kv.block_size), kv.pool.tree
        path = tree.walk(tree.root_of(query.cache_salt), keys)
        if not path and not self._waiting:
            spared = self._spared(query, 0)
            return _NO_MATCH._replace(spared=spared) if spared else _NO_MATCH
        prefix = kv.begin_with(query.cache_salt, path, b"")
        lower = 0 if prefix.gap else len(prefix.offloaded) * size  # blocks behind a gap wait until it is computed
        expected = prefix.num_tokens + lower
        if self._waiting and expected < len(keys) * size:
            expected = min(self._pending.shared(query.cache_salt, query.tokens, expected, size), len(keys) * size)
        spared = self._spared(query, expected)
        return Match(prefix.num_tokens, lower, expected, spared, prefix.gap, tuple(prefix.offloaded))

    def _spared(self, query: PrefixQuery, expected: int) -> int:
        """The number of tokens behind the first ``expected`` tokens that segments spare from computing."""
        kv, spared = self.scheduler.kv, 0
        for original in query.originals(kv.block_size):
            moved = sum(max(0, one.stop - max(one.moved, expected)) for one in original.segments)
            if not moved:
                continue
            kv.restore(query.cache_salt, lambda tokens=original.tokens: tokens)  # type: ignore[misc]
            path = kv.pool.tree.walk(kv.pool.tree.root_of(query.cache_salt), original.keys)
            found = len(path) * kv.block_size
            if self._waiting:
                found = self._pending.shared(query.cache_salt, original.tokens, found, kv.block_size)
            spared += moved - max(0, original.num_tokens - found)
        return max(0, spared)

    # ---- predictions ---------------------------------------------------------------------------------

    @property
    def share(self) -> float:
        """The share of a step's token budget that decodes leave for prompts."""
        budget = self.scheduler.limits.max_num_batched_tokens
        return max(1.0, budget - self.num_decoding) / budget

    def queue_seconds(self, priority: int, now: float) -> float:
        """Seconds until all prompts that come before a prompt of this priority are computed."""
        # The steps in flight come back first.
        steps, seconds = len(self.scheduler.steps_in_flight), 0.0
        if self._waiting:
            tokens, seconds = self._work_before(priority, now)
            steps += ceil(tokens / max(1.0, self.scheduler.limits.max_num_batched_tokens - self.num_decoding))
        constants = self.costs.prefill.constants
        return seconds + steps * (constants[0] + constants[1] * self.num_decoding)

    def _work_before(self, priority: int, now: float) -> tuple[int, float]:
        """Prompt tokens that are computed before a prompt of this priority, and the seconds that this still takes."""
        tokens, seconds = 0, 0.0
        for level, work in self._work.items():
            if level <= priority:
                tokens += work[0]
                seconds += work[1]
        # A prompt counts until its first token comes back. The oldest ones are partly computed: they have been
        # computing since they were first scheduled, or since the prompt before them was done.
        begun, since = 0.0, now
        for placement in islice(self._waiting, _LOOKED_AT):
            when = placement.request.scheduled_time
            if when >= placement.time and placement.query.params.priority <= priority:  # NaN: it is not scheduled yet
                begun += placement.seconds
                since = min(since, when)
        done = min(now - max(since, self._answered_at), begun) if begun else 0.0
        return tokens, max(0.0, seconds - done)

    def room_seconds(self, query: PrefixQuery, num_blocks: int, now: float) -> float:
        """Seconds until there are a row and ``num_blocks`` blocks (see ``KVCacheManager.num_available``) for a prompt,
        predicted from the rate at which sequences have ended lately."""
        scheduler, kv = self.scheduler, self.scheduler.kv
        rows = self.load + query.params.num_sequences - scheduler.limits.max_num_seqs
        blocks = num_blocks + self._num_blocks - kv.num_available
        if rows <= 0 and blocks <= 0:
            return 0.0
        missing = max(rows, blocks * max(1, scheduler.num_running) / max(1, kv.num_in_use))
        return missing * _LATELY / max(1.0, self._ended.sum(now))

    def adapter_seconds(self, query: PrefixQuery) -> float:
        """Seconds until the adapter of a prompt is in a slot, if it has one."""
        return 0.0 if query.params.adapter is None else self.scheduler.features.adapters.seconds(query.params.adapter)

    def busy(self, seconds: float, now: float) -> float:
        """The share of its time in which it has computed prompts lately, with a further prompt of ``seconds``. At most
        ``_MOST_BUSY``."""
        return min(_MOST_BUSY, (self._computed.sum(now) + seconds) / _LATELY)

    def eviction_seconds(self, num_blocks: int) -> float:
        """The expected seconds for recovering the blocks that are evicted if a prompt takes ``num_blocks`` blocks."""
        kv, pool = self.scheduler.kv, self.scheduler.kv.pool
        evicted = num_blocks - max(0, kv.num_free - self._num_blocks)
        victim = pool.next_evicted() if evicted > 0 else None
        if victim is None:
            return 0.0
        if victim is not self._victim:
            lost = self.costs.seconds_lost(victim.depth, DEVICE)
            self._victim, self._victim_seconds = victim, pool.policy.probability(victim) * lost
        return evicted * self._victim_seconds / kv.pages_per_block

    # ---- placements ----------------------------------------------------------------------------------

    def place(
        self, request: Request, query: PrefixQuery, match: Match, estimate: CostEstimate, reason: str, now: float
    ) -> Placement:
        """Place a request on the executor. ``estimate``: its predicted costs there. ``now``: seconds."""
        kv, start = self.scheduler.kv, estimate.start
        num_tokens = query.num_tokens - start
        steps, *features = self.costs.features(start, num_tokens, self.share)
        seconds = self.costs.prefill.predict(0, *features)
        # Fetched tokens take blocks too.
        num_blocks = kv.room_for(query.num_tokens, match.expected // kv.block_size)
        predicted = estimate.first_token
        placement = Placement(self, request, query, reason, predicted, now, start, seconds, num_blocks)
        self._computed.add(seconds + steps * self.costs.prefill.constants[0], now)
        self.load += query.params.num_sequences
        self._num_blocks += num_blocks
        self._waiting[placement] = None
        others = self._work.get(query.params.priority, (0, 0.0))
        self._work[query.params.priority] = others[0] + num_tokens, others[1] + seconds
        if query.uses_cache:
            for tokens in self._cached_later(query):
                self._pending.add(query.cache_salt, tokens)
        return placement

    def _cached_later(self, query: PrefixQuery) -> Iterator[bytes]:
        """The contents that a prompt will leave in the cache: its tokens, and its segments' originals (int32 bytes)."""
        yield query.tokens
        yield from (original.tokens for original in query.originals(self.scheduler.kv.block_size))

    def answered(self, placement: Placement, now: float) -> None:
        """The first token of a placement has come back."""
        self._answered_at = now
        query = placement.query
        del self._waiting[placement]
        self.num_decoding += query.params.num_sequences
        self._num_blocks -= placement.num_blocks
        tokens, seconds = self._work.pop(query.params.priority)
        tokens -= query.num_tokens - placement.start
        if tokens:  # without tokens, the rest of the seconds is a rounding error
            self._work[query.params.priority] = tokens, seconds - placement.seconds
        if query.uses_cache:
            for cached in self._cached_later(query):
                self._pending.remove(query.cache_salt, cached)

    def ended(self, placement: Placement, now: float) -> None:
        """A placement has left the executor or ended."""
        self.load -= placement.query.params.num_sequences
        self.num_decoding -= placement.query.params.num_sequences
        self._ended.add(placement.query.params.num_sequences, now)
