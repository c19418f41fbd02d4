"""Page tables: block tables applied by the memory management unit instead of by attention (``--kv-mapping mmu``).

Each row of the input batch has a range of virtual addresses. The blocks of its block table are mapped into it one after
the other, so the context of the row has consecutive addresses, and attention needs neither block tables nor copies. A
block that several rows share is the same physical memory at several addresses. The pool itself is mapped as a whole, so
everything else (slot mappings, copies between blocks, tiers, peers) works as with block tables.

Source: vAttention (arXiv 2405.04437), which maps memory that is not shared; its tensor slicing is the layout "tokens".
"""

import ctypes
import math
import mmap
import os
import sys
import weakref
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from pagewise_shared.errors import ModelError

from pagewise_executor.kv.kv_pool import KVPool, no_room_for_pool
from pagewise_executor.step_work import Int32s

_PROT_NONE, _MAP_FIXED, _MAP_FAILED = 0, 0x10, 2**64 - 1  # Python's mmap does not have them
_NOBODY = -1
_SPARE_MAPS = 4096
"""Maps that are left to the rest of the process: libraries, and the memory of threads and large tensors."""


class PhysicalMemory(Protocol):
    """Physical memory, of which any page can be mapped at any number of virtual addresses.

    ``page``: the bytes of a page; mappings are whole pages.
    """

    page: int

    @property
    def max_maps(self) -> float:
        """The number of mappings that there may be at a time."""

    def allocate(self, size: int) -> torch.Tensor:
        """Allocate ``size`` bytes for a pool, and return them as a whole: uint8 [size].

        Raises:
            ModelError: there is less memory, or less address space.
        """

    def free(self) -> None:
        """Free the memory and its mappings. No tensor of it may be used any more."""

    def reserve(self, size: int) -> torch.Tensor:
        """Reserve a range of virtual addresses, and return it: uint8 [size]. Nothing in it may be touched yet.

        Raises:
            OSError: there is less address space.
        """

    def map(self, address: int, offset: int, size: int) -> None:
        """Map ``size`` bytes of the memory from ``offset`` on at ``address`` of a range, in place of older mappings.

        Raises:
            OSError: the mapping is refused.
        """

    def release(self, reserved: torch.Tensor) -> None:
        """Give up a range. None of its tensors may be used any more."""


class SharedMemory:
    """Physical memory of the CPU: a file without a name (``memfd``), of which pages are mapped with ``MAP_FIXED``.

    Raises:
        ModelError: the operating system is not Linux.
    """

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise ModelError(f"--kv-mapping mmu needs Linux, not {sys.platform}: it maps a memfd")
        self.page = mmap.PAGESIZE
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        number = ctypes.c_int
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_int64]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._file: _Descriptor | None = None

    @property
    def max_maps(self) -> float:
        """The maps that ``vm.max_map_count`` leaves beside the present maps of this process and a reserve."""
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
        return limit - Path("/proc/self/maps").read_text().count("\n") - _SPARE_MAPS

    def allocate(self, size: int) -> torch.Tensor:
        """Allocate a memfd. Pages take no memory before they are written for the first time."""
        self._file = file = _Descriptor()
        try:
            os.ftruncate(file.number, size)
            return torch.frombuffer(mmap.mmap(file.number, size), dtype=torch.uint8)
        except OSError as error:
            raise no_room_for_pool(torch.device("cpu"), size) from error

    def free(self) -> None:
        """Close the memfd. The memory itself is freed with the last tensor that views it."""
        self._file = None

    def reserve(self, size: int) -> torch.Tensor:
        """Reserve addresses. Addresses that are not mapped cannot be read, so that errors are found."""
        address = self._mmap(None, size, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        buffer = (ctypes.c_uint8 * size).from_address(address)
        # This unmaps when the last tensor is gone, not at the end of the process: other threads may still be reading.
        weakref.finalize(buffer, self._libc.munmap, address, size).atexit = False
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def map(self, address: int, offset: int, size: int) -> None:
        """Map pages, read-only: K and V are written through the mapping of the whole pool."""
        assert self._file is not None, "it is allocated first"
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE | _MAP_FIXED
        self._mmap(address, size, mmap.PROT_READ, flags, self._file.number, offset)

    def release(self, reserved: torch.Tensor) -> None:
        """Do nothing: a range is unmapped with the last tensor that views it."""

    def _mmap(self, address: int | None, size: int, protection: int, flags: int, file: int, offset: int) -> int:
        found: int = self._libc.mmap(address, size, protection, flags, file, offset)
        if found == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, f"mmap of {size} bytes failed: {os.strerror(code)}")
        return found


class _Descriptor:
    """The descriptor of a new memfd, which is closed with this object. Its mappings stay."""

    def __init__(self) -> None:
        self.number = os.memfd_create("pagewise-kv")

    def __del__(self) -> None:
        os.close(self.number)


def physical_memory(device: torch.device) -> PhysicalMemory:
    """Return the memory of a device that can be mapped.

    Raises:
        ModelError: this machine has none.
    """
    if device.type != "cuda":
        return SharedMemory()
    from pagewise_executor.kv.cuda_memory import CudaMemory, load_driver

    return CudaMemory(load_driver(), device)


class Context(NamedTuple):
    """K and V of a row by layer [max_tokens, kv_heads, head_dim]: as far as its block table reaches."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]


class PageTables:
    """The page tables of the rows of an input batch, which mirror its block tables.

    The range of a row has the layout of a pool of ``max_blocks`` blocks. A row that leaves keeps its mappings until the
    next row replaces them: blocks that both rows have, of a system prompt for instance, are not mapped again.

    ``num_calls``, ``num_mapped``: the calls that mapped blocks, and the blocks that they mapped in all rows.

    Raises:
        ModelError: a block is no whole number of pages in each layer, there could be too many mappings, or there is not
            enough address space.
    """

    def __init__(self, memory: PhysicalMemory, pool: KVPool, num_rows: int, max_blocks: int) -> None:
        _check_pages(pool, memory.page)
        _check_maps(sum(len(region) for region in pool.regions), num_rows, max_blocks, memory.max_maps)
        self._memory, self._pool = memory, pool
        size = max_blocks * pool.bytes_per_block
        try:
            self._reserved = memory.reserve(num_rows * size)
        except OSError as error:
            raise ModelError(
                f"--kv-mapping mmu: {num_rows} rows of {max_blocks} blocks need {num_rows * size / 2**40:.1f} TiB of "
                f"virtual addresses, which the system refuses: {error}"
            ) from error
        rows = self._reserved.view(num_rows, size)
        self._ranges = [pool.over(row, max_blocks) for row in rows]
        self._contexts: list[Context | None] = [None] * num_rows
        self._mapped = np.full((num_rows, max_blocks), _NOBODY, np.int32)
        self.num_calls = self.num_mapped = 0

    def map(self, row: int, start: int, blocks: Int32s) -> None:
        """Map ``blocks`` [n], entries ``start`` to start + n of the block table of ``row``.

        Mappings that are there already stay, and blocks that are neighbours both in the pool and in the table are
        mapped by one call.
        """
        mapped = self._mapped[row, start : start + len(blocks)]
        new = np.flatnonzero(mapped != blocks)
        if not len(new):
            return
        cuts = np.flatnonzero((np.diff(new) != 1) | (np.diff(blocks[new]) != 1)) + 1
        base = self._pool.regions[0].data_ptr()
        for run in np.split(new, cuts):
            first, count = int(run[0]), len(run)
            for source, target in zip(self._pool.regions, self._ranges[row].regions, strict=True):
                for part in range(len(source)):
                    address = target[part, start + first].data_ptr()
                    offset = source[part, int(blocks[first])].data_ptr() - base
                    self._memory.map(address, offset, count * source.shape[2])
                    self.num_calls += 1
        self.num_mapped += len(new)
        mapped[:] = blocks

    def context(self, row: int) -> Context:
        """Return K and V of a row. Only tokens within its block table may be read."""
        found = self._contexts[row]
        if found is None:
            own = self._ranges[row]
            found = Context([k.flatten(0, 1) for k in own.keys], [v.flatten(0, 1) for v in own.values])
            self._contexts[row] = found
        return found

    def close(self) -> None:
        """Give up the ranges. No context may be used any more."""
        self._ranges, self._contexts = [], []
        self._memory.release(self._reserved)


def _check_pages(pool: KVPool, page: int) -> None:
    """Refuse a pool in which the mapped parts of a block are not whole numbers of pages."""
    for region in pool.regions:
        size = region.shape[2]
        if size % page:
            step = page // math.gcd(page, size // pool.block_size)
            what = "K or V of one layer" if len(pool.regions[0]) > 1 else "All layers"
            raise ModelError(
                f"--kv-mapping mmu: {what} of a block of {pool.block_size} tokens takes {size} bytes, which is no "
                f"whole number of pages of {page}: take a multiple of {step} as --block-size, or another --kv-layout"
            )


def _check_maps(parts: int, num_rows: int, max_blocks: int, limit: float) -> None:
    """Refuse as many mappings as there may be at the worst: where no block follows its neighbour in the pool."""
    needed = parts * num_rows * max_blocks + 1
    if needed > limit:
        raise ModelError(
            f"--kv-mapping mmu: block tables of {num_rows} rows and {max_blocks} blocks can take {needed} memory maps, "
            f"and vm.max_map_count leaves {int(limit)}: lower --max-num-seqs or --max-model-len, raise --block-size or "
            f"vm.max_map_count"
            + (f", or take --kv-layout blocks, one map for a block instead of {parts}" if parts > 1 else "")
        )
