"""A sequence's page table: which block holds its tokens."""

from pagewise_scheduler.core.memory.eviction_history import RequestRef
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock


class BlockTable:
    """Blocks of one sequence in order: token ``i`` lives in block ``i // block_size`` at slot ``i % block_size``.

    ``cache_salt``: whose cache it shares. ``last_node``: the node of the last block whose content is in the prefix
    tree; the tree owns the blocks up to it, the sequence alone owns the blocks after it. ``owner``: the request
    of the sequence.
    """

    __slots__ = ("block_size", "blocks", "cache_salt", "last_node", "owner")

    def __init__(self, block_size: int, cache_salt: str | None = None, owner: RequestRef | None = None) -> None:
        self.block_size = block_size
        self.cache_salt = cache_salt
        self.owner = owner
        self.blocks: list[int] = []
        self.last_node: CachedBlock | None = None

    @property
    def num_slots(self) -> int:
        """Tokens the table has room for."""
        return len(self.blocks) * self.block_size

    @property
    def num_known(self) -> int:
        """Leading blocks whose content is in the prefix tree."""
        return 0 if self.last_node is None else self.last_node.depth

    def blocks_missing(self, num_tokens: int) -> int:
        """How many more blocks it takes to hold ``num_tokens`` tokens."""
        return max(0, -(-num_tokens // self.block_size) - len(self.blocks))
