"""Gives sequences their blocks on demand, shares cached blocks, and takes blocks back when it is safe."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile

from pagewise_shared.block_hash import BlockHash
from pagewise_shared.protocol import DEVICE

from pagewise_scheduler.core.memory.block_table import BlockTable, CachedPrefix
from pagewise_scheduler.core.memory.block_watch import BlockWatcher
from pagewise_scheduler.core.memory.counters import MemoryCounters
from pagewise_scheduler.core.memory.eviction import EvictionPolicy, LeastRecentlyUsed
from pagewise_scheduler.core.memory.eviction_history import LossLog, LossReason, RequestRef
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, PrefixTree, ancestors, block_keys, hash_chain
from pagewise_scheduler.core.tiers.cost_model import TierCosts
from pagewise_scheduler.core.tiers.device import BlockPool
from pagewise_scheduler.core.tiers.hashed import HashedTier
from pagewise_scheduler.core.tiers.host import HostTier
from pagewise_scheduler.core.tiers.pool import Pool
from pagewise_scheduler.core.tiers.snapshot_watch import note_all, watch
from pagewise_scheduler.core.tiers.tier import Copies, DemotionPolicy, Tier
from pagewise_scheduler.core.tiers.window_hooks import WindowHooks


class KVCacheManager(WindowHooks):
    """The KV memory of one executor: its tiers, and the blocks that wait for a step to return.

    ``lower``: by the number of each tier below the device, its number of blocks, or its identity if its blocks have no
    ids, and the costs of its copies. ``demotion``: decides which prefixes these tiers take over. ``salted``: KV of
    requests with a cache salt may go to tiers without ids.

    ``capacity_tokens``: most tokens of a sequence that has the pool to itself. ``pool``: the device's blocks.
    ``tiers``: the tiers with ids by number, with the device; ``hashed``: the tiers without ids. ``eviction_history``:
    the log of lost content. A block that is freed while a step in flight touches it is *retiring*: it keeps its
    reference until the step has returned, so no other sequence writes into it before. ``num_retiring``: their number.
    ``watchers``: called when a block enters a tier, is used, and leaves it.

    A model with several groups of layers has a ``GroupedKVCacheManager``, which counts pages instead of blocks wherever
    memory is counted.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        lower: Mapping[int, tuple[int | str, TierCosts]] | None = None,
        policy: EvictionPolicy | None = None,
        demotion: DemotionPolicy | None = None,
        model_fingerprint: str = "",
        *,
        salted: bool = True,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"a block holds at least one token, not {block_size}")
        self.block_size = block_size
        self.capacity_tokens = num_blocks * block_size
        self._lower, self._demotion, self._salted = lower or {}, demotion, salted
        self.eviction_history = LossLog()
        self.watchers: list[BlockWatcher] = []
        self._build_tiers(num_blocks, policy or LeastRecentlyUsed(), MemoryCounters(), model_fingerprint)
        self._retiring: deque[tuple[int, list[int]]] = deque()
        self._num_retiring = 0

    def _build_tiers(
        self, num_blocks: int, policy: EvictionPolicy, counters: MemoryCounters, model_fingerprint: str
    ) -> None:
        """Empty tiers over an empty prefix tree."""
        num_tiers = 1 + max(self._lower, default=DEVICE)
        tree = PrefixTree(self.block_size, model_fingerprint, num_tiers, self.eviction_history)
        below: Tier | None = None
        self.hashed: dict[int, HashedTier] = {}
        for number, (size, costs) in sorted(self._lower.items(), reverse=True):
            if isinstance(size, int):
                below = self._make_host(number, size, tree, policy, counters, below, costs)
            else:
                below = HashedTier(number, size, policy, counters, below, costs, self._demotion, salted=self._salted)
                self.hashed[number] = below
        self.pool = self._make_pool(num_blocks, tree, policy, counters, below)
        self.tiers: dict[int, Pool] = {tier.number: tier for tier in (self.pool, *self.pool.lower)}
        for tier in self.tiers.values():
            tier.watchers = self.watchers
        for group in self.windows:
            watch(group, self.eviction_history, counters, policy)

    def _make_pool(
        self, num_blocks: int, tree: PrefixTree, policy: EvictionPolicy, counters: MemoryCounters, below: Tier | None
    ) -> BlockPool:
        """The device's blocks."""
        return BlockPool(num_blocks, tree, policy, counters, below)

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
        """A tier of ``size`` blocks below the device."""
        return HostTier(number, size, tree, policy, counters, below, costs, self._demotion)

    @property
    def num_total(self) -> int:
        """Blocks of the device."""
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return self.pool.num_free

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: free ones, and cached ones, which are evicted for it."""
        return self.pool.num_available

    @property
    def num_in_use(self) -> int:
        """Blocks with references."""
        return self.num_total - self.num_available - self.pool.num_protected

    @property
    def num_retiring(self) -> int:
        """Blocks that are retiring."""
        return self._num_retiring

    def room_for(self, num_tokens: int, num_shared: int = 0) -> int:
        """By how much ``num_available`` falls at most for ``num_tokens`` tokens with ``num_shared`` shared blocks."""
        return self.blocks_for(num_tokens) - num_shared

    def num_held(self, tables: Sequence[BlockTable]) -> int:
        """Blocks that ``tables`` hold; blocks that they share count once."""
        return len({block for table in tables for block in table.blocks})

    def num_freed(self, table: BlockTable, earlier: Iterable[BlockTable] = ()) -> int:
        """By how much ``num_available`` rises if ``table`` lets go of its blocks after the tables ``earlier``."""
        return self.pool.num_freed(table.blocks, (block for one in earlier for block in one.blocks))

    def num_missing(self, table: BlockTable, num_tokens: int) -> int:
        """By how much ``num_available`` falls at most if ``table`` grows to ``num_tokens`` tokens."""
        return table.blocks_missing(num_tokens)

    @property
    def num_for_next(self) -> int:
        """By how much ``num_available`` falls at most if a sequence gets its next block."""
        return 1

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks it takes to hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def new_table(self, cache_salt: str | None = None, owner: RequestRef | None = None) -> BlockTable:
        """An empty block table of the request ``owner`` that shares the cache of ``cache_salt``."""
        return BlockTable(self.block_size, cache_salt, owner, tuple(group.new_table() for group in self.windows))

    def cache_tier(self, number: int) -> HostTier | None:
        """The tier of that number below the device, if the executor has it."""
        tier = self.tiers.get(number)
        return tier if isinstance(tier, HostTier) else None

    def lower_tier(self, number: int) -> Tier:
        """The tier of that number below the device, which the executor has."""
        tier = self.hashed.get(number) or self.cache_tier(number)
        assert tier is not None, f"the executor has no tier {number} below the device"
        return tier

    # ---- recoverable blocks ---------------------------------------------------------------------------

    def expect(self, inventory: Sequence[Mapping[int, dict[BlockHash, int]]]) -> None:
        """The executor has offered these blocks of its tiers in its Hello: they are recoverable. The tiers are empty.

        ``inventory``: of each group of layers, block ids by block hash, by number of the tier; the server has checked
        it.
        """
        for number, named in inventory[0].items():
            if named:
                self.tiers[number].expect(named)

    def restore(self, cache_salt: str | None, tokens_of: Callable[[], bytes]) -> None:
        """Put the recoverable blocks of a sequence into the prefix tree. ``tokens_of``: returns its tokens as int32
        bytes."""
        tiers = [tier for tier in self.tiers.values() if tier.recoverable]
        if not tiers:
            return
        tokens, tree = tokens_of(), self.pool.tree
        hashes = hash_chain(tree.root_hash(cache_salt), tokens, 4 * self.block_size)
        offered = (index for index, known in enumerate(hashes, 1) if any(known in one.recoverable for one in tiers))
        if not (length := max(offered, default=0)):
            return
        path = tree.extend(tree.root(cache_salt), block_keys(tokens, self.block_size, length * self.block_size))
        for node, known in zip(path, hashes, strict=False):
            node.hash = known
            for tier in tiers:
                tier.restore(node)
        self.restore_windows(path)
        stays = tree.prune(path[-1])
        for tier in self.pool.lower:
            tier.offer(stays)

    # ---- sharing -------------------------------------------------------------------------------------

    def begin_with(self, cache_salt: str | None, blocks: list[CachedBlock], rest: bytes) -> CachedPrefix:
        """The cached prefix of a prompt. ``blocks``: its full blocks in the tree. ``rest``: the tokens after them
        (int32 bytes), of which one block's matter. Changes nothing."""
        on_device = len(blocks)
        while on_device and blocks[on_device - 1].block < 0:
            on_device -= 1
        if on_device < len(blocks):
            further = blocks[on_device:]
            gap = sum(1 for _ in takewhile(lambda node: not node.num_tiers, further))
            offloaded = list(takewhile(lambda node: node.num_tiers, further[gap:]))
            return CachedPrefix(blocks[:on_device], -1, 0, on_device * self.block_size, offloaded, gap)
        found = CachedPrefix(blocks, -1, 0, len(blocks) * self.block_size)
        if rest:
            last = blocks[-1] if blocks else self.pool.tree.root_of(cache_salt)
            partial = self.pool.tree.find_partial(last, rest) if last is not None else None
            if partial is not None:
                found.partial_block, found.partial_tokens = partial[0].block, partial[1]
                found.num_tokens += found.partial_tokens
        return found

    def nothing(self) -> CachedPrefix:
        """Return the prefix of a sequence that begins with nothing."""
        return CachedPrefix([], -1, 0, 0)

    def fork(self, table: BlockTable, num_tokens: int) -> CachedPrefix:
        """The prefix of a sequence that begins as ``table``'s first ``num_tokens`` tokens, computed and cached."""
        full, rest = divmod(num_tokens, self.block_size)
        assert table.num_known >= full
        blocks = [node for node in ancestors(table.last_node) if node.depth <= full]
        blocks.reverse()
        return CachedPrefix(blocks, table.blocks[full] if rest else -1, rest, num_tokens)

    def num_taken(self, prefix: CachedPrefix, num_tokens: int) -> int:
        """By how much ``num_available`` falls if a sequence takes ``prefix`` and grows to ``num_tokens`` tokens."""
        references, shared = self.pool.references, self.pool.num_shared(prefix.blocks)
        # The source of the copy must not be evicted to make room for the copy.
        kept = 1 if prefix.partial_tokens and references(prefix.partial_block) == 0 else 0
        return self.blocks_for(num_tokens) - shared + kept

    def without_copy(self, prefix: CachedPrefix) -> CachedPrefix:
        """The same prefix without the part that would have to be copied."""
        return CachedPrefix(prefix.blocks, -1, 0, len(prefix.blocks) * self.block_size, prefix.offloaded, prefix.gap)

    def take(self, table: BlockTable, prefix: CachedPrefix) -> Copies:
        """Begin an empty table with a prefix, as far as it is on the device.

        Whole blocks are shared. A block of which only a part matches is copied, because the sequence continues to write
        in it. Returns the copies that the next step has to make before it computes: this one, and the demotions that
        make room for it. The caller has checked that a block is available.
        """
        assert not table.blocks
        shared = self.pool.begin_with(prefix.blocks)
        table.last_node = prefix.blocks[-1] if prefix.blocks else None
        if not prefix.partial_tokens:
            table.blocks = shared
            return ()
        source = prefix.partial_block
        self.pool.pin([source])  # so that making room for the copy does not evict its source
        (target,), copies = self._reserve(1, [table])
        self.pool.counters.copied += 1
        self.pool.release([source])
        table.blocks = [*shared, target]
        return (*copies, (DEVICE, source, DEVICE, target, 0))

    def num_full_blocks(self, count: int, group: int) -> int:
        """How many blocks of the full layers have at least as many bytes as ``count`` blocks of a group."""
        return count

    def pin(self, blocks: list[int], group: int) -> None:
        """Keep blocks of the device, of a group, for a copy that writes them."""
        self.pool.pin(blocks)

    def unpin(self, blocks: list[int], group: int) -> None:
        """The copy is done."""
        self.pool.release(reversed(blocks))

    def cache_full_blocks(
        self, table: BlockTable, num_computed: int, tokens_of: Callable[[int, int], bytes]
    ) -> list[tuple[int, int, int]]:
        """Let others find the table's full blocks among its first ``num_computed`` tokens.

        They are tokens whose K and V a step that came back has computed; ``tokens_of(start, stop)`` gives them as
        int32 bytes. Where another sequence has cached the same content meanwhile, the table takes that block instead of
        its own: returned are (index in the table, own block, the other's block), and the caller says when the
        references on the own blocks are dropped.
        """
        size, pool, last_node = self.block_size, self.pool, table.last_node
        first, last = 0 if last_node is None else last_node.depth, num_computed // size
        if first >= last:
            return []
        replaced: list[tuple[int, int, int]] = []
        if last_node is None:
            last_node = pool.tree.root(table.cache_salt)
        for index in range(first, last):
            tokens = tokens_of(index * size, (index + 1) * size)
            own = table.blocks[index]
            duplicate = last_node.children.get(tokens)
            if duplicate is None or duplicate.block < 0:
                last_node = pool.cache_full_block(last_node, tokens, own, duplicate, table.owner)
            else:
                other = duplicate.block
                pool.pin([other])
                table.blocks[index] = other
                replaced.append((index, own, other))
                last_node = duplicate
        table.last_node = last_node
        return replaced

    # ---- growing and letting go ----------------------------------------------------------------------

    def grow(self, table: BlockTable, num_tokens: int) -> tuple[list[int], Copies]:
        """Let ``table`` hold ``num_tokens`` tokens.

        Returns the blocks that were added, possibly none, and the copies that have to be made before a step writes into
        them: blocks that were evicted for them go to other tiers.

        Raises:
            OutOfBlocksError: there are too few blocks; nothing was changed.
        """
        added, copies = self._reserve(table.blocks_missing(num_tokens), [table])
        table.blocks += added
        return added, copies

    def grow_by_one(self, tables: Sequence[BlockTable]) -> Copies:
        """Let each table have one block more; returns copies as ``grow`` does.

        Raises:
            OutOfBlocksError: there are too few blocks; nothing was changed.
        """
        added, copies = self._reserve(len(tables), tables)
        for table, block in zip(tables, added, strict=True):
            table.blocks.append(block)
        return copies

    def _reserve(self, count: int, tables: Sequence[BlockTable]) -> tuple[list[int], Copies]:
        """Take ``count`` blocks for ``tables``."""
        self.eviction_history.reserves_for(tables[0].owner if tables else None, len(tables))
        return self.pool.reserve(count)

    def free(self, table: BlockTable, in_flight_step: int | None, ending: int | None = None) -> None:
        """Drop the table's references, at once or when ``in_flight_step``, the last that touches it, returns.

        ``ending``: how this use of the blocks ended (see ``eviction.ending``), from which eviction learns. None: it was
        no use of them, or it has been counted.
        """
        if ending is not None and self.pool.policy.learns:
            self.pool.policy.used(reversed(list(ancestors(table.last_node))), ending)
        if table.windows:
            self._free_windows(table, in_flight_step)
        blocks, table.blocks, table.last_node = table.blocks, [], None
        self.drop(blocks, in_flight_step)

    def drop(self, blocks: list[int], in_flight_step: int | None) -> None:
        """Drop one reference on each of ``blocks`` (in a sequence's order), at once or when the step returns."""
        if not blocks:
            return
        if in_flight_step is None:
            self.pool.release(reversed(blocks))
        else:
            self._retiring.append((in_flight_step, blocks))
            self._num_retiring += len(blocks)

    def step_returned(self, step: int) -> None:
        """Steps up to and including ``step`` have returned: the blocks that they touched may be reused."""
        retiring = self._retiring
        while retiring and retiring[0][0] <= step:
            blocks = retiring.popleft()[1]
            self._num_retiring -= len(blocks)
            self.pool.release(reversed(blocks))

    def close(self, reason: LossReason = "executor lost") -> None:
        """The executor is gone, or all its KV is: drop the prefix tree and the tiers at once.

        Tiers and nodes refer to each other, so without this they would stay until a garbage collection.
        """
        self.eviction_history.all_gone(self.pool.tree.roots, reason)
        note_all(self.windows, self.eviction_history, self.pool.policy, reason)
        for tier in self.tiers.values():
            tier.close()
        self.pool.tree.unlink()

    def forget(self) -> None:
        """The executor has lost its KV: nothing is cached any more, in no tier. No table may hold blocks.

        Other executors that still read its blocks release them in the old tiers, which are not used any more.
        """
        pool, hashed = self.pool, self.hashed
        assert pool.num_in_use <= pool.num_remote_pins
        self.close("executor reset")
        self._build_tiers(pool.num_blocks, pool.policy, pool.counters, pool.tree.model_fingerprint)
        for number, tier in self.hashed.items():
            tier.watcher = hashed[number].watcher
        if pool.budgets is not None:
            pool.budgets.on_rebuilt()
