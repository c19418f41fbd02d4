"""The KV memory of a model with several groups of layers: full attention, windows and states."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, takewhile

from pagewise_shared.block_hash import BlockHash
from pagewise_shared.protocol import DEVICE, HOST, GroupKind, pack_int32s

from pagewise_scheduler.core.memory.block_table import BlockTable, CachedPrefix
from pagewise_scheduler.core.memory.counters import MemoryCounters
from pagewise_scheduler.core.memory.eviction import EvictionPolicy
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, PrefixTree, ancestors
from pagewise_scheduler.core.memory.roles import ANSWER
from pagewise_scheduler.core.tiers.arena import Arena, ArenaShape, SharedBlockPool, SharedHostTier
from pagewise_scheduler.core.tiers.cost_model import TierCosts
from pagewise_scheduler.core.tiers.device import BlockPool
from pagewise_scheduler.core.tiers.host import HostTier
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager
from pagewise_scheduler.core.tiers.place_worth import place_in, worth_of
from pagewise_scheduler.core.tiers.snapshot_places import SnapshotPlaces
from pagewise_scheduler.core.tiers.snapshots import SnapshotPool, nearest_pool
from pagewise_scheduler.core.tiers.states import StateGroup
from pagewise_scheduler.core.tiers.tier import BlockCopy, Copies, DemotionPolicy, Location, Tier
from pagewise_scheduler.core.tiers.windows import WindowGroup


class GroupedKVCacheManager(KVCacheManager):
    """The blocks of layers that see all tokens lie in the prefix tree as in models without groups. A sequence has a
    table in each group of windowed layers beside its block table, and begins at snapshots alone (see ``windows``)."""

    def __init__(
        self,
        shape: ArenaShape,
        block_size: int,
        lower: Mapping[int, tuple[int | str, TierCosts]] | None = None,
        policy: EvictionPolicy | None = None,
        demotion: DemotionPolicy | None = None,
        model_fingerprint: str = "",
        *,
        salted: bool = True,
    ) -> None:
        self.shape, self.pages_per_block = shape, shape.pages_per_block
        self.host: SharedHostTier | None = None
        num_blocks = shape.num_pages // shape.pages_per_block
        super().__init__(num_blocks, block_size, lower, policy, demotion, model_fingerprint, salted=salted)
        lengths = range(0, (num_blocks + 1) * block_size, block_size)
        self.capacity_tokens = lengths[bisect_right(lengths, shape.num_pages, key=self.room_for) - 1]

    def _make_host(
        self,
        number: int,
        size: int,
        tree: PrefixTree,
        policy: EvictionPolicy,
        counters: MemoryCounters,
        below: Tier | None,
        costs: TierCosts,
    ) -> HostTier:
        """A tier of ``size`` pages below the device."""
        assert self.host is None, "windows go to one tier with ids"
        each, arena = self.pages_per_block, Arena(size)
        self.host = SharedHostTier(number, size // each, tree, policy, counters, below, costs, self._demotion)
        self.host.share(arena, each, self._forget_snapshots, self.can_begin)
        self.host.snapshots = tuple(
            SnapshotPool(group, number, one, self.block_size, arena, policy, counters, self._windows_changed)
            for group, one in enumerate(self.shape.windows, 1)
        )
        return self.host

    def _make_pool(
        self, num_blocks: int, tree: PrefixTree, policy: EvictionPolicy, counters: MemoryCounters, below: Tier | None
    ) -> BlockPool:
        shape, self._arena = self.shape, Arena(self.shape.num_pages)
        pool = SharedBlockPool(num_blocks, tree, policy, counters, below)
        pool.share(self._arena, shape.pages_per_block, self._forget_snapshots, self.can_begin)
        changed = self._windows_changed
        lower = self.host.snapshots if self.host is not None else (None,) * len(shape.windows)
        pool.snapshots = self.windows = tuple(
            (StateGroup if one.state else WindowGroup)(
                number, one, self.block_size, shape.most_tokens, self._arena, policy, counters, changed, below
            )
            for number, (one, below) in enumerate(zip(shape.windows, lower, strict=True), 1)
        )
        self._places = SnapshotPlaces(
            worth_of(self.windows, self._arena, policy, shape.pages_per_block, self.num_missing)
        )
        for tier in self.hashed.values():
            tier.windows = self.windows
        if self.hashed:
            nearest = self.hashed[min(self.hashed)]
            for group in self.windows:
                (group.below or group).evicted = nearest.write_snapshot
        return pool

    def forget(self) -> None:
        """The executor has lost its KV, as ``KVCacheManager`` describes."""
        self.host = None
        super().forget()

    def _forget_snapshots(self, node: CachedBlock) -> None:
        for group in self.windows:
            pool: SnapshotPool | None = group
            while pool is not None:
                pool.forget(node)
                pool = pool.below

    def _windows_changed(self, node: CachedBlock) -> None:
        """Look again whether the blocks of a node are of use."""
        self.pool.offer(node)
        if self.host is not None:
            self.host.offer(node)

    @property
    def group_kinds(self) -> tuple[GroupKind, ...]:
        """The kind of content of each group's blocks, by the group's number on the wire."""
        return self.shape.kinds

    # ---- pages ---------------------------------------------------------------------------------------

    @property
    def num_total(self) -> int:
        """Pages of the device."""
        return self._arena.num_pages

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return self._arena.num_free

    @property
    def num_available(self) -> int:
        """Pages that can be allocated now: free pages, and pages of cached blocks, which are evicted for it."""
        return self._arena.num_available

    @property
    def num_retiring(self) -> int:
        """Pages of retiring blocks."""
        windows = sum(group.num_retiring * group.pages_per_block for group in self.windows)
        return self._num_retiring * self.pages_per_block + windows

    def room_for(self, num_tokens: int, num_shared: int = 0) -> int:
        """By how much ``num_available`` falls at most, as ``KVCacheManager`` describes."""
        windows = sum(group.blocks_for(num_tokens) * group.pages_per_block for group in self.windows)
        return super().room_for(num_tokens, num_shared) * self.pages_per_block + windows

    def num_held(self, tables: Sequence[BlockTable]) -> int:
        """Pages that ``tables`` hold; blocks that they share count once."""
        held = super().num_held(tables) * self.pages_per_block
        for index, group in enumerate(self.windows):
            blocks = {block for table in tables for block in table.windows[index].blocks}
            held += len(blocks) * group.pages_per_block
        return held

    def num_freed(self, table: BlockTable, earlier: Iterable[BlockTable] = ()) -> int:
        """By how much ``num_available`` rises if ``table`` lets go of its blocks after the tables ``earlier``."""
        freed = super().num_freed(table, earlier) * self.pages_per_block
        for group, one in zip(self.windows, table.windows, strict=True):
            freed += sum(group.users(block) == 1 for block in one.blocks) * group.pages_per_block
        return freed

    def num_missing(self, table: BlockTable, num_tokens: int) -> int:
        """By how much ``num_available`` falls at most if ``table`` grows to ``num_tokens`` tokens."""
        missing = super().num_missing(table, num_tokens) * self.pages_per_block
        for group, one in zip(self.windows, table.windows, strict=True):
            missing += max(0, group.blocks_for(num_tokens) - len(one.blocks)) * group.pages_per_block
        return missing

    @property
    def num_for_next(self) -> int:
        """By how much ``num_available`` falls at most if a sequence gets its next block."""
        return self.pages_per_block + sum(group.pages_per_block for group in self.windows)

    def num_taken(self, prefix: CachedPrefix, num_tokens: int) -> int:
        """By how much ``num_available`` falls if a sequence takes ``prefix`` and grows to ``num_tokens`` tokens."""
        taken = super().num_taken(prefix, num_tokens) * self.pages_per_block
        kept = 1 if prefix.partial_tokens else 0
        for group, one in zip(self.windows, prefix.windows, strict=True):
            in_use = sum(1 for block in one.blocks if group.users(block))
            taken += (group.blocks_for(num_tokens) - in_use + kept) * group.pages_per_block
        return taken

    def take_unmapped(self) -> bytes:
        """The blocks that have lost their pages since the last call, as ``GroupedStepPlan.unmapped`` has them."""
        arenas = {DEVICE: self._arena} if self.host is None else {DEVICE: self._arena, HOST: self.host.arena}
        taken = [(tier, *block) for tier, arena in arenas.items() for block in arena.unmapped]
        for arena in arenas.values() if taken else ():
            arena.unmapped = {}
        return pack_int32s([*chain.from_iterable(taken)]) if taken else b""

    # ---- recoverable blocks --------------------------------------------------------------------------

    def expect(self, inventory: Sequence[Mapping[int, dict[BlockHash, int]]]) -> None:
        """The executor has offered these blocks, as ``KVCacheManager`` describes."""
        super().expect(inventory)
        for group, offered in zip(self.windows, inventory[1:], strict=True):
            for pool in (group, group.below):
                if pool is not None and (named := offered.get(pool.tier)):
                    pool.expect(named)

    def restore_windows(self, path: list[CachedBlock]) -> None:
        """Let sequences begin behind the nodes of ``path`` whose windows are recoverable."""
        for group in self.windows:
            for pool in (group, group.below):
                if pool is not None:
                    pool.restore(path, group.margin)

    # ---- sharing -------------------------------------------------------------------------------------

    def begin_with(self, cache_salt: str | None, blocks: list[CachedBlock], rest: bytes) -> CachedPrefix:
        """The longest cached prefix on the device of which every group of windowed layers has a snapshot there.

        ``CachedPrefix.offloaded`` has the blocks behind it, as far as a sequence could begin behind them if the blocks
        and windows that lie below the device were loaded.
        """
        length = junction = next((number for number, node in enumerate(blocks) if node.block < 0), len(blocks))
        length = self._last_point(blocks, length, lower=False)
        windows = tuple(group.table_at(blocks, length) for group in self.windows)
        prefix = CachedPrefix(blocks[:length], -1, 0, length * self.block_size, windows=windows, resume=length)
        prefix.junction, prefix.path = junction, blocks
        if self.host is not None:
            end = next((number for number, node in enumerate(blocks) if not node.num_tiers), len(blocks))
            end = self._last_point(blocks, end, lower=True)
            prefix.offloaded = blocks[length:end]
        return prefix

    def _last_point(self, path: Sequence[CachedBlock], end: int, *, lower: bool) -> int:
        """The greatest number of blocks, at most ``end``, behind which all groups have their windows on the device;
        ``lower``: or below."""
        before = end + 1
        while end < before:
            before = end
            for group in self.windows:
                end = group.last_point(path, end, lower=lower)
        return end

    def can_begin(self, node: CachedBlock, *, device_only: bool = False) -> bool:
        """Whether some tier has the windows with which a sequence begins behind a node; ``device_only``: the device."""
        if device_only:
            return all(group.blocks_at(node) is not None for group in self.windows)
        return all(nearest_pool(group, node) is not None for group in self.windows)

    def loaded_to(self, prefix: CachedPrefix, end: int) -> CachedPrefix:
        """The prefix of a sequence that begins behind ``end`` blocks and loads the missing ones: the blocks and the
        windows that the device has. The sequence shares them."""
        blocks = [*takewhile(lambda node: node.block >= 0, prefix.path[:end])]
        windows = tuple(group.table_at(prefix.path, end) for group in self.windows)
        found = CachedPrefix(blocks, -1, 0, len(blocks) * self.block_size, windows=windows, resume=end)
        found.junction, found.path, found.offloaded = prefix.junction, prefix.path, prefix.path[len(blocks) : end]
        return found

    def num_lacking_in_windows(self, node: CachedBlock | None, end: int) -> int:
        """How many blocks of full layers have as many bytes as the windows behind ``end`` blocks that the device lacks.

        ``node``: of the last of them, if the prefix tree has it.
        """
        pages = 0
        for group in self.windows:
            if node is None or group.blocks_at(node) is None:
                pages += (end - group.first_needed(end * self.block_size)) * group.pages_per_block
        return -(-pages // self.pages_per_block)

    def hold_windows(self, node: CachedBlock, groups: Sequence[int]) -> list[list[Location]]:
        """Hold the windows at the end of a node in the tier below the device, of each of ``groups``."""
        assert self.host is not None
        held: list[list[Location]] = []
        for number in groups:
            pool = self.host.snapshots[number - 1]
            pool.pin(blocks := pool.blocks_at(node) or [])
            pool.used(node)
            held.append([Location(self.host, pool.tier, block, node, group=number) for block in blocks])
        return held

    def begin_windows(self, table: BlockTable, held: list[list[Location]]) -> Copies:
        """Let a table that has taken a prefix have blocks for the windows that are loaded, which are ``held``, and for
        the first tokens that its sequence writes. Returns copies as ``grow`` does."""
        made: list[BlockCopy] = []
        loads = held or [[]] * len(self.windows)
        for group, one, locations in zip(self.windows, table.windows, loads, strict=True):
            one.loading = bool(held)
            if locations:
                one.blocks[:0], copies = group.reserve(len(locations))
                made += copies
            made += group.begin(one)
        return made

    def nothing(self) -> CachedPrefix:
        """Return the prefix of a sequence that begins with nothing."""
        return self.begin_with(None, [], b"")

    def can_fork(self, table: BlockTable, num_tokens: int) -> bool:
        """Whether ``table`` still holds the windows at the end of its first ``num_tokens`` tokens."""
        return all(group.can_fork(one, num_tokens) for group, one in zip(self.windows, table.windows, strict=True))

    def fork(self, table: BlockTable, num_tokens: int) -> CachedPrefix:
        """The prefix of a sequence that begins as ``table``'s first ``num_tokens`` tokens, computed and cached."""
        prefix, windows = super().fork(table, num_tokens), zip(self.windows, table.windows, strict=True)
        prefix.windows = tuple(group.fork(one, num_tokens) for group, one in windows)
        return prefix

    def num_full_blocks(self, count: int, group: int) -> int:
        """How many blocks of the full layers have at least as many bytes as ``count`` blocks of a group."""
        return -(-count * self.windows[group - 1].pages_per_block // self.pages_per_block) if group else count

    def pin(self, blocks: list[int], group: int) -> None:
        """Keep blocks of the device, of a group, for a copy that writes them."""
        (self.windows[group - 1] if group else self.pool).pin(blocks)

    def unpin(self, blocks: list[int], group: int) -> None:
        """The copy is done."""
        (self.windows[group - 1] if group else self.pool).release(blocks[::-1])

    def without_copy(self, prefix: CachedPrefix) -> CachedPrefix:
        """The same prefix without the part that would have to be copied."""
        return self.begin_with(None, prefix.blocks, b"") if prefix.partial_tokens else prefix

    def take(self, table: BlockTable, prefix: CachedPrefix) -> Copies:
        """Begin a table as ``KVCacheManager.take`` does, with the windows of the prefix."""
        for group, one, held in zip(self.windows, table.windows, prefix.windows, strict=True):
            group.pin(held.blocks)
            one.take(held)
            if 0 < prefix.resume <= len(prefix.path):
                group.used(prefix.path[prefix.resume - 1])
        made = [*super().take(table, prefix)]
        for group, one in zip(self.windows, table.windows, strict=True) if prefix.partial_tokens else ():
            made += group.copy_last(one)
        return made

    def num_to_write(self, table: BlockTable) -> int:
        """By how much ``num_available`` falls if a sequence writes into the blocks that it has."""
        windows = zip(self.windows, table.windows, strict=True)
        return sum(group.num_to_write(one) * group.pages_per_block for group, one in windows)

    def expect_snapshots(
        self, table: BlockTable, prefix: CachedPrefix, num_tokens: int, places: Sequence[int] = (), fork: int = 0
    ) -> None:
        """Note where a sequence of ``num_tokens`` tokens, which has taken ``prefix``, is to take snapshots.

        They are near its end, where it leaves the path of others (``SnapshotPlaces``), and at declared ``places``.
        """
        self._places.expect(table, prefix, num_tokens // self.block_size, self.windows, places, fork)

    def cache_full_blocks(
        self, table: BlockTable, num_computed: int, tokens_of: Callable[[int, int], bytes]
    ) -> list[tuple[int, int, int]]:
        """Let others find the table's full blocks, as ``KVCacheManager`` does, and take the snapshots that are due."""
        replaced = super().cache_full_blocks(table, num_computed, tokens_of)
        self._take_due_snapshots(table)
        for group, one in zip(self.windows, table.windows, strict=True):
            group.computed(one, table.num_known, table.due)
        return replaced

    def _take_due_snapshots(self, table: BlockTable) -> None:
        """Take the snapshots whose nodes the table has reached."""
        while table.due and table.due[0] <= table.num_known:
            depth = table.due.pop(0)
            node = next(one for one in ancestors(table.last_node) if one.depth == depth)
            for group, one in zip(self.windows, table.windows, strict=True):
                group.take_snapshot(node, one, place_in(table, one, depth))
                if depth in table.tails and (snapshot := group.at.get(node)) is not None:
                    snapshot.tail = table.tails[depth]

    def take_snapshots(self, table: BlockTable) -> None:
        """Keep the windows at the end of the table's full blocks, so that others can begin behind them."""
        if table.last_node is not None and table.last_node.depth:
            for group, one in zip(self.windows, table.windows, strict=True):
                group.take_snapshot(table.last_node, one, ANSWER)

    # ---- growing and letting go ----------------------------------------------------------------------

    def grow_windows(
        self, table: BlockTable, start: int, num_tokens: int, in_flight_step: int | None, ends: Sequence[int] = ()
    ) -> tuple[list[tuple[int, int, int]], Copies]:
        """Let the table hold the windows of the tokens from ``start`` to ``num_tokens``."""
        copies, added = list[BlockCopy](), list[tuple[int, int, int]]()
        if table.due:
            self._places.computes(table, start, num_tokens)
        for group, one in zip(self.windows, table.windows, strict=True):
            due = [*table.due, *ends] if isinstance(group, StateGroup) else table.due
            found, made = group.grow(one, start, num_tokens, in_flight_step, due)
            added += [(group.number, token, block) for token, block in found]
            copies += made
        return added, copies

    def _free_windows(self, table: BlockTable, in_flight_step: int | None) -> None:
        self.take_snapshots(table)
        for group, one in zip(self.windows, table.windows, strict=True):
            if isinstance(group, StateGroup):
                group.ended(table)
            group.drop(one.blocks, in_flight_step)
            one.clear()
        table.due = []

    def step_returned(self, step: int) -> None:
        """Steps up to and including ``step`` have returned: the blocks that they touched may be reused."""
        super().step_returned(step)
        for group in self.windows:
            group.step_returned(step)
