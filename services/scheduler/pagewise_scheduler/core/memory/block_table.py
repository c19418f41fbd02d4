"""A sequence's page table: which block holds its tokens."""


class BlockTable:
    """Blocks of one sequence in order: token ``i`` lives in block ``i // block_size`` at slot ``i % block_size``."""

    __slots__ = ("block_size", "blocks")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: list[int] = []

    @property
    def num_slots(self) -> int:
        """Tokens the table has room for."""
        return len(self.blocks) * self.block_size

    def blocks_missing(self, num_tokens: int) -> int:
        """How many more blocks it takes to hold ``num_tokens`` tokens."""
        return max(0, -(-num_tokens // self.block_size) - len(self.blocks))
