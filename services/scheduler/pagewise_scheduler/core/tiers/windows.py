"""The blocks of layers that see a window of the last tokens, and the snapshots that let sequences begin with them.

A window slides with its token, or contexts are cut into chunks, of which a token sees its own (Llama 4). A sequence
keeps the blocks of its window. A block behind the window goes as soon as no step in flight
reads it. Whoever begins with a cached prefix needs the window at its end, not only the full layers' blocks. So at the
end of a prompt and of an answer a *snapshot* keeps the window there: references on its blocks, which hang on the node
of the prefix tree. A prefix can be begun with at its snapshots alone.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from pagewise_scheduler.core.memory.block_table import WindowTable
from pagewise_scheduler.core.memory.eviction import NEAREST, EvictionPolicy, EvictionQueue
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, ancestors
from pagewise_scheduler.core.tiers.arena import Arena
from pagewise_scheduler.core.tiers.tier import BlockCopy, Copies


class WindowShape(NamedTuple):
    """A group of windowed layers.

    ``window``: tokens that a query sees, itself included; if ``chunked``, tokens of a chunk. ``pages_per_block``: pages
    that a block takes.
    """

    window: int
    pages_per_block: int
    chunked: bool = False


class Snapshot:
    """A window at the end of the prefix of ``node``: ``blocks``, the last of which is that of the node.

    ``kind``, ``last_used``: as of ``CachedBlock``. ``since``: the depth of the snapshot before it on the way from the
    root, from which on everything would be computed again without this one.
    """

    __slots__ = ("blocks", "kind", "last_used", "node", "since")

    def __init__(self, node: CachedBlock, blocks: list[int], since: int) -> None:
        self.node, self.blocks, self.since = node, blocks, since
        self.kind = node.kind
        self.last_used = 0


class _SnapshotValues:
    """Orders snapshots by a policy for blocks: a snapshot saves the blocks since the one before it."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy

    def group(self, snapshot: Snapshot) -> int:
        return self._policy.group(snapshot.node)

    def order(self, snapshot: Snapshot) -> float:
        return snapshot.last_used

    def value(self, snapshot: Snapshot) -> float:
        saved = snapshot.node.depth - snapshot.since
        return self._policy.value(snapshot.node) * saved if self._policy.learns else float(snapshot.last_used)


class WindowGroup:
    """The blocks of the layers of one window, with ids 0 <= id < ``num_blocks``, in an arena.

    ``number``: of the group on the wire. ``most_blocks``: most blocks of a sequence, which the tokens of steps in
    flight decide. A block has *users*, tables that hold it and copies that read it, and snapshots; without users it is
    cached, and without both it is free.
    """

    def __init__(
        self, number: int, shape: WindowShape, block_size: int, most_tokens: int, arena: Arena, policy: EvictionPolicy
    ) -> None:
        self.number, self.block_size = number, block_size
        self.window, self.pages_per_block, self.chunked = shape
        self.num_blocks = self.num_unmapped = arena.num_pages // self.pages_per_block
        self.most_blocks = -(-(self.window - 1 + most_tokens) // block_size) + 3
        self.at: dict[CachedBlock, Snapshot] = {}
        self._arena, self._policy = arena, policy
        self._users, self._snapshots = [0] * self.num_blocks, [0] * self.num_blocks
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self.num_cached = 0
        self._values = _SnapshotValues(policy)
        self._queue = EvictionQueue[Snapshot](self._values, self._rank)
        self._retiring: deque[tuple[int, list[int]]] = deque()
        self.num_retiring = 0
        arena.members.append(self)

    @property
    def num_used(self) -> int:
        """Blocks that hold something."""
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Most blocks that a sequence of ``num_tokens`` tokens holds at once."""
        return min(-(-num_tokens // self.block_size), self.most_blocks)

    def first_needed(self, token: int) -> int:
        """The first block that the query of a token reads."""
        first = token // self.window * self.window if self.chunked else token - self.window + 1
        return max(0, first) // self.block_size

    def users(self, block: int) -> int:
        """Tables that hold a block, and copies that read it."""
        return self._users[block]

    # ---- tables --------------------------------------------------------------------------------------

    def grow(self, table: WindowTable, start: int, num_tokens: int, in_flight_step: int | None) -> Copies:
        """Let a table hold what the tokens from ``start`` to ``num_tokens`` read and write.

        Blocks before that are dropped when ``in_flight_step`` has returned. Returns copies as ``Pool.reserve`` does.
        """
        # Two blocks more: a snapshot at the last full block is taken when the steps behind that block are planned.
        gone = self.first_needed(start - 2 * self.block_size) - table.first
        if gone > 0:
            self.drop(table.blocks[:gone], in_flight_step)
            del table.blocks[:gone]
            table.first += gone
        missing = -(-num_tokens // self.block_size) - table.end
        if missing <= 0:
            return ()
        added, copies = self.reserve(missing)
        table.blocks += added
        return copies

    def reserve(self, count: int) -> tuple[list[int], Copies]:
        """Take ``count`` blocks, each with one user."""
        copies = self._arena.take(self, count)
        blocks = self._free[-count:]
        del self._free[-count:]
        for block in blocks:
            self._users[block] = 1
        return blocks, copies

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
                    self._free.append(block)

    def drop(self, blocks: list[int], in_flight_step: int | None) -> None:
        """Drop one user of each block, at once or when the step returns."""
        if in_flight_step is None:
            self.release(blocks)
        elif blocks:
            self._retiring.append((in_flight_step, blocks))
            self.num_retiring += len(blocks)

    def step_returned(self, step: int) -> None:
        """Steps up to ``step`` have returned."""
        while self._retiring and self._retiring[0][0] <= step:
            blocks = self._retiring.popleft()[1]
            self.num_retiring -= len(blocks)
            self.release(blocks)

    # ---- snapshots -----------------------------------------------------------------------------------

    def blocks_at(self, node: CachedBlock) -> list[int] | None:
        """The blocks with which a sequence begins behind ``node``; None: there is no snapshot with them.

        No block is needed where a chunk ends, or if a token sees itself alone.
        """
        if self.first_needed(node.depth * self.block_size) >= node.depth:
            return []
        return self.at[node].blocks if node in self.at else None

    def take_snapshot(self, node: CachedBlock, table: WindowTable) -> None:
        """Keep the window at the end of ``node``, if the table still has it."""
        first = self.first_needed(node.depth * self.block_size)
        if node in self.at:
            self._use(self.at[node])
            return
        if first < table.first or node.depth > table.end or first == node.depth:
            return
        blocks = table.blocks[first - table.first : node.depth - table.first]
        since = next((one.depth for one in ancestors(node.parent) if one in self.at), 0)
        self.at[node] = snapshot = Snapshot(node, blocks, since)
        for block in blocks:
            self._snapshots[block] += 1
        self._use(snapshot)

    def used(self, node: CachedBlock) -> None:
        """A sequence has begun behind a node."""
        if node in self.at:
            self._use(self.at[node])

    def _use(self, snapshot: Snapshot) -> None:
        snapshot.last_used, snapshot.kind = self._policy.tick(), snapshot.node.kind
        self._queue.push(snapshot, NEAREST)
        self._queue.shrink(len(self.at))

    def forget(self, node: CachedBlock) -> None:
        """Drop the snapshot of a node, if there is one."""
        snapshot = self.at.pop(node, None)
        for block in snapshot.blocks if snapshot is not None else ():
            self._snapshots[block] -= 1
            if not self._snapshots[block] and not self._users[block]:
                self.num_cached -= 1
                self._free.append(block)

    def _rank(self, snapshot: Snapshot) -> int | None:
        return NEAREST if self.at.get(snapshot.node) is snapshot else None

    def next_value(self) -> float | None:
        """The value of a page of the next snapshot; None: there is none."""
        snapshot = self._queue.peek() if self.num_cached else None
        if snapshot is None:
            return None
        return self._values.value(snapshot) / (self.pages_per_block * max(1, len(snapshot.blocks)))

    def give_up(self, copies: list[BlockCopy]) -> bool:
        """Evict the next snapshot of which a block has no users."""
        in_use: list[Snapshot] = []
        while (snapshot := self._queue.pop()) is not None and all(map(self._users.__getitem__, snapshot.blocks)):
            in_use.append(snapshot)
        for one in in_use:
            self._queue.push(one, NEAREST)
        if snapshot is None:
            return False
        self.forget(snapshot.node)
        return True
