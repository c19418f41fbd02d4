"""A fake of ``cuda.bindings.driver`` as far as the virtual memory API goes, which enforces the rules of the real one.

Its memory is real: pages of a memfd, mapped where the caller wants them. An access before ``cuMemSetAccess`` or after
``cuMemUnmap`` ends the process, as it would end the CUDA context. Calls that the real driver refuses return
``CUDA_ERROR_INVALID_VALUE``. ``calls`` records the names of the functions that were called.
"""

import ctypes
import mmap
import os
from collections import Counter
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import torch

_PROT_NONE, _MAP_FIXED = 0, 0x10


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class FakeDriver:
    """``granularity``: of all addresses and sizes. ``memory``: bytes that can be allocated."""

    CUresult = CUresult
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM="minimum")
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="readwrite")

    def __init__(self, granularity: int, memory: int) -> None:
        self.calls: Counter[str] = Counter()
        self.granularity = granularity
        self.reserved: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.accessible: set[int] = set()
        self._free = list(range(0, memory, granularity))
        self._file = os.memfd_create("fake")
        os.ftruncate(self._file, memory)
        self._libc = ctypes.CDLL(None)
        self._libc.mmap.restype = ctypes.c_void_p
        number = ctypes.c_int
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_int64]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def __del__(self) -> None:
        os.close(self._file)

    @staticmethod
    def CUmemAllocationProp() -> Any:  # noqa: N802 # as the driver has it
        return SimpleNamespace(location=SimpleNamespace())

    @staticmethod
    def CUmemAccessDesc() -> Any:  # noqa: N802
        return SimpleNamespace()

    def cuMemGetAllocationGranularity(self, prop: Any, option: str) -> tuple[CUresult, int]:  # noqa: N802
        assert prop.type == "pinned"
        assert prop.location.type == "device"
        assert option == "minimum"
        return CUresult.CUDA_SUCCESS, self.granularity

    def cuMemCreate(self, size: int, prop: Any, flags: int) -> tuple[CUresult, int]:  # noqa: N802
        self.calls["create"] += 1
        if size != self.granularity or flags:
            return CUresult.CUDA_ERROR_INVALID_VALUE, 0
        if not self._free:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        handle = 1000 + self.calls["create"]
        self.handles[handle] = self._free.pop()  # neighbours lie in the reverse order
        return CUresult.CUDA_SUCCESS, handle

    def cuMemRelease(self, handle: int) -> tuple[CUresult]:  # noqa: N802
        self.calls["release"] += 1
        if handle not in self.handles:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        assert handle not in self.mapped.values(), "its memory would stay taken"
        self._free.append(self.handles.pop(handle))
        return (CUresult.CUDA_SUCCESS,)

    def cuMemAddressReserve(  # noqa: N802
        self, size: int, alignment: int, addr: int, flags: int
    ) -> tuple[CUresult, int]:
        self.calls["reserve"] += 1
        if not self._whole(size, alignment) or addr or flags:
            return CUresult.CUDA_ERROR_INVALID_VALUE, 0
        address = self._mmap(None, size + alignment, _PROT_NONE, -1, 0)
        address += -address % alignment  # the memory before and behind it is never freed
        self.reserved[address] = size
        return CUresult.CUDA_SUCCESS, address

    def cuMemAddressFree(self, ptr: int, size: int) -> tuple[CUresult]:  # noqa: N802
        self.calls["free"] += 1
        if self.reserved.get(ptr) != size or any(page in self.mapped for page in self._pages(ptr, size)):
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        del self.reserved[ptr]
        self._libc.munmap(ptr, size)
        return (CUresult.CUDA_SUCCESS,)

    def cuMemMap(self, ptr: int, size: int, offset: int, handle: int, flags: int) -> tuple[CUresult]:  # noqa: N802
        self.calls["map"] += 1
        fits = any(start <= ptr and ptr + size <= start + length for start, length in self.reserved.items())
        whole = size == self.granularity and self._whole(ptr) and handle in self.handles
        if not (fits and whole) or ptr in self.mapped or offset or flags:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        self.mapped[ptr] = handle
        return (CUresult.CUDA_SUCCESS,)

    def cuMemSetAccess(self, ptr: int, size: int, desc: list[Any], count: int) -> tuple[CUresult]:  # noqa: N802
        self.calls["access"] += 1
        pages = self._pages(ptr, size)
        if not self._whole(ptr, size) or any(page not in self.mapped for page in pages) or count != len(desc):
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        assert [(one.flags, one.location.type) for one in desc] == [("readwrite", "device")]
        for page in pages:
            offset = self.handles[self.mapped[page]]
            self._mmap(page, self.granularity, mmap.PROT_READ | mmap.PROT_WRITE, self._file, offset)
        self.accessible.update(pages)
        return (CUresult.CUDA_SUCCESS,)

    def cuMemUnmap(self, ptr: int, size: int) -> tuple[CUresult]:  # noqa: N802
        self.calls["unmap"] += 1
        if ptr not in self.mapped or size != self.granularity:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        del self.mapped[ptr]
        self.accessible.discard(ptr)
        self._mmap(ptr, size, _PROT_NONE, -1, 0)
        return (CUresult.CUDA_SUCCESS,)

    def _whole(self, *numbers: int) -> bool:
        return all(number > 0 and number % self.granularity == 0 for number in numbers)

    def _pages(self, address: int, size: int) -> range:
        return range(address, address + size, self.granularity)

    def _mmap(self, address: int | None, size: int, protection: int, file: int, offset: int) -> int:
        flags = (mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if file < 0 else mmap.MAP_SHARED
        flags |= _MAP_FIXED if address is not None else 0
        found: int = self._libc.mmap(address, size, protection, flags, file, offset)
        assert found != 2**64 - 1
        return found

    def tensor_at(self, address: int, size: int) -> torch.Tensor:
        """Return the tensor that torch makes of an address on a GPU; it refuses an address whose device is unknown."""
        if address not in self.accessible:
            raise ValueError("the pointer resides on host memory and is not registered with any CUDA device")
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
