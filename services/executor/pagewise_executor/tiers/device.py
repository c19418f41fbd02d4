"""The device tier: the KV pool that steps compute with, and the hashes of its blocks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from pagewise_shared.block_hash import BlockHash, block_hash

from pagewise_executor.block_copies import CopyJob
from pagewise_executor.kv.kv_pool import KVPool
from pagewise_executor.page_labels import PageLabels
from pagewise_executor.step_work import Int32s, SequenceState
from pagewise_executor.tiers.tier import Blocks, Rows, Tier


class BlockHashes:
    """The hash of each device block whose content is known. A scheduler that has lost its state gets these hashes.

    The blocks of a sequence are hashed when it leaves the batch, so that steps take no longer. A block loses its hash
    when a step is about to write into it.
    """

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

    def forget(self, blocks: Int32s) -> None:
        """Forget the hashes of ``blocks`` [n], which are about to be overwritten."""
        for block in blocks.tolist():
            self._hashes[block] = None


class DeviceTier(Tier):
    """The blocks of ``pool``. ``hashes``: of its blocks, or of its pages the labels. The host tier, which has to be
    fast, uses the pool itself."""

    def __init__(self, pool: KVPool, hashes: BlockHashes | PageLabels) -> None:
        super().__init__()
        self.num_blocks, self.block_size, self.bytes_per_block = pool.num_blocks, pool.block_size, pool.bytes_per_block
        self._pool, self._hashes = pool, hashes

    def begin(self, job: CopyJob, upper: Tier) -> None:
        """Copy blocks to other device blocks; all sources are read before any target is written. The copies are a part
        of the step, and not reported."""
        self._pool.copy_blocks(job.pairs)

    def reset(self, epoch: int, *, keep: bool) -> None:
        """Forget all hashes unless ``keep``; no copy is left to void."""
        if not keep:
            self._hashes.clear()

    def names(self) -> Mapping[int, bytes]:
        """Return the known hashes by block, or the labels by page."""
        return self._hashes.known()

    def names_of(self, blocks: Blocks) -> Sequence[bytes | None]:
        """Return the hash of each block, or the label of each page; None where it is not known."""
        return self._hashes.of(blocks.tolist())

    def read(self, blocks: Blocks, rows: Rows) -> list[bool]:
        """Read blocks into ``rows``, on a stream of its own. Device memory has no checksums: every block is sound."""
        with torch.inference_mode(), _own_stream(self._pool.device) as stream:
            if stream is None:
                self._pool.gather_into(blocks, rows)
            else:
                torch.from_numpy(rows).copy_(self._pool.gather(blocks))
        return [True] * len(blocks)

    def write(self, blocks: Blocks, rows: Rows, after: "torch.cuda.Event | None" = None) -> None:
        """Write ``rows`` into blocks, on a stream of its own, after the event ``after``."""
        with torch.inference_mode(), _own_stream(self._pool.device) as stream:
            if stream is None:
                self._pool.scatter(blocks, rows)
                return
            # Arrays from the network are read-only, which torch does not support. Pinned memory is faster, too.
            pinned = torch.empty(rows.shape, dtype=torch.uint8, pin_memory=True)
            np.copyto(pinned.numpy(), rows)
            if after is not None:
                stream.wait_event(after)
            self._pool.scatter(blocks, pinned.to(self._pool.device, non_blocking=True))

    def fence(self) -> "torch.cuda.Event | None":
        """Return an event after all work that the device has been given; None on the CPU, where no work is queued."""
        if self._pool.device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event


@contextmanager
def _own_stream(device: torch.device) -> "Iterator[torch.cuda.Stream | None]":
    """Run a block of code on a CUDA stream of its own and wait for it at the end. On the CPU it does nothing."""
    if device.type != "cuda":
        yield None
        return
    torch.cuda.set_device(device)  # every thread begins on the first device
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        try:
            yield stream
        finally:
            stream.synchronize()
