"""Memory for the results of the CPU operations: large ones lie where others have been before.

The C library gives megabytes that are freed back to the kernel, more or less often, and the kernel zeroes the next ones
page by page when they are first written. In a prefill of 2,048 tokens that took up to a fifth of the CPU time
(``docs/performance.md``).
"""

import math
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Block = npt.NDArray[np.uint8]

_LEAST = 1 << 20
"""Bytes below which the C library keeps what is freed: the results of decode steps are that small."""

_free: defaultdict[int, list[Block]] = defaultdict(list)
"""Blocks that nothing lies in, by size: powers of two, of which only what has been written takes memory."""

_least_free: defaultdict[int, int] = defaultdict(int)
"""Of each size, how many have been free all the time since ``free_unused`` was called last."""


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous tensor on the CPU with any contents. Its memory is used again when no view of it is left."""
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size < _LEAST:
        return torch.empty(shape, dtype=dtype)
    capacity = 1 << (size - 1).bit_length()
    blocks = _free[capacity]
    try:
        block = blocks.pop()  # the one that came last, so that those that are not needed stay where they are
        _least_free[capacity] = min(_least_free[capacity], len(blocks))
    except IndexError:
        block = torch.empty(capacity, dtype=torch.uint8).numpy()
    lent: npt.NDArray[Any] = block[:size]  # an object of its own, which lives as long as a storage in it
    weakref.finalize(lent, blocks.append, block).atexit = False
    return torch.frombuffer(lent, dtype=dtype).view(shape)


def free_unused() -> None:
    """Free the blocks that nothing has lain in since the last call: the largest prefill may not come again.

    May be called on any thread.
    """
    for capacity, blocks in list(_free.items()):
        del blocks[: _least_free[capacity]]
        _least_free[capacity] = len(blocks)
