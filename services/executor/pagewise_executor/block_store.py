"""The content of blocks by tier and id, as other executors and their links see it: bytes in host memory."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pagewise_shared.protocol import DEVICE

from pagewise_executor.block_copies import Tier
from pagewise_executor.kv_pool import KVPool
from pagewise_executor.rows import Int32s

Rows = npt.NDArray[np.uint8]
"""[n, bytes_per_block]: blocks one after the other."""


class BlockStore:
    """Reads and writes whole blocks, beside the steps. Who calls sees to it that nobody else writes them meanwhile.

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

    def read(self, places: Int32s) -> Rows:
        """The content of ``places`` [n, 2] (tier, block). Waits for copies to those tiers that have been asked for."""
        rows = np.empty((len(places), self.bytes_per_block), np.uint8)
        for tier in np.unique(places[:, 0]).tolist():
            here = places[:, 0] == tier
            if tier != DEVICE:
                rows[here] = self._tiers[tier].read(places[here, 1].tolist())
                continue
            with torch.inference_mode(), self._stream():
                gathered: Any = self._pool.gather(places[here, 1])
                rows[here] = gathered if isinstance(gathered, np.ndarray) else gathered.cpu().numpy()
        return rows

    def write(self, blocks: Int32s, rows: Rows, after: "torch.cuda.Event | None" = None) -> None:
        """Fill device blocks [n], once what the device was given before ``after`` is done."""
        if not self._cuda:
            self._pool.scatter(blocks, rows)
            return
        # Rows that came over the network may only be read, which torch does not know; pinned they arrive sooner too.
        pinned = torch.empty(rows.shape, dtype=torch.uint8, pin_memory=True)
        np.copyto(pinned.numpy(), rows)
        with torch.inference_mode(), self._stream() as stream:
            if after is not None:
                stream.wait_event(after)
            self._pool.scatter(blocks, pinned.to(self._pool.device, non_blocking=True))
            stream.synchronize()

    def event(self) -> "torch.cuda.Event | None":
        """A mark behind whatever the device has been given; None where it does everything at once."""
        if not self._cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _stream(self) -> Any:
        return _OwnStream(self._pool.device if self._cuda else None)


class _OwnStream:
    """A stream of the calling thread's own, on a GPU; waits for it at the end."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device

    def __enter__(self) -> Any:
        if self._device is None:
            return None
        torch.cuda.set_device(self._device)  # a thread begins on the first device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._context = torch.cuda.stream(self._stream)
        self._context.__enter__()  # type: ignore[no-untyped-call]
        return self._stream

    def __exit__(self, *error: object) -> None:
        if self._device is not None:
            self._stream.synchronize()
            self._context.__exit__(*error)
