"""The hashes of the blocks in the device pool: what an executor can offer to a scheduler that has lost its state.

The blocks of a sequence are hashed when it leaves the batch, so steps themselves cost nothing. A block loses its hash
when a step is about to write into it.
"""

from collections.abc import Iterable

from pagewise_shared.block_hash import BlockHash, block_hash

from pagewise_executor.input_batch import InputBatch, Int32s, SequenceState


class BlockHashes:
    """The hash of each device block whose content is known."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._block_size = block_size

    def clear(self) -> None:
        """Forget all hashes."""
        self._hashes = [None] * len(self._hashes)

    def known(self) -> dict[int, BlockHash]:
        """Return all known hashes by block."""
        return {block: found for block, found in enumerate(self._hashes) if found is not None}

    def of(self, blocks: Iterable[int]) -> list[BlockHash | None]:
        """Return the hash of each of ``blocks``; None where the content is not known."""
        return [self._hashes[block] for block in blocks]

    def cache_full_blocks(self, sequence: SequenceState, blocks: Int32s, num_computed: int) -> None:
        """Hash the full blocks of a sequence that leaves. ``blocks`` [n] hold its first ``num_computed`` tokens."""
        if not sequence.root:
            return
        size, hashes = self._block_size, self._hashes
        known = min(num_computed, len(sequence.tokens) + len(sequence.sampled))
        parent = BlockHash(sequence.root)
        first, content = 0, b""
        for index, block in enumerate(blocks[: known // size].tolist()):
            found = hashes[block]
            if found is None:
                if not content:
                    first, content = index, sequence.known_tokens(index * size)
                offset = 4 * (index - first) * size
                found = hashes[block] = block_hash(parent, content[offset : offset + 4 * size])
            parent = found

    def discard_overwritten(self, batch: InputBatch, changed: Iterable[tuple[int, int, int]]) -> None:
        """Drop the hashes of blocks that will be written: those in new stretches (row, start, stop) of block tables
        that hold no computed tokens yet."""
        hashes = self._hashes
        for row, start, stop in changed:
            computed = int(batch.num_computed[row]) // self._block_size
            for block in batch.block_tables[row, max(start, computed) : stop].tolist():
                hashes[block] = None
