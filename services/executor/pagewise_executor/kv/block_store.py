"""Reads and writes the content of blocks by tier and block id, for the exchange with other executors, and for tiers
whose copies go through host memory."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pagewise_shared.protocol import DEVICE

from pagewise_executor.block_copies import Tier
from pagewise_executor.input_batch import Int32s
from pagewise_executor.kv.kv_pool import KVPool

BlockBytes = npt.NDArray[np.uint8]
"""The content of n blocks in host memory: [n, bytes_per_block]."""


class BlockStore:
    """Reads and writes whole blocks while steps run. The caller makes sure that no step writes to them meanwhile.

    ``tiers``: those below the device, by number.
    """

    def __init__(self, pool: KVPool, tiers: Mapping[int, Tier]) -> None:
        self.bytes_per_block = pool.bytes_per_block
        self._pool, self._tiers = pool, tiers
        self._cuda = pool.device.type == "cuda"

    def has(self, places: Int32s) -> bool:
        """Whether ``places`` [n, 2] (tier, block) are all in one of the tiers."""
        for tier in np.unique(places[:, 0]).tolist():
            blocks = places[places[:, 0] == tier, 1]
            held = self._pool if tier == DEVICE else self._tiers.get(tier)
            if held is None or blocks.min() < 0 or blocks.max() >= held.num_blocks:
                return False
        return True

    def read(self, places: Int32s) -> BlockBytes:
        """Return the content of ``places`` [n, 2] (tier, block). Waits for copies there that were asked for."""
        rows = np.empty((len(places), self.bytes_per_block), np.uint8)
        for tier in np.unique(places[:, 0]).tolist():
            here = places[:, 0] == tier
            rows[here] = self.read_tier(tier, places[here, 1])
        return rows

    def read_tier(self, tier: int, blocks: Int32s) -> BlockBytes:
        """Return the content of blocks [n] of one tier. Waits for copies there that were asked for.

        Raises:
            OSError: a block is not what was stored there.
        """
        if tier != DEVICE:
            return self._tiers[tier].read(blocks.tolist())
        with torch.inference_mode(), self._stream():
            gathered: Any = self._pool.gather(blocks)
            return gathered if isinstance(gathered, np.ndarray) else gathered.cpu().numpy()

    def write(self, blocks: Int32s, rows: BlockBytes, after: "torch.cuda.Event | None" = None) -> None:
        """Write ``rows`` into device blocks [n], after all device work that came before the event ``after``."""
        if not self._cuda:
            self._pool.scatter(blocks, rows)
            return
        # What came over the network is read-only, which torch does not support. Pinned memory is also copied faster.
        pinned = torch.empty(rows.shape, dtype=torch.uint8, pin_memory=True)
        np.copyto(pinned.numpy(), rows)
        with torch.inference_mode(), self._stream() as stream:
            if after is not None:
                stream.wait_event(after)
            self._pool.scatter(blocks, pinned.to(self._pool.device, non_blocking=True))
            stream.synchronize()

    def event(self) -> "torch.cuda.Event | None":
        """Return an event after all work that the device has been given; None on the CPU, where no work is queued."""
        if not self._cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _stream(self) -> Any:
        return _OwnStream(self._pool.device if self._cuda else None)


class _OwnStream:
    """Runs a block of code on a CUDA stream of its own and waits for it at the end. On the CPU it does nothing."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device

    def __enter__(self) -> Any:
        if self._device is None:
            return None
        torch.cuda.set_device(self._device)  # every thread begins on the first device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._context = torch.cuda.stream(self._stream)
        self._context.__enter__()  # type: ignore[no-untyped-call]
        return self._stream

    def __exit__(self, *error: object) -> None:
        if self._device is not None:
            self._stream.synchronize()
            self._context.__exit__(*error)
