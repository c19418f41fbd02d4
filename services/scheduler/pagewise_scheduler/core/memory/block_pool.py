"""The device's blocks: which are free, which are in use and by how many.

Source: the block pool of vLLM (arXiv 2309.06180, section 4.3) reduced to reference counts over integer ids.
"""

from collections.abc import Iterable


class OutOfBlocksError(Exception):
    """More blocks were asked for than are free. Callers ask ``num_free`` first, so this is a bug if it escapes."""


class BlockPool:
    """``num_blocks`` blocks with reference counts; a block is free or in use, never both, never neither.

    Blocks are plain ids, 0 <= id < num_blocks. Allocating and releasing n blocks costs O(n).
    """

    __slots__ = ("_free", "_references", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool holds at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        # A stack: the block freed last is used next, while the caches may still hold it.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can hand out now."""
        return len(self._free)

    @property
    def num_in_use(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - len(self._free)

    def references(self, block: int) -> int:
        """How many holders the block has; 0 means free."""
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks, each with one reference.

        Raises:
            OutOfBlocksError: fewer are free; nothing was taken.
        """
        if count == 0:
            return []
        free = self._free
        if count > len(free):
            raise OutOfBlocksError(f"{count} blocks asked for, {len(free)} of {self.num_blocks} free")
        blocks = free[-count:]
        del free[-count:]
        references = self._references
        for block in blocks:
            references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block, all of them in use already."""
        references = self._references
        for block in blocks:
            assert references[block] > 0, f"block {block} is free and cannot be shared"
            references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block; those without any left are free at once."""
        references = self._references
        free = self._free
        for block in blocks:
            left = references[block] - 1
            assert left >= 0, f"block {block} was released more often than it was taken"
            references[block] = left
            if left == 0:
                free.append(block)
