"""Memory on huge pages, where the kernel has them, for packed weights, which every step reads.

On pages of 4 KiB the processor has to translate so many addresses that reading takes a sixth longer
(``docs/performance.md``).
"""

import contextlib
import math
import mmap
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

_PAGE = 2 << 20
"""Bytes of a huge page, except on aarch64 with pages of 16 or 64 KiB, where such memory has ordinary ones."""
_CHUNK = 64 << 20
"""Bytes that are mapped at once, since a huge page holds several small weights. Unused pages take no memory."""
_LINE = 64

_lock = threading.Lock()
_rest: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous tensor of zeros on the CPU, at least one. Its memory is freed together with its neighbours'
    memory."""
    global _rest
    size = math.prod(shape) * dtype.itemsize
    taken = -(-size // _LINE) * _LINE
    with _lock:
        if len(_rest) < taken:
            _rest = _chunk(max(_CHUNK, taken))
        memory, _rest = _rest[:size], _rest[taken:]
    return torch.from_numpy(memory).view(dtype).view(*shape)


def _chunk(size: int) -> npt.NDArray[np.uint8]:
    mapped = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # of a kernel that was built without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapped, np.uint8)
    return memory[-memory.ctypes.data % _PAGE :][:size]
