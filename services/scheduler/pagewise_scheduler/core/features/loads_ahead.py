"""Loads of cached blocks ahead of their next use: by a client's advice, or because sessions return at a learned time.

Loads and eviction go by one estimate. A free block of the device costs nothing. Otherwise a block is loaded if its
value on the device, from the time on at which its tier can have brought it, exceeds the value of the block that is
evicted for it. The value is the predicted uses times the seconds that each use saves, as for eviction.

Clients whose advice is wrong lose their own trust (see ``advice``). Learned times are bounded instead: when few of the
blocks that were loaded for them have been used, no more are.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import TYPE_CHECKING, Protocol

from pagewise_shared.block_hash import is_below
from pagewise_shared.protocol import Found, LookUp, Message

from pagewise_scheduler.core.features.feature import Feature
from pagewise_scheduler.core.features.loaded_blocks import LoadedBlocks
from pagewise_scheduler.core.features.loads_of_groups import LoadsOfGroups
from pagewise_scheduler.core.features.prefix_load import PrefixLoad
from pagewise_scheduler.core.memory.block_table import BlockTable, CachedPrefix
from pagewise_scheduler.core.memory.eviction import CostAware
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, ancestors, cache_salt_of
from pagewise_scheduler.core.tiers.cost_model import Link
from pagewise_scheduler.core.tiers.grouped import GroupedKVCacheManager
from pagewise_scheduler.core.tiers.hashed import HashedTier
from pagewise_scheduler.core.tiers.recovery_plan import Offer
from pagewise_scheduler.core.tiers.tier import Source
from pagewise_scheduler.core.tiers.transfers import Loads

if TYPE_CHECKING:
    from pagewise_scheduler.core.scheduling.scheduler import Scheduler

_PIECE_BLOCKS, _FAR_BLOCKS, _MOST_LOADING = 256, 128, 512
"""The most blocks of one prefix that one step asks for, the same from far tiers, and the most in flight of one link."""
_BETWEEN_LOOKS = 0.25
"""The seconds after which it is looked at again whether a load pays."""
_MOST_WANTED, _MOST_PROMPTS, _MOST_QUESTIONS = 1024, 64, 64
"""Prefixes that are wanted at the same time, and the ones of these that are prompts, of which nodes may be detached. Of
more, the API key with the most gives up its oldest. Beyond so many questions without an answer, none are asked."""


class HasLast(Protocol):
    """The owner of the last block of a prefix: a session."""

    last: CachedBlock | None


@dataclass(slots=True, eq=False, kw_only=True)
class LoadAhead(PrefixLoad):
    """A prefix that is to be loaded.

    ``key``: the API key that wants it. ``path``: its blocks from the first one on. The prefix tree may not have the
    last ones: these are detached nodes, with the tokens and the predictions. ``last``: its last node at first.
    ``holder``: whose end it is, if it is a session's. ``until``: when to give up, in seconds. ``learned``: its time is
    learned. ``source``: of the last load. ``num_asked``: questions to tiers without ids that are not answered.
    """

    ahead: "LoadsAhead"
    key: str
    path: list[CachedBlock]
    last: CachedBlock
    until: float
    holder: HasLast | None = None
    learned: bool = False
    source: Source | None = None
    num_asked: int = 0

    def arrived(self) -> None:
        self.ahead.came(self)


class LoadsAhead(Feature):
    """The prefixes of one executor that are to be loaded, and their blocks in flight."""

    def __init__(self, scheduler: "Scheduler") -> None:
        super().__init__(scheduler)
        self._kv, policy = scheduler.kv, scheduler.kv.pool.policy
        self._policy = policy if isinstance(policy, CostAware) else None
        kv = scheduler.kv
        self._groups = LoadsOfGroups(scheduler, kv, self._policy) if isinstance(kv, GroupedKVCacheManager) else None
        self._wanted: dict[CachedBlock, LoadAhead] = {}
        self._coming: dict[LoadAhead, None] = {}
        self._queue: list[tuple[float, int, LoadAhead]] = []
        self._tie, self._numbers = count(), count(-1, -1)
        self._questions: dict[int, tuple[LoadAhead, HashedTier]] = {}
        self._unsent: list[LookUp] = []
        self._loaded = LoadedBlocks()

    # ---- wanted prefixes -----------------------------------------------------------------------------

    def reachable(self, path: list[CachedBlock]) -> list[CachedBlock]:
        """The beginning of a path that the device has or that can be loaded."""
        if self._groups is not None or not path:
            return path[: LoadsOfGroups.num_reachable(path)]
        salt = cache_salt_of(path[0])
        path, start = self._walk(path, salt)
        offers = self._offers(path, start, salt, _tokens(path))
        return path[: offers[-1].stop if offers else start]

    def want(
        self,
        path: list[CachedBlock],
        salt: str | None,
        due: float,
        until: float,
        *,
        key: str,
        holder: HasLast | None = None,
        learned: bool = False,
    ) -> None:
        """Load the blocks of ``path`` as soon as that pays: at a learned time not before they have to come.

        ``due``: their next use is expected then; ``until``: when to give up; both in seconds. ``key``: the API key that
        wants them.
        """
        if not path:
            return
        self.forget(path[-1:])
        rivals = [one for one in self._wanted.values() if holder is not None or one.holder is None]
        if len(rivals) >= (_MOST_WANTED if holder is not None else _MOST_PROMPTS):
            numbers = Counter(one.key for one in rivals)
            self._drop(max(rivals, key=lambda one: numbers[one.key]))  # of several, the first
        table = self._kv.new_table(salt, path[-1].cached_by)
        load = LoadAhead(
            table, ahead=self, key=key, path=path, last=path[-1], until=until, holder=holder, learned=learned
        )
        self._wanted[load.last] = load
        if holder is None:
            self._look_up(load)
        slowest = max((one.load.seconds(len(path)) for one in self.scheduler.costs.tiers.values()), default=0.0)
        self._look_at(load, due - slowest if learned else 0.0)

    def forget(self, nodes: Iterable[CachedBlock]) -> None:
        """Load no further blocks of the prefixes that end with one of ``nodes``."""
        for node in nodes:
            if (load := self._wanted.get(node)) is not None:
                self._drop(load)

    def _drop(self, load: LoadAhead) -> None:
        del self._wanted[load.last]
        if load not in self._coming:
            load.path = []  # the queue has it until its time

    def _look_at(self, load: LoadAhead, time: float) -> None:
        if len(self._queue) > 4 * _MOST_WANTED:
            self._queue = [one for one in self._queue if self._wanted.get(one[2].last) is one[2]]
            heapq.heapify(self._queue)
        heapq.heappush(self._queue, (time, next(self._tie), load))

    def is_due(self, now: float) -> bool:
        return bool(self._queue) and self._queue[0][0] <= now

    def coming(self) -> Iterable[tuple[BlockTable, bytes]]:
        return ((load.table, load.tokens) for load in self._coming)

    # ---- prompts in tiers without ids ----------------------------------------------------------------

    def may_be_stored(self, salt: str | None) -> bool:
        """Whether a prompt with a cache salt may be looked up in tiers without ids."""
        return self._groups is None and any(self._may_be_in(tier, salt) for tier in self._kv.hashed.values())

    def _may_be_in(self, tier: HashedTier, salt: str | None) -> bool:
        return not tier.link.rests and tier.may_have(salt) and len(self._questions) < _MOST_QUESTIONS

    def _look_up(self, load: LoadAhead) -> None:
        """Ask how much of a prompt tiers without ids have: others may have written it."""
        salt, tokens, epoch = load.table.cache_salt, _tokens(load.path), self.scheduler.epoch
        for tier in self._kv.hashed.values() if self._groups is None else ():
            if self._may_be_in(tier, salt):
                number = next(self._numbers)  # look-ups for requests have positive numbers
                self._questions[number] = load, tier
                load.num_asked += 1
                root = self._kv.pool.tree.root_hash(salt)
                self._unsent.append(LookUp(epoch, number, tier.number, root, tokens))

    def messages(self, now: float) -> list[Message]:
        unsent, self._unsent = self._unsent, []
        return [*unsent]

    def take(self, message: Message, now: float) -> tuple[()]:
        if isinstance(message, Found) and message.number in self._questions:
            load, tier = self._questions.pop(message.number)
            load.num_asked -= 1
            tier.found(load.path[: max(0, message.num_blocks)])
            self._look_at(load, 0.0)
        return ()

    # ---- loading -------------------------------------------------------------------------------------

    def add_to_plan(self, step: int, budget: int, loads: Loads) -> int:
        now, due = self._kv.eviction_history.now, list[LoadAhead]()
        while self.is_due(now):
            due.append(heapq.heappop(self._queue)[2])
        for load in due:
            if self._wanted.get(load.last) is not load or load in self._coming:
                continue
            if load.stopped or load.until < now or not self._load(load, step, loads, now):
                self._drop(load)
            elif not load.pieces:
                self._look_at(load, now + _BETWEEN_LOOKS)
        return 0

    def _load(self, load: LoadAhead, step: int, loads: Loads, now: float) -> bool:
        """Ask for the next blocks of a prefix if they pay; False: none is missing, or nothing has the next one."""
        kv, salt = self._kv, load.table.cache_salt
        path, start = self._walk(load.path, salt)
        load.path = path
        if load.learned and not self._loaded.is_proved(now, kv.pool.num_blocks):
            return False
        if self._groups is not None:
            found = self._groups.begin(load, path, step, loads)
            self._asked(load)
            return found
        if start == len(path):
            return False
        load.tokens = load.tokens or _tokens(path)
        if not (offers := self._offers(path, start, salt, load.tokens)):
            # Its copy to there is under way, or an answer is.
            return load.num_asked > 0 or any(tier.holds(path[start]) for tier in kv.hashed.values())
        # Holding the blocks before them takes blocks that were available.
        room = self.scheduler.prefilling.num_spare(len(self.scheduler.decoding))
        room -= kv.num_taken(CachedPrefix(path[:start], -1, 0, start * kv.block_size), start * kv.block_size)
        part = offers[0]
        most = _FAR_BLOCKS if part.source.is_far else _PIECE_BLOCKS
        most = min(part.stop - start, most, _MOST_LOADING - part.source.link.num_loading, room)
        stop = start + self._num_worth(path[start : start + max(0, most)], path[:start], part.source.link)
        if start < stop:
            load.hold(self.scheduler, path[:start])
            load.source = part.source
            load.ask(self.scheduler, step, loads, part.hold(start, stop))
            self._asked(load)
        return True

    def _walk(self, path: list[CachedBlock], salt: str | None) -> tuple[list[CachedBlock], int]:
        """The path with the nodes that the prefix tree has now, and how many of them, from the first one on, are on the
        device."""
        tree = self._kv.pool.tree
        found = tree.walk(tree.root_of(salt), (node.tokens for node in path))
        return found + path[len(found) :], sum(1 for _ in takewhile(lambda node: node.block >= 0, found))

    def _asked(self, load: LoadAhead) -> None:
        """Blocks of a load may be in flight now."""
        if load.pieces:
            self._coming[load] = None
            if self._loaded not in self._kv.watchers:
                self._kv.watchers.append(self._loaded)
            self._loaded.asked(load.learned * sum(len(one.blocks) for one in load.pieces))

    def _offers(self, path: Sequence[CachedBlock], start: int, salt: str | None, tokens: bytes) -> list[Offer]:
        return self.scheduler.recoveries.planner.offers_ahead(path, start, salt, tokens)

    def _num_worth(self, nodes: Sequence[CachedBlock], before: Sequence[CachedBlock], link: Link) -> int:
        """How many of ``nodes``, from the first one on, are worth more on the device than the blocks that give way.

        ``before``: the blocks before them, which stay. ``link``: brings them.
        """
        free, policy, costs = self._kv.num_free, self._policy, self.scheduler.costs
        assert policy is not None
        seconds = link.seconds(len(nodes), link.num_loading)
        victims = self._victims(len(nodes) - free, set(before[-1:])) if len(nodes) > free else []

        def pays(pair: tuple[CachedBlock, CachedBlock]) -> bool:
            node, victim = pair
            saved = min(costs.block_seconds(node.depth, link))
            return policy.uses_from(node, seconds) * saved > policy.value(victim)

        worth = takewhile(pays, zip(nodes[free:], victims, strict=False))
        return min(len(nodes), free + sum(1 for _ in worth))

    def _victims(self, num_blocks: int, stay: set[CachedBlock]) -> list[CachedBlock]:
        """The blocks that would be evicted first, parents after their last children, without the blocks in ``stay``."""
        pool, value, tie = self._kv.pool, self._kv.pool.policy.value, count()
        heap = [(value(node), next(tie), node) for node in pool.next_evictions(num_blocks + len(stay))]
        heapq.heapify(heap)
        victims: list[CachedBlock] = []
        while heap and len(victims) < num_blocks:
            node = heapq.heappop(heap)[2]
            if node in stay:
                continue
            victims.append(node)
            parent = node.parent  # it may be evicted next
            if parent is None or parent.num_on_device > 1 or parent.block < 0 or pool.references(parent.block):
                continue
            heapq.heappush(heap, (value(parent), next(tie), parent))
        return victims

    def came(self, load: LoadAhead) -> None:
        """Blocks of a prefix have come: the ones before the first bad one are cached."""
        if load not in self._coming:
            return
        if load.stopped:  # its peer is gone, or the cache was reset
            load.pieces.clear()
            self._ended(load)
            return
        start, before = load.table.num_known, load.path
        windows = [one for one in load.pieces if one.group]
        num_bad = load.cache(self.scheduler)
        is_good = not num_bad and all(one.is_good for one in windows)
        if self._groups is not None and is_good:
            self._groups.keep(load.table, windows)
        now_here = [*ancestors(load.table.last_node)][::-1]
        load.path = now_here + before[len(now_here) :]
        for old, node in zip(before[start:], now_here[start:], strict=False):
            if node is not old:
                _inherit(node, old)
            self._loaded.came(node, learned=load.learned)
        end = len(now_here)
        if end < len(before) and not before[end].num_tiers and end and now_here[-1] is not before[end - 1]:
            before[end].parent = now_here[-1]  # the rest of a detached path, whose beginning is cached again
        if end == len(before) and load.holder is not None and load.holder.last is load.last:
            load.holder.last = now_here[-1]
        if num_bad and isinstance(load.source, HashedTier):
            load.source.forgot(before[end:])
        load.stopped = not is_good
        self._ended(load)

    def _ended(self, load: LoadAhead) -> None:
        """No blocks of a load are in flight any more. More are asked for, unless it was stopped."""
        self._release(load.table)
        del self._coming[load]
        self._look_at(load, 0.0)

    def _release(self, table: BlockTable) -> None:
        """Release the blocks of a table. That is no use of them, from which the times of their next uses count."""
        used = [(node, node.last_used) for node in ancestors(table.last_node)]
        if self._groups is not None:
            self._groups.let_go(table)
        self._kv.free(table, None)
        for node, before in used:
            if node.last_used != before:
                node.last_used = before
                for tier in self._kv.tiers.values():
                    tier.offer(node)

    def peer_lost(self, peer: str) -> None:
        for load in self._coming:
            if load.source is not None and load.source.peer == peer:
                load.stopped = True

    def cache_reset(self, salt: str) -> None:
        for load in (*self._wanted.values(), *self._coming):
            if is_below(load.table.cache_salt, salt):
                load.stopped = True

    def clear(self) -> None:
        for load in self._coming:
            self._release(load.table)
        for kept in (self._coming, self._wanted, self._questions):
            kept.clear()
        self._queue.clear()
        self._unsent.clear()

    def counts(self) -> dict[str, int]:
        return {"advice_loaded_blocks": self._loaded.num_loaded, "advice_used_blocks": self._loaded.num_used}


def _tokens(path: Iterable[CachedBlock]) -> bytes:
    return b"".join(node.tokens for node in path)


def _inherit(node: CachedBlock, old: CachedBlock) -> None:
    """A block is cached again whose detached node is ``old``: its uses and its prediction are known."""
    node.kind, node.last_used, node.flags = old.kind, old.last_used, node.flags | old.flags
    node.session, node.prediction, node.cached_by = old.session, old.prediction, old.cached_by
