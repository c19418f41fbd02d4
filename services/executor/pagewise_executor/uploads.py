"""Copies small arrays from the host to the device and back without waiting for the device's queued work."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

_SLOTS = 16
_ALIGNMENT = 16
"""Kernels are compiled for pointers that are divisible by it."""
_LEAST_BYTES = 4096


class Uploads:
    """Copies arrays to ``device`` through a ring of pinned buffers. When all are in use, it waits for the oldest.

    CUDA also copies from pageable memory, but larger arrays only after all work that was issued before.

    Pinning memory takes the host milliseconds, in which the device may be idle. So all buffers grow at once, to a power
    of two: the start tries the largest step, and later steps pin no memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._rings: list[torch.Tensor] = []
        """The last one is used. Former ones, which are smaller, may still be copied from."""
        self._copied: list[torch.cuda.Event | None] = [None] * _SLOTS
        self._next = 0

    def __call__(self, array: Array) -> torch.Tensor:
        """Return the array as a tensor on the device. On the CPU it is not copied."""
        return self.together(array)[0]

    def together(self, *arrays: Array) -> tuple[torch.Tensor, ...]:
        """Return these arrays as tensors on the device, which one copy brings there. On the CPU nothing is copied."""
        if self.device.type != "cuda":
            return tuple(torch.from_numpy(np.ascontiguousarray(array)).to(self.device) for array in arrays)
        size = packed_size(arrays)
        if not self._rings or self._rings[-1].shape[1] < size:
            room = max(_LEAST_BYTES, 1 << (size - 1).bit_length()) if size else _LEAST_BYTES
            self._rings.append(torch.empty(_SLOTS, room, dtype=torch.uint8, pin_memory=True))
            self._copied = [None] * _SLOTS
        slot, self._next = self._next, (self._next + 1) % _SLOTS
        # The device may still read the buffer of an earlier copy: it must not be overwritten before.
        if (copied := self._copied[slot]) is not None:
            copied.synchronize()
        pinned = self._rings[-1][slot, :size]
        pack(arrays, pinned.numpy())
        on_device = pinned.to(self.device, non_blocking=True)
        self._copied[slot] = event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return unpack(on_device, arrays)


def packed_size(arrays: Sequence[Array]) -> int:
    """Return the bytes that arrays take one behind the other, each from a multiple of 16 bytes on."""
    return sum(_padded(array.nbytes) for array in arrays)


def pack(arrays: Sequence[Array], into: npt.NDArray[np.uint8]) -> None:
    """Write arrays into ``packed_size`` bytes."""
    begin = 0
    for array in arrays:
        into[begin : begin + array.nbytes].view(array.dtype)[:] = array.ravel()
        begin += _padded(array.nbytes)


def unpack(packed: torch.Tensor, arrays: Sequence[Array]) -> tuple[torch.Tensor, ...]:
    """Return views of the result of ``pack``, uint8 on any device, with the types and shapes of ``arrays``."""
    found, begin = [], 0
    for array in arrays:
        found.append(_viewed(packed[begin : begin + array.nbytes], torch.from_numpy(array[:0]).dtype, array.shape))
        begin += _padded(array.nbytes)
    return tuple(found)


def _viewed(part: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return a view of bytes as another type; torch has no such views of empty tensors."""
    return part.view(dtype).view(*shape) if len(part) else torch.empty(*shape, dtype=dtype, device=part.device)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host. From a GPU the copy is complete once the device has reached it."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def to_host_together(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return copies of tensors on the host by one copy. From a GPU it is complete once the device has reached it."""
    if tensors[0].device.type != "cuda":
        return tensors
    return split_bytes(to_host(join_bytes(tensors)), tensors)


def join_bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of tensors in one, tensors with the widest elements first, so that all views are aligned."""
    ordered = sorted(tensors, key=torch.Tensor.element_size, reverse=True)
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in ordered if tensor.numel()]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=tensors[0].device)


def split_bytes(joined: torch.Tensor, like: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return views of the result of ``join_bytes`` in the order of ``like``."""
    found: dict[int, torch.Tensor] = {}
    begin = 0
    for number in sorted(range(len(like)), key=lambda at: like[at].element_size(), reverse=True):
        one = like[number]
        end = begin + one.numel() * one.element_size()
        found[number] = _viewed(joined[begin:end], one.dtype, one.shape)
        begin = end
    return tuple(found[number] for number in range(len(like)))
