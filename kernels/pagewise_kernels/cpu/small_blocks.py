"""Blocks of K and V in eight or four bits, for tiers that hold fewer bits than the pool."""

from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from pagewise_kernels.cpu.attention import MAX_KEY_DIM
from pagewise_kernels.cpu.library import load_library
from pagewise_kernels.cpu.operations import TYPES
from pagewise_kernels.kv_layer import GROUP, RECORD

Rows = npt.NDArray[np.uint8]
Bits = Literal[8, 4]


class SmallBlocks:
    """How blocks of ``bytes_per_block`` bytes, vectors of ``dim`` numbers in ``dtype``, become smaller.

    In eight bits each vector has a scale, in four each 32 numbers of it a step and a zero. ``num_bytes``: of a block
    that was made smaller. A block that came back is made the same codes again.

    Raises:
        ValueError: blocks are no such vectors, or the vectors cannot be made smaller. LibraryMissingError: the CPU
            operations are not built.
    """

    def __init__(self, bytes_per_block: int, dim: int, dtype: torch.dtype, bits: Bits) -> None:
        if dtype not in TYPES or not 1 <= dim <= MAX_KEY_DIM or bytes_per_block % (dim * dtype.itemsize):
            raise ValueError(f"blocks of {bytes_per_block} bytes are no vectors of {dim} numbers in {dtype}")
        if bits == 4 and dim % GROUP:
            raise ValueError(f"{dim} numbers of a head are no multiple of {GROUP}, which share a scale in four bits")
        self._library, self._dtype = load_library(), dtype
        self._vectors, self._dim = bytes_per_block // (dim * dtype.itemsize), dim
        self._bits, self._bf16 = bits, int(dtype == torch.bfloat16)
        self.num_bytes = self._vectors * (dim + 4 if bits == 8 else dim // GROUP * RECORD)
        self.bytes_per_block = bytes_per_block

    def shrink(self, rows: Rows, small: Rows) -> npt.NDArray[np.float32]:
        """Make ``rows`` [n, bytes_per_block] smaller, into ``small`` [n, num_bytes].

        Returns the error of each block [n]: the root mean square of the differences that come back, relative to that of
        the block's numbers. A block with a NaN has the error NaN.
        """
        self._check(rows, small)
        errors = np.empty(len(rows), np.float32)
        self._library.pagewise_shrink(
            rows.ctypes.data, rows.strides[0], small.ctypes.data, small.strides[0], len(rows), self._vectors, self._dim,
            self._bits, self._bf16, errors.ctypes.data,
        )  # fmt: skip
        return errors

    def widen(self, small: Rows, rows: Rows) -> None:
        """Write blocks ``small`` [n, num_bytes] back, into ``rows`` [n, bytes_per_block]."""
        self._check(rows, small)
        self._library.pagewise_widen(
            small.ctypes.data, small.strides[0], rows.ctypes.data, rows.strides[0], len(rows), self._vectors, self._dim,
            self._bits, self._bf16,
        )  # fmt: skip

    def random(self, count: int) -> Rows:
        """Return so many blocks of normal numbers: [count, bytes_per_block]."""
        numbers = torch.randn(count, self._vectors * self._dim, generator=torch.Generator().manual_seed(0))
        return numbers.to(self._dtype).view(torch.uint8).numpy()

    def _check(self, rows: Rows, small: Rows) -> None:
        shapes = (len(rows), self.bytes_per_block), (len(rows), self.num_bytes)
        types = {rows.dtype, small.dtype} == {np.dtype(np.uint8)}
        if (rows.shape, small.shape) != shapes or not types or (rows.strides[1], small.strides[1]) != (1, 1):
            raise ValueError(f"blocks are bytes {list(shapes)}, not {list(rows.shape)} and {list(small.shape)}")
