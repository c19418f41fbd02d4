"""The blocks of layers that see a window of the last tokens, on the device.

A sequence keeps the blocks of its window. A block behind the window is released as soon as no step in flight reads it.
A sequence that begins with a cached prefix needs the window at its end, not only the full layers' blocks. So at the end
of a prompt and of an answer a *snapshot* keeps the window there (see ``snapshots``), and a prefix can be begun with at
its snapshots alone. Where a prompt leaves a path behind its last snapshot, it takes a snapshot too: a system prompt
that conversations share ends at such a junction.
"""

from collections import deque
from collections.abc import Callable, Sequence

from pagewise_shared.protocol import DEVICE

from pagewise_scheduler.core.memory.block_table import WindowTable
from pagewise_scheduler.core.memory.counters import MemoryCounters
from pagewise_scheduler.core.memory.eviction import EvictionPolicy
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, ancestors
from pagewise_scheduler.core.tiers.arena import Arena, WindowShape
from pagewise_scheduler.core.tiers.snapshots import MARGIN, Snapshot, SnapshotPool
from pagewise_scheduler.core.tiers.tier import Copies


class WindowGroup(SnapshotPool):
    """The device's blocks of the layers of one window, and the tables that hold them.

    ``most_blocks``: most blocks of a sequence, which the tokens of steps in flight decide. ``margin``: blocks before
    the end of a snapshot at which sequences can begin with it, too.
    """

    def __init__(
        self,
        number: int,
        shape: WindowShape,
        block_size: int,
        most_tokens: int,
        arena: Arena,
        policy: EvictionPolicy,
        counters: MemoryCounters,
        changed: Callable[[CachedBlock], None],
        below: SnapshotPool | None = None,
    ) -> None:
        super().__init__(number, DEVICE, shape, block_size, arena, policy, counters, changed, below)
        self.margin, self.most_blocks = self._limits(most_tokens)
        self._retiring: deque[tuple[int, list[int]]] = deque()
        self.num_retiring = 0

    def _limits(self, most_tokens: int) -> tuple[int, int]:
        """Return ``margin`` and ``most_blocks``. ``most_tokens``: of a sequence in steps in flight."""
        margin = -(-MARGIN // self.block_size)
        return margin, -(-(self.window - 1 + most_tokens) // self.block_size) + 3 + margin

    def blocks_for(self, num_tokens: int) -> int:
        """Most blocks that a sequence of ``num_tokens`` tokens holds at once."""
        return min(-(-num_tokens // self.block_size), self.most_blocks)

    def new_table(self) -> WindowTable:
        """An empty table."""
        return WindowTable()

    def table_at(self, path: Sequence[CachedBlock], end: int) -> WindowTable:
        """The window behind the first ``end`` blocks of a path, without blocks if the device does not have it."""
        held = self.blocks_at(path[end - 1]) if 0 < end <= len(path) else None
        if held is None:
            return WindowTable(self.first_needed(end * self.block_size) if end else 0)
        return WindowTable(end - len(held), [*held])

    def can_fork(self, table: WindowTable, num_tokens: int) -> bool:
        """Whether a table still holds the window at the end of its first ``num_tokens`` tokens."""
        return table.first <= self.first_needed(num_tokens)

    def fork(self, table: WindowTable, num_tokens: int) -> WindowTable:
        """The window of a sequence that begins as the first ``num_tokens`` tokens of a table."""
        first = max(table.first, self.first_needed(num_tokens))
        last = -(-num_tokens // self.block_size)
        return WindowTable(first, table.blocks[first - table.first : last - table.first])

    def begin(self, table: WindowTable) -> Copies:
        """A table has the blocks that its sequence begins with. Returns copies as ``reserve`` does."""
        return ()

    def num_to_write(self, table: WindowTable) -> int:
        """The blocks that a table needs to write into its last block."""
        return 0

    def copy_last(self, table: WindowTable) -> Copies:
        """Let a table have a block of its own instead of the last one, of which it shares a part."""
        (target,), copies = self.reserve(1)
        self.release(table.blocks[-1:])
        table.source, table.blocks[-1] = table.blocks[-1], target
        return copies

    def grow(
        self,
        table: WindowTable,
        start: int,
        num_tokens: int,
        in_flight_step: int | None,
        due: Sequence[int],
    ) -> tuple[list[tuple[int, int]], Copies]:
        """Let a table hold the blocks that the tokens from ``start`` to ``num_tokens`` read and write.

        Blocks before that are dropped when ``in_flight_step`` has returned, except those of snapshots that are ``due``
        (see ``BlockTable``). Returns (-1, block) for each block that was added, and copies as ``Pool.reserve``
        does.
        """
        # Two blocks more: a snapshot at the last full block is taken when the steps behind that block are planned.
        first = self.first_needed(start - 2 * self.block_size)
        if due:
            first = min(first, self.first_needed(due[0] * self.block_size) - self.margin)
        gone = first - table.first
        if gone > 0:
            self.drop(table.blocks[:gone], in_flight_step)
            del table.blocks[:gone]
            table.first += gone
        missing = -(-num_tokens // self.block_size) - table.end
        if missing <= 0:
            return [], ()
        added, copies = self.reserve(missing)
        table.blocks += added
        return [(-1, block) for block in added], copies

    def computed(self, table: WindowTable, known: int, due: Sequence[int]) -> None:
        """The first ``known`` blocks of a sequence are computed and in the prefix tree."""

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

    def take_snapshot(self, node: CachedBlock, table: WindowTable, place: int) -> None:
        """Keep the window at the end of ``node``, if the table still has it.

        The windows at the nodes before it are kept too, up to ``MARGIN`` tokens and as far as the table has them.
        """
        needed = self.first_needed(node.depth * self.block_size)
        if node in self.at:
            self._use(self.at[node])
            return
        if table.loading or needed < table.first or node.depth > table.end or needed == node.depth:
            return
        first = max(table.first, needed - self.margin)
        blocks = table.blocks[first - table.first : node.depth - table.first]
        since = next((one.depth for one in ancestors(node.parent) if one in self.at), 0)
        self._counters.snapshots_taken += 1
        self._add(Snapshot(self._points(node, first), first, blocks, since))
