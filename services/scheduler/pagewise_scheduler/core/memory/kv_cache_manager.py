"""Gives sequences their blocks on demand, and takes them back when it is safe."""

from collections import deque

from pagewise_scheduler.core.memory.block_pool import BlockPool
from pagewise_scheduler.core.memory.block_table import BlockTable


class KVCacheManager:
    """The KV memory of one executor: a block pool, and the blocks that wait for a step to return.

    A block that is freed while a step that touches it is in flight is *retiring*: it keeps its reference until
    that step has returned, so nobody else can write into it before.
    """

    __slots__ = ("_num_retiring", "_retiring", "block_size", "pool")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"a block holds at least one token, not {block_size}")
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._retiring: deque[tuple[int, list[int]]] = deque()
        self._num_retiring = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return self.pool.num_free

    @property
    def num_retiring(self) -> int:
        """Block references that will be dropped once the steps in flight have returned."""
        return self._num_retiring

    @property
    def usage(self) -> float:
        """Share of the pool that is in use, 0 to 1."""
        return self.pool.num_in_use / self.pool.num_blocks

    @property
    def capacity_tokens(self) -> int:
        """Most tokens whose K and V one sequence could hold if it had the pool to itself."""
        return self.pool.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks it takes to hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def new_table(self) -> BlockTable:
        """An empty block table."""
        return BlockTable(self.block_size)

    def grow(self, table: BlockTable, num_tokens: int) -> list[int]:
        """Let ``table`` hold ``num_tokens`` tokens; returns the blocks that were added, possibly none.

        Raises:
            OutOfBlocksError: too few blocks are free; nothing was changed.
        """
        added = self.pool.allocate(table.blocks_missing(num_tokens))
        table.blocks += added
        return added

    def free(self, table: BlockTable, in_flight_step: int | None) -> None:
        """Drop the table's references, at once or when ``in_flight_step``, the last that touches it, returns."""
        blocks, table.blocks = table.blocks, []
        if not blocks:
            return
        if in_flight_step is None:
            self.pool.release(reversed(blocks))
        else:
            self._retiring.append((in_flight_step, blocks))
            self._num_retiring += len(blocks)

    def step_returned(self, step: int) -> None:
        """Steps up to and including ``step`` have returned: what they touched may be reused."""
        retiring = self._retiring
        while retiring and retiring[0][0] <= step:
            blocks = retiring.popleft()[1]
            self._num_retiring -= len(blocks)
            self.pool.release(reversed(blocks))
