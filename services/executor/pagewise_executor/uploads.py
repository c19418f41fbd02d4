"""Copies small arrays from the host to the device without waiting for the work the device has queued."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_SLOTS = 16


class Uploads:
    """Copies arrays to ``device`` through a ring of pinned buffers. When all are in use, it waits for the oldest.

    CUDA also copies from pageable memory, but larger arrays only after all work that was issued before.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: list[torch.Tensor | None] = [None] * _SLOTS
        self._copied: list[torch.cuda.Event | None] = [None] * _SLOTS
        self._next = 0

    def __call__(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Return the array as a tensor on the device. On the CPU it is not copied."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type != "cuda" or not tensor.numel():
            return tensor.to(self.device)
        slot, self._next = self._next, (self._next + 1) % _SLOTS
        if (copied := self._copied[slot]) is not None:
            copied.synchronize()
        size = tensor.numel() * tensor.element_size()
        buffer = self._buffers[slot]
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[slot] = torch.empty(max(size, 4096), dtype=torch.uint8, pin_memory=True)
        pinned = buffer[:size].view(tensor.dtype).view(tensor.shape)
        pinned.copy_(tensor)
        on_device = pinned.to(self.device, non_blocking=True)
        self._copied[slot] = event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return on_device
