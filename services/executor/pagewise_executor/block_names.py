"""Which content lies in which block, by block hash: what an executor can offer to a scheduler that knows nothing of it.

A block is named when the row that filled it lets go of it, and loses its name when somebody is about to write into it.
Steps themselves cost nothing: tokens are hashed when a sequence leaves.
"""

from collections.abc import Iterable
from itertools import islice

from pagewise_shared.block_hash import BlockHash, block_hash
from pagewise_shared.protocol import Inventory, pack_int32s

from pagewise_executor.rows import Int32s, Row, RowTable

_MOST_NAMES = 1_000_000
"""Of an inventory, which is one frame of a Hello."""


class BlockNames:
    """Hashes of the blocks of the device pool whose content is known."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._names: list[BlockHash | None] = [None] * num_blocks
        self._block_size = block_size

    def clear(self) -> None:
        """Nothing is known any more."""
        self._names = [None] * len(self._names)

    def of(self, blocks: Iterable[int]) -> list[BlockHash | None]:
        """The names of some blocks."""
        return [self._names[block] for block in blocks]

    def leaving(self, row: Row, blocks: Int32s, num_computed: int) -> None:
        """A row gives up its table ``blocks`` [n]; its first ``num_computed`` tokens are in them."""
        if not row.root:
            return
        size, names = self._block_size, self._names
        known = min(num_computed, len(row.tokens) + len(row.sampled))
        name = BlockHash(row.root)
        first, content = 0, b""
        for index, block in enumerate(blocks[: known // size].tolist()):
            named = names[block]
            if named is None:
                if not content:
                    first, content = index, row.known_tokens(index * size)
                offset = 4 * (index - first) * size
                named = names[block] = block_hash(name, content[offset : offset + 4 * size])
            name = named

    def written(self, table: RowTable, changed: Iterable[tuple[int, int, int]]) -> None:
        """Stretches (row, start, stop) of block tables are new: what is not computed there yet will be written."""
        names = self._names
        for row, start, stop in changed:
            computed = int(table.num_computed[row]) // self._block_size
            for block in table.tables[row, max(start, computed) : stop].tolist():
                names[block] = None

    def inventory(self, host: dict[int, BlockHash]) -> Inventory | None:
        """All that is known, on the device and on the host; None if that is nothing."""
        known = [(block, name) for block, name in enumerate(self._names) if name is not None][:_MOST_NAMES]
        host = dict(islice(host.items(), _MOST_NAMES - len(known)))
        if not known and not host:
            return None
        return Inventory(
            device=pack_int32s(block for block, _ in known),
            device_hashes=b"".join(name for _, name in known),
            host=pack_int32s(host),
            host_hashes=b"".join(host.values()),
        )
