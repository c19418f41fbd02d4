"""Snapshots: the blocks of windowed layers with which sequences begin behind cached prefixes, and the pools of a tier.

Layers that see a window of the last tokens (or chunks of a context, of which a token sees its own: Llama 4) need few
blocks of a prefix: the *window* at its end. A snapshot is references on these blocks, which hang on a node of the
prefix tree. A prompt often ends the common path a few tokens before the end of the last one, whose template it changes
there. So a snapshot also has the blocks with which sequences can begin at the last nodes before its end.

A snapshot that the device evicts goes to host memory, as far as the blocks of the full layers may be used there. In
host memory snapshots of one path share the blocks that they have in common, which the nodes of the path name.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice, pairwise, takewhile

from pagewise_shared.block_hash import BlockHash
from pagewise_shared.protocol import DEVICE

from pagewise_scheduler.core.memory.counters import MemoryCounters
from pagewise_scheduler.core.memory.eviction import NEAREST, NUM_BLOCK_CLASSES, EvictionPolicy
from pagewise_scheduler.core.memory.eviction_queue import EvictionQueue
from pagewise_scheduler.core.memory.prefix_tree import NOWHERE, CachedBlock, ancestors
from pagewise_scheduler.core.memory.roles import JUNCTION, new_role
from pagewise_scheduler.core.tiers.arena import Arena, WindowShape, per_page
from pagewise_scheduler.core.tiers.state_queue import Inherited, SnapshotValues, StateQueue
from pagewise_scheduler.core.tiers.tier import BlockCopy, Copies

MARGIN = 64
"""Tokens before the end of a snapshot in which sequences can begin with it, too."""


class Snapshot:
    """A window at the end of the prefix of ``node``: ``blocks``, of which ``first`` is the number of the first one.

    ``points``: the nodes behind which a sequence can begin with it, ``node`` first. ``kind``, ``last_used``,
    ``prediction``: as of ``CachedBlock``. ``since``: the depth of the snapshot before it on the way from the root, from
    which on everything would be computed again without this one. ``was_used``: some sequence has begun with it.
    ``tail``: the blocks from it to the end of the prompt that took it; None: that took it elsewhere than near its end.
    ``entry``, ``looked``, ``before``, ``inherited``: of states, see ``StateQueue``.
    """

    __slots__ = (
        "before", "blocks", "entry", "first", "inherited", "kind", "last_used", "looked", "node", "points",
        "prediction", "since", "tail", "was_used",
    )  # fmt: skip

    def __init__(self, points: list[CachedBlock], first: int, blocks: list[int], since: int) -> None:
        self.node, self.points, self.first, self.blocks, self.since = points[0], points, first, blocks, since
        self.kind, self.was_used = self.node.kind, False
        self.last_used = self.prediction = self.entry = self.looked = 0
        self.tail: int | None = None
        self.before: CachedBlock | None = None
        self.inherited: Inherited | None = None


class SnapshotPool:
    """The blocks of the layers of one window in one tier, with ids 0 <= id < ``num_blocks``, in the tier's arena.

    ``number``: of the group on the wire. ``tier``: its number. ``below``: the group's pool in the next tier down, to
    which evicted snapshots go; ``evicted``: is called with them if there is none. ``at``: the snapshot with which a
    sequence begins behind a node; ``changed``: is called with nodes for which it changes. ``recoverable``: cached
    blocks that the executor has offered by hash, and that no prompt has requested yet. A block has *users*, which are
    tables that hold it and copies that read or write it, and snapshots; without users it is cached, and without both it
    is free.
    """

    def __init__(
        self,
        number: int,
        tier: int,
        shape: WindowShape,
        block_size: int,
        arena: Arena,
        policy: EvictionPolicy,
        counters: MemoryCounters,
        changed: Callable[[CachedBlock], None],
        below: "SnapshotPool | None" = None,
    ) -> None:
        self.changed = changed
        self.number, self.tier, self.block_size, self.below = number, tier, block_size, below
        self.window, self.pages_per_block, self.chunked, self.has_states = shape
        self.num_blocks = self.num_unmapped = arena.num_pages // self.pages_per_block
        self.evicted: Callable[[Snapshot, SnapshotPool, list[BlockCopy]], None] | None = None
        self.at: dict[CachedBlock, Snapshot] = {}
        self.recoverable: dict[BlockHash, int] = {}
        self._arena, self._policy, self._counters = arena, policy, counters
        self._users, self._snapshots = [0] * self.num_blocks, [0] * self.num_blocks
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self.num_cached = 0
        self._values = SnapshotValues(policy)
        self._queue: EvictionQueue[Snapshot] | StateQueue = EvictionQueue(self._values, self._rank)
        if self.has_states:
            self._queue = StateQueue(policy, self.at, {}, arena, self.pages_per_block)
        if below is not None and isinstance(below._queue, StateQueue):
            below._queue.above = self.at
        # Below the device: the block that holds a node's tokens, and the node of each block.
        self._block_of: dict[CachedBlock, int] = {}
        self._node_of: dict[int, CachedBlock] = {}
        arena.members.append(self)

    @property
    def num_used(self) -> int:
        """Blocks that hold something."""
        return self.num_blocks - len(self._free)

    def first_needed(self, token: int) -> int:
        """The first block that the query of a token reads."""
        first = token // self.window * self.window if self.chunked else token - self.window + 1
        return max(0, first) // self.block_size

    def users(self, block: int) -> int:
        """Tables that hold a block, and copies that read or write it."""
        return self._users[block]

    def has_snapshot(self, block: int) -> bool:
        """Whether a block belongs to a snapshot."""
        return self._snapshots[block] > 0

    # ---- blocks --------------------------------------------------------------------------------------

    def reserve(self, count: int) -> tuple[list[int], Copies]:
        """Take ``count`` blocks, each with one user. Returns copies as ``Pool.reserve`` does."""
        copies = self._arena.take(self, count)
        return self._take_free(count), copies

    def _take_free(self, count: int) -> list[int]:
        if not count:
            return []
        blocks = self._free[-count:]
        del self._free[-count:]
        for block in blocks:
            self._users[block] = 1
        return blocks

    def unmap(self) -> int:
        """Take the pages from the block that has been free for the longest time."""
        self.num_unmapped += 1
        return self._free[self.num_unmapped - 1]

    def pin(self, blocks: Iterable[int]) -> None:
        """Add a user of each block, all of which are in use or cached."""
        for block in blocks:
            if not self._users[block]:
                assert self._snapshots[block], f"block {block} of group {self.number} is free and cannot be pinned"
                self.num_cached -= 1
            self._users[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one user of each block."""
        for block in blocks:
            self._users[block] -= 1
            assert self._users[block] >= 0, f"block {block} of group {self.number} was released too often"
            if not self._users[block]:
                if self._snapshots[block]:
                    self.num_cached += 1
                else:
                    self._set_free(block)

    def _set_free(self, block: int) -> None:
        self._free.append(block)
        if (node := self._node_of.pop(block, None)) is not None:
            del self._block_of[node]

    # ---- snapshots -----------------------------------------------------------------------------------

    def blocks_at(self, node: CachedBlock) -> list[int] | None:
        """The blocks with which a sequence begins behind ``node``; None: there is no snapshot with them.

        No block is needed where a chunk ends, or if a token sees itself alone.
        """
        needed = self.first_needed(node.depth * self.block_size)
        if needed >= node.depth:
            return []
        snapshot = self.at.get(node)
        return snapshot.blocks[needed - snapshot.first : node.depth - snapshot.first] if snapshot is not None else None

    def last_point(self, path: Sequence[CachedBlock], end: int, *, lower: bool) -> int:
        """The greatest number of blocks, at most ``end``, of ``path`` behind which sequences can begin with the blocks
        of this pool; ``lower``: or of the pools below. 0: behind none."""
        found = [self.at] + ([self.below.at] if lower and self.below is not None else [])
        size = self.block_size
        for number in range(end, 0, -1):
            node = path[number - 1]
            for at in found:
                if node in at:
                    return number
            if (self.chunked or self.window == 1) and self.first_needed(number * size) >= number:
                return number
        return 0

    def used(self, node: CachedBlock) -> None:
        """A sequence has begun behind a node."""
        if (snapshot := self.at.get(node)) is not None:
            self._counters.snapshots_used += 1
            snapshot.was_used, snapshot.inherited = True, None
            self._use(snapshot)

    def has_role(self, node: CachedBlock, role: int) -> None:
        """The snapshot of states behind a node, if there is one, has this role from now on, here and below."""
        if (snapshot := self.at.get(node)) is not None and snapshot.kind != role:
            snapshot.kind = role
            self._use(snapshot)
        if self.below is not None:
            self.below.has_role(node, role)

    def predict(self, node: CachedBlock, prediction: int, last_used: int) -> None:
        """The next use of the snapshot at a node, if there is one, is predicted, counted from ``last_used``."""
        if (snapshot := self.at.get(node)) is not None:
            self._use(snapshot, last_used, prediction)

    def _add(self, snapshot: Snapshot, last_used: int | None = None, prediction: int = 0) -> None:
        self.at |= dict.fromkeys(snapshot.points, snapshot)
        if self.has_states and snapshot.kind < NUM_BLOCK_CLASSES:
            snapshot.kind = new_role(JUNCTION)
        for block in snapshot.blocks:
            self._snapshots[block] += 1
        self._use(snapshot, last_used, prediction)
        for node in snapshot.points:
            self.changed(node)

    def _use(self, snapshot: Snapshot, last_used: int | None = None, prediction: int = 0) -> None:
        snapshot.prediction = prediction
        snapshot.last_used = self._policy.tick() if last_used is None else last_used
        if not self.has_states:
            snapshot.kind = snapshot.node.kind
        self._queue.push(snapshot, NEAREST)
        self._queue.shrink(len(self.at))

    def forget(self, node: CachedBlock) -> None:
        """No sequence can begin behind a node any more: its block lies in no tier."""
        if (snapshot := self.at.pop(node, None)) is not None:
            snapshot.points.remove(node)
            if not snapshot.points:
                self._drop_snapshot(snapshot)
                if self.below is None or node not in self.below.at:
                    self._counters.snapshots_unused += not snapshot.was_used
            elif node is snapshot.node:
                snapshot.node = snapshot.points[0]
                snapshot.since = min(snapshot.since, snapshot.node.depth)
            self.changed(node)

    def spoilt(self, node: CachedBlock) -> None:
        """A block of the snapshot at ``node`` has the wrong content."""
        if (snapshot := self.at.get(node)) is not None:
            self._drop_snapshot(snapshot)

    def _drop_snapshot(self, snapshot: Snapshot) -> None:
        points, snapshot.points = snapshot.points, []
        for node in points:
            del self.at[node]
        for block in snapshot.blocks:
            self._snapshots[block] -= 1
            if not self._snapshots[block] and not self._users[block]:
                self.num_cached -= 1
                self._set_free(block)
        for node in points:
            self.changed(node)

    # ---- recoverable blocks --------------------------------------------------------------------------

    def expect(self, recoverable: dict[BlockHash, int]) -> None:
        """The executor has offered these blocks of the pool, which is empty, by the hashes of their tokens' nodes. They
        have kept their pages, and no others have."""
        taken = set(recoverable.values())
        self._free = [block for block in self._free if block not in taken]
        self.recoverable, self.num_cached, self.num_unmapped = recoverable, len(recoverable), len(self._free)

    def restore(self, path: list[CachedBlock], margin: int) -> None:
        """Make snapshots of the recoverable blocks at the nodes of ``path``, which begins at the root and has its
        hashes: the last ones first, each with up to ``margin`` blocks before its window."""
        if not self.recoverable:
            return
        held = [self._block_of.get(node, self.recoverable.get(node.hash, NOWHERE)) for node in path]
        run, runs = 0, [0]  # how many blocks in a row are held before the end of each
        for block in held:
            run = run + 1 if block >= 0 else 0
            runs.append(run)
        made: list[Snapshot] = []
        for end in range(len(path), 0, -1):
            node, needed = path[end - 1], self.first_needed(end * self.block_size)
            if node in self.at or not node.num_tiers or needed == end or end - runs[end] > needed:
                continue
            first = max(end - runs[end], needed - margin, 0)
            points = [one for one in self._points(node, first) if one.num_tiers]
            made.append(Snapshot(points, first, held[first:end], 0))
            self._add(made[-1])
            for one in path[first:end]:
                self.recoverable.pop(one.hash, None)
        for snapshot, before in pairwise(made):
            snapshot.since = before.node.depth
        for snapshot in made if self.tier != DEVICE else ():
            for node, block in zip(path[snapshot.first :], snapshot.blocks, strict=False):
                self._block_of[node], self._node_of[block] = block, node

    def _points(self, node: CachedBlock, first: int) -> list[CachedBlock]:
        """The nodes behind which a sequence can begin with the blocks from ``first`` to the one of ``node``, and that
        have no snapshot."""
        near = takewhile(lambda one: self.first_needed(one.depth * self.block_size) >= first, ancestors(node))
        return [one for one in near if one not in self.at]

    def forget_recoverable(self) -> None:
        """Give up the recoverable blocks."""
        self.num_cached -= len(self.recoverable)
        for block in self.recoverable.values():
            self._set_free(block)
        self.recoverable.clear()

    # ---- eviction ------------------------------------------------------------------------------------

    def _rank(self, snapshot: Snapshot) -> int | None:
        return NEAREST if snapshot.points else None

    def next_value(self) -> float | None:
        """The value of a page of the next snapshot, and of the blocks that are of use with it alone; None: there is
        none."""
        if self.recoverable:
            return 0.0
        snapshot = self._queue.peek() if self.num_cached else None
        if snapshot is None:
            return None
        if isinstance(self._queue, StateQueue):
            return self._queue.value(snapshot)
        pages = self.pages_per_block * max(1, len(snapshot.blocks))
        pages += self._arena.members[0].pages_per_block * (snapshot.node.depth - snapshot.since)
        return per_page(self._policy, self._values.value(snapshot), pages)

    def give_up(self, copies: list[BlockCopy]) -> bool:
        """Evict the next snapshot of which a block has no users, but recoverable blocks before."""
        if self.recoverable:
            self._set_free(self.recoverable.popitem()[1])
            self.num_cached -= 1
            return True
        in_use: list[Snapshot] = []
        while (snapshot := self._queue.pop()) is not None and all(map(self._users.__getitem__, snapshot.blocks)):
            in_use.append(snapshot)
        for one in in_use:
            self._queue.push(one, NEAREST)
        if snapshot is None:
            return False
        self._evict(snapshot, copies)
        return True

    def evict(self, node: CachedBlock, copies: list[BlockCopy]) -> None:
        """Evict the snapshot at a node, if there is one and a block of it has no users."""
        snapshot = self.at.get(node)
        if snapshot is not None and not all(map(self._users.__getitem__, snapshot.blocks)):
            self._evict(snapshot, copies)

    def _evict(self, snapshot: Snapshot, copies: list[BlockCopy]) -> None:
        kept = self.below is not None and self.below.take_over(snapshot, self.tier, copies)
        self._counters.snapshots_unused += not kept and not snapshot.was_used
        if self.below is None and self.evicted is not None:
            self.evicted(snapshot, self, copies)
        if snapshot.points:  # else room was made below for it by blocks of its path
            self._drop_snapshot(snapshot)
            if not kept and isinstance(self._queue, StateQueue):
                self._queue.bequeath(snapshot)

    def take_over(self, snapshot: Snapshot, source: int, copies: list[BlockCopy]) -> bool:
        """Keep a snapshot that the tier ``source`` is about to evict, if there is room for it. Returns whether it is
        kept.

        ``copies``: the list to which the copies are added. The blocks that they write stay in use until they are
        confirmed, so that neither the blocks nor their pages get other content before.
        """
        node, first = snapshot.node, snapshot.first
        if all(point in self.at for point in snapshot.points):
            return True
        path = [*islice(ancestors(node), node.depth - first)][::-1]
        known = [self._block_of[one] for one in path if one in self._block_of]
        self.pin(known)
        missing = len(path) - len(known)
        has_room = self._arena.try_take(self, missing, copies)
        keeps = (
            has_room and bool(snapshot.points) and snapshot.node is node
        )  # making room has left its path in the tree
        if keeps:
            added = iter(self._take_free(missing))
            for one, block in zip(path, snapshot.blocks, strict=False):
                if one not in self._block_of:
                    self._block_of[one] = own = next(added)
                    self._node_of[own] = one
                    copies.append((source, block, self.tier, own, self.number))
            points = [point for point in snapshot.points if point not in self.at]
            made = Snapshot(points, first, [self._block_of[one] for one in path], snapshot.since)
            made.was_used = snapshot.was_used
            if self.has_states:
                made.kind, made.inherited = snapshot.kind, snapshot.inherited
            since = snapshot.last_used if self.has_states or snapshot.prediction else None
            self._add(made, since, snapshot.prediction)
        self.release(known)
        return keeps


def nearest_pool(pool: SnapshotPool | None, node: CachedBlock) -> SnapshotPool | None:
    """The first of ``pool`` and the pools below it that has the blocks with which a sequence begins behind a node."""
    while pool is not None and pool.blocks_at(node) is None:
        pool = pool.below
    return pool
