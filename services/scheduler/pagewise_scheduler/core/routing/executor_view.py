"""One executor as routing sees it: what it holds of a prompt, and what was placed there and waits.

A placement counts at once, before the executor's scheduler has heard of it: else a burst would land in one place.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import ceil, exp
from typing import NamedTuple

from pagewise_shared.block_hash import rope_salt
from pagewise_shared.protocol import DEVICE, Role
from pagewise_shared.segments import Segment, original_tokens

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, block_keys
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.cost_model import CostModel

_BYTES_PER_TOKEN = 4
_MOST_TOKENS = 1 << 17
"""Tokens of the originals of a prompt's segments that are looked at: each has the root once more."""
_LOOKED_AT = 8
"""Of those that wait, so many of the oldest are looked at for what is computed of them already."""
_LATELY = 60.0
"""Seconds over which an executor's use is averaged."""
_MOST_BUSY = 0.9


class OriginalQuery(NamedTuple):
    """What some ``segments`` of a prompt, which are alike, are moved from: ``tokens`` int32 bytes, whole blocks, of
    which the first ``num_tokens`` tokens count. ``keys``: the tokens of each block."""

    segments: list[Segment]
    num_tokens: int
    tokens: bytes
    keys: list[bytes]


class PrefixQuery:
    """All known tokens of a request that is to be placed, cut into block keys once for all executors.

    ``tokens``: int32 bytes. ``cache_salt``: whose cache it may use: that of its ``params``, and another one beyond
    ``short_rope_len``. ``stored``: blocks of them that were found in storage, by its identity.
    """

    __slots__ = (
        "_keys", "_originals", "_request", "cache_salt", "num_tokens", "params", "stored", "tokens", "uses_cache",
    )  # fmt: skip

    def __init__(self, request: Request) -> None:
        # One that moves goes on from its tokens: the outputs of its sequences count as well, the first one's here.
        sequence = next((one for one in request.sequences if not one.finished), None)
        self.tokens = sequence.token_bytes() if sequence is not None else request.prompt_token_ids.tobytes()
        self.num_tokens = len(self.tokens) // _BYTES_PER_TOKEN
        self.cache_salt = rope_salt(request.params.cache_salt, self.num_tokens, request.short_rope_len)
        self.params = request.params
        self.uses_cache = request.params.sampling.prompt_logprobs is None  # those come from computing the prompt
        self.stored = request.stored if self.uses_cache else {}
        self._keys: dict[int, list[bytes]] = {}
        self._request = request
        self._originals: dict[int, list[OriginalQuery]] = {}

    def keys(self, block_size: int) -> list[bytes]:
        """The tokens of each full block; the newest token, which is always computed, is in none of them.

        Made once for each block size: look-ups in many trees hash the same objects, whose hash is kept.
        """
        keys = self._keys.get(block_size)
        if keys is None:
            most = self.num_tokens - 1 if self.uses_cache else 0
            keys = self._keys[block_size] = list(block_keys(self.tokens, block_size, most))
        return keys

    def originals(self, block_size: int) -> list[OriginalQuery]:
        """What the segments of the prompt are moved from, each content once.

        Of a prompt whose segments have very many tokens together with their roots, only the first ones.
        """
        if not self._request.segments:
            return []
        if (found := self._originals.get(block_size)) is None:
            found = self._originals[block_size] = []
            by_content: dict[bytes, OriginalQuery] = {}
            num_tokens = 0
            for segment in self._request.segments:
                num_tokens += segment.num_original_tokens
                if segment.moved == segment.stop:
                    continue
                if num_tokens > _MOST_TOKENS:
                    break
                tokens = original_tokens(self._request.prompt_token_ids, segment, block_size).tobytes()
                if tokens not in by_content:
                    keys = list(block_keys(tokens, block_size))
                    found.append(OriginalQuery([], segment.num_original_tokens, tokens, keys))
                    by_content[tokens] = found[-1]
                by_content[tokens].segments.append(segment)
        return found


class PendingPrefixes:
    """A sorted list of prompts for each cache salt: the longest common prefix of one more is with its neighbours."""

    def __init__(self) -> None:
        self._prompts: dict[str | None, list[bytes]] = {}

    def add(self, cache_salt: str | None, tokens: bytes) -> None:
        """These tokens (int32 bytes) will be computed."""
        insort(self._prompts.setdefault(cache_salt, []), tokens)

    def remove(self, cache_salt: str | None, tokens: bytes) -> None:
        """The counterpart of ``add``."""
        prompts = self._prompts[cache_salt]
        del prompts[bisect_left(prompts, tokens)]
        if not prompts:
            del self._prompts[cache_salt]

    def shared(self, cache_salt: str | None, tokens: bytes, known: int, unit: int) -> int:
        """The most leading tokens, ``known`` plus whole ``unit``s of them, that ``tokens`` shares with any of them.

        At least ``known``, whether they are shared or not: who has so many elsewhere asks only for more.
        """
        prompts = self._prompts.get(cache_salt)
        if prompts is None:
            return known
        index = bisect_left(prompts, tokens)
        for other in prompts[max(0, index - 1) : index + 1]:
            if other.startswith(tokens[: (known + unit) * _BYTES_PER_TOKEN]):
                known += _common(tokens, other, known * _BYTES_PER_TOKEN, unit * _BYTES_PER_TOKEN) * unit
        return known


def _common(one: bytes, other: bytes, start: int, unit: int) -> int:
    """Units of bytes that are equal from ``start`` on: doubles the span until it differs, then halves it."""
    found, end, span = 0, (min(len(one), len(other)) - start) // unit, 16
    while found < end:
        stop = min(found + span, end)
        if other.startswith(one[start + found * unit : start + stop * unit], start + found * unit):
            found, span = stop, span * 2
        else:
            end = stop - 1
            span = max(1, (end - found + 1) // 2)
    return found


class Match(NamedTuple):
    """Leading tokens of a prompt: ``device`` of them lie on the device, ``lower`` more in tiers below it.

    ``expected``: tokens that are cached or will be when the prompts placed before are computed, at least those.
    ``spared``: further tokens that need not be computed, because the originals of segments are cached, or will be.
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
    """What is predicted for a prompt on one executor; times in seconds.

    Fields:
        queue: until there is room for it, what was placed before it is computed, and its adapter is there.
        recovery: from then on until its own KV is there, loaded or computed.
        evicted: what getting back the blocks that give way for it is expected to cost others.
        busy: the share of its time that the executor computes prompts, with this one.
        start: tokens of it that are not computed there, because others compute them or because they are fetched.
    """

    queue: float
    recovery: float
    evicted: float
    busy: float
    start: int

    @property
    def first_token(self) -> float:
        """Until its first token."""
        return self.queue + self.recovery


@dataclass(slots=True, eq=False)
class Placement:
    """A request at the executor it was placed on, and what it was thought to take there.

    Fields:
        reason: why there. predicted: seconds from ``time`` to its first token.
        start: tokens of its prompt that others have computed or will, here or where they are fetched from.
        seconds: computing the rest, without the fixed costs of steps, which are shared.
        num_blocks: blocks that it takes beside what is there or expected.
        decoder: where it is to go on once its prompt is computed; None: it stays.
        on_end: called once, with the request, when it is not the executor's any more.
        waits: its first token has not come back. ended: it is not the executor's any more.
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
        """Its first token is back: its prompt is computed and cached. Harmless the second time."""
        if self.waits:
            self.waits = False
            self.executor.answered(self, now)

    def end(self, now: float) -> None:
        """It has finished, failed, or leaves the executor; harmless the second time."""
        self.answered(now)
        if not self.ended:
            self.ended = True
            self.executor.ended(self, now)
            self.goes_on_at(None)
            if self.on_end is not None:
                self.on_end(self.request)

    def goes_on_at(self, decoder: "ExecutorView | None") -> None:
        """After its prompt it goes on there, where it counts from now on; None: it does not, or has left."""
        for view, change in ((self.decoder, -1), (decoder, 1)):
            if view is not None:
                view.num_expected += change * self.query.params.num_sequences
        self.decoder = decoder


class _Lately:
    """A sum in which what is older weighs less, by 1/e in ``_LATELY`` seconds."""

    def __init__(self) -> None:
        self._sum = self._at = 0.0

    def add(self, amount: float, now: float) -> None:
        self._sum, self._at = self.sum(now) + amount, now

    def sum(self, now: float) -> float:
        return self._sum * exp((self._at - now) / _LATELY) if self._sum else 0.0


class ExecutorView:
    """One executor. ``scheduler``: its own; ``costs``: what computing and loading take there; ``role``: what it is for;
    ``grammars``: whether its outputs can be made to match grammars.

    Routing plans nothing there. It only reads, but for one thing: looking for a prompt enters blocks with its content
    into the prefix tree that the executor offered by hash.

    ``load``: sequences placed and unfinished; ``num_expected``: those that are to go on here after their prompts, which
    are computed elsewhere. ``num_decoding``: sequences placed that have begun to answer: each takes a token of every
    step.
    """

    def __init__(self, scheduler: Scheduler, role: Role = "both", *, grammars: bool = True) -> None:
        self.scheduler, self.role, self.grammars = scheduler, role, grammars
        self.costs: CostModel = scheduler.costs
        self.load = self.num_expected = 0
        self.num_decoding = 0
        self._waiting: dict[Placement, None] = {}
        self._work: dict[int, tuple[int, float]] = {}  # tokens and seconds, by priority
        self._num_blocks = 0
        self._answered_at = 0.0
        self._pending = PendingPrefixes()
        self._victim: CachedBlock | None = None
        self._victim_seconds = 0.0
        self._computed = _Lately()
        self._ended = _Lately()

    # ---- what is there -------------------------------------------------------------------------------

    def serves(self, request: Request) -> bool:
        """Whether the outputs of a request can match its grammar here, and be computed with its adapter."""
        if request.params.sampling.grammar and not self.grammars:
            return False
        return request.params.adapter is None or self.scheduler.features.adapters.can_take(request.params.adapter)

    def find(self, query: PrefixQuery) -> Match:
        """How much of a prompt is cached. O(blocks found).

        Blocks that the executor offered by hash after a restart count too. Their content is known only once a prompt
        has it, so they enter the prefix tree here: a prompt is placed where its blocks are, and what is placed finds
        them.
        """
        kv = self.scheduler.kv
        kv.restore(query.cache_salt, lambda: query.tokens)
        size, keys, tree = kv.block_size, query.keys(kv.block_size), kv.pool.tree
        path = tree.walk(tree.root_of(query.cache_salt), keys)
        if not path and not self._waiting:
            spared = self._spared(query, 0)
            return _NO_MATCH._replace(spared=spared) if spared else _NO_MATCH
        prefix = kv.begin_with(query.cache_salt, path, b"")
        lower = 0 if prefix.gap else len(prefix.offloaded) * size  # blocks behind a gap have to wait for those in it
        expected = prefix.num_tokens + lower
        if self._waiting and expected < len(keys) * size:
            expected = min(self._pending.shared(query.cache_salt, query.tokens, expected, size), len(keys) * size)
        spared = self._spared(query, expected)
        return Match(prefix.num_tokens, lower, expected, spared, prefix.gap, tuple(prefix.offloaded))

    def _spared(self, query: PrefixQuery, expected: int) -> int:
        """Of the tokens behind the first ``expected`` ones of a prompt, how many fewer are computed than without
        segments."""
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

    # ---- what it would take --------------------------------------------------------------------------

    @property
    def share(self) -> float:
        """The part of a step's token budget that is left for prompts."""
        budget = self.scheduler.limits.max_num_batched_tokens
        return max(1.0, budget - self.num_decoding) / budget

    def queue_seconds(self, priority: int, now: float) -> float:
        """Until everything that goes before a prompt of this priority is computed."""
        # The steps under way come back first, with whatever decodes in them.
        steps, seconds = len(self.scheduler.steps_in_flight), 0.0
        if self._waiting:
            tokens, seconds = self._work_before(priority, now)
            steps += ceil(tokens / max(1.0, self.scheduler.limits.max_num_batched_tokens - self.num_decoding))
        constants = self.costs.prefill.constants
        return seconds + steps * (constants[0] + constants[1] * self.num_decoding)

    def _work_before(self, priority: int, now: float) -> tuple[int, float]:
        """Prompt tokens that wait before a prompt of this priority, and the seconds that are left of computing them."""
        tokens, seconds = 0, 0.0
        for level, work in self._work.items():
            if level <= priority:
                tokens += work[0]
                seconds += work[1]
        # Results come back step by step, but the first of those that wait has been computing since it was planned,
        # or since the one before it was done.
        begun, since = 0.0, now
        for placement in islice(self._waiting, _LOOKED_AT):
            when = placement.request.scheduled_time
            if when >= placement.time and placement.query.params.priority <= priority:  # it is NaN before
                begun += placement.seconds
                since = min(since, when)
        done = min(now - max(since, self._answered_at), begun) if begun else 0.0
        return tokens, max(0.0, seconds - done)

    def room_seconds(self, query: PrefixQuery, num_blocks: int, now: float) -> float:
        """Until there is a row and blocks for a prompt that takes ``num_blocks``, if that takes others to end.

        Going by how many have ended lately.
        """
        scheduler = self.scheduler
        pool = scheduler.kv.pool
        rows = self.load + query.params.num_sequences - scheduler.limits.max_num_seqs
        blocks = num_blocks + self._num_blocks - pool.num_available
        if rows <= 0 and blocks <= 0:
            return 0.0
        missing = max(rows, blocks * max(1, scheduler.num_running) / max(1, pool.num_in_use))
        return missing * _LATELY / max(1.0, self._ended.sum(now))

    def adapter_seconds(self, query: PrefixQuery) -> float:
        """Until the adapter of a prompt is there, if it has one."""
        return 0.0 if query.params.adapter is None else self.scheduler.features.adapters.seconds(query.params.adapter)

    def busy(self, seconds: float, now: float) -> float:
        """The share of its time, lately, that the prompts placed on it take to compute, with one of ``seconds`` more.

        At most ``_MOST_BUSY``.
        """
        return min(_MOST_BUSY, (self._computed.sum(now) + seconds) / _LATELY)

    def eviction_seconds(self, num_blocks: int) -> float:
        """What it is expected to cost others if a prompt takes ``num_blocks`` blocks; free ones cost nothing."""
        pool = self.scheduler.kv.pool
        evicted = num_blocks - max(0, pool.num_free - self._num_blocks)
        victim = pool.next_evicted() if evicted > 0 else None
        if victim is None:
            return 0.0
        if victim is not self._victim:
            lost = self.costs.seconds_lost(victim.depth, DEVICE)
            self._victim, self._victim_seconds = victim, pool.policy.probability(victim) * lost
        return evicted * self._victim_seconds

    # ---- what is placed ------------------------------------------------------------------------------

    def place(
        self, request: Request, query: PrefixQuery, match: Match, estimate: CostEstimate, reason: str, now: float
    ) -> Placement:
        """The request is the executor's from now on. ``estimate``: what was predicted for it there."""
        kv, start = self.scheduler.kv, estimate.start
        num_tokens = query.num_tokens - start
        steps, *features = self.costs.features(start, num_tokens, self.share)
        seconds = self.costs.prefill.predict(0, *features)
        # What is fetched takes blocks too.
        num_blocks = kv.blocks_for(query.num_tokens) - match.expected // kv.block_size
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
        """What of a prompt will be cached: its tokens, and the originals of its segments (int32 bytes)."""
        yield query.tokens
        yield from (original.tokens for original in query.originals(self.scheduler.kv.block_size))

    def answered(self, placement: Placement, now: float) -> None:
        """A placement does not wait any more."""
        self._answered_at = now
        query = placement.query
        del self._waiting[placement]
        self.num_decoding += query.params.num_sequences
        self._num_blocks -= placement.num_blocks
        tokens, seconds = self._work.pop(query.params.priority)
        tokens -= query.num_tokens - placement.start
        if tokens:  # else nobody waits any more: what is left of the seconds is rounding
            self._work[query.params.priority] = tokens, seconds - placement.seconds
        if query.uses_cache:
            for cached in self._cached_later(query):
                self._pending.remove(query.cache_salt, cached)

    def ended(self, placement: Placement, now: float) -> None:
        """A placement is not the executor's any more."""
        self.load -= placement.query.params.num_sequences
        self.num_decoding -= placement.query.params.num_sequences
        self._ended.add(placement.query.params.num_sequences, now)
