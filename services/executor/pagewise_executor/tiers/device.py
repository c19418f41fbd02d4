"""The device tier: the KV pool that steps compute with, and the hashes of its blocks."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from pagewise_shared.block_hash import BlockHash

from pagewise_executor.block_copies import CopyJob
from pagewise_executor.kv.block_hashes import BlockHashes
from pagewise_executor.kv.kv_pool import KVPool
from pagewise_executor.tiers.tier import Blocks, Rows, Tier


class DeviceTier(Tier):
    """The blocks of ``pool``. ``hashes``: of its blocks. The host tier, which has to be fast, uses the pool itself."""

    def __init__(self, pool: KVPool, hashes: BlockHashes) -> None:
        super().__init__()
        self.num_blocks, self.block_size, self.bytes_per_block = pool.num_blocks, pool.block_size, pool.bytes_per_block
        self._pool, self._hashes = pool, hashes

    def begin(self, job: CopyJob, upper: Tier) -> None:
        """Copy blocks to others; all sources are read before any target is written. This is a part of the step, and not
        reported."""
        self._pool.copy_blocks(job.pairs)

    def reset(self, epoch: int, *, keep: bool) -> None:
        """See ``Tier``."""
        if not keep:
            self._hashes.clear()

    def names(self) -> dict[int, BlockHash]:
        """See ``Tier``."""
        return self._hashes.known()

    def names_of(self, blocks: Blocks) -> list[BlockHash | None]:
        """See ``Tier``."""
        return self._hashes.of(blocks.tolist())

    def read(self, blocks: Blocks, rows: Rows) -> list[bool]:
        """See ``Tier``."""
        with torch.inference_mode(), _own_stream(self._pool.device) as stream:
            if stream is None:
                self._pool.gather_into(blocks, rows)
            else:
                torch.from_numpy(rows).copy_(self._pool.gather(blocks))
        return [True] * len(blocks)

    def write(self, blocks: Blocks, rows: Rows, after: "torch.cuda.Event | None" = None) -> None:
        """See ``Tier``."""
        with torch.inference_mode(), _own_stream(self._pool.device) as stream:
            if stream is None:
                self._pool.scatter(blocks, rows)
                return
            # What came over the network is read-only, which torch does not support. Pinned memory is faster, too.
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
