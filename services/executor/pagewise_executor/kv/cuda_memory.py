"""Physical memory of a GPU that is mapped by the driver's virtual memory API.

It has been tested with a fake of the driver only, which checks the rules of the API, and never on a GPU. Data that a
kernel writes at one address may be read at another address of the same memory by later kernels, not by the same
kernel: one kernel writes K and V, and another kernel reads them.

Source: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from pagewise_shared.errors import ModelError

from pagewise_executor.kv.kv_pool import no_room_for_pool

Driver = Any
"""The module ``cuda.bindings.driver``, whose functions return a tuple of an error and of their results."""

TensorAt = Callable[[int, int], torch.Tensor]
"""Returns a tensor over an address and so many bytes: uint8 [bytes]."""


def load_driver() -> Driver:
    """Return the bindings of the driver.

    Raises:
        ModelError: they are not installed.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ModelError(
            f"--kv-mapping mmu on a GPU needs cuda-bindings: pip install cuda-bindings ({error})"
        ) from error
    return driver


class CudaMemory:
    """``PhysicalMemory`` of a GPU. Each page is an allocation, because the driver maps only whole allocations.

    ``tensor_at``: makes tensors; None: torch does, on ``device``.
    """

    max_maps = math.inf

    def __init__(self, driver: Driver, device: torch.device, tensor_at: TensorAt | None = None) -> None:
        self._driver, self._device = driver, device
        self._tensor_at = tensor_at or self._cuda_tensor
        self._property = allocation = driver.CUmemAllocationProp()
        allocation.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        allocation.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        allocation.location.id = device.index or 0
        self._access = access = driver.CUmemAccessDesc()
        access.location = allocation.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call] # the driver answers only then
        self.page = int(self._call("cuMemGetAllocationGranularity", allocation, minimum))
        self._handles: list[Any] = []
        self._whole: torch.Tensor | None = None
        self._mapped: set[int] = set()
        self._sizes: dict[int, int] = {}

    def allocate(self, size: int) -> torch.Tensor:
        """Allocate pages for ``size`` bytes, and map them as a whole."""
        try:
            for _ in range(-(-size // self.page)):
                self._handles.append(self._call("cuMemCreate", self.page, self._property, 0))
            whole = self.reserve(len(self._handles) * self.page)
        except OSError as error:
            self.free()
            raise no_room_for_pool(self._device, size) from error
        self._whole = whole
        self.map(whole.data_ptr(), 0, len(whole))
        return whole[:size]

    def reserve(self, size: int) -> torch.Tensor:
        """Reserve a range of virtual addresses, in whole pages."""
        size = -(-size // self.page) * self.page
        address = int(self._call("cuMemAddressReserve", size, self.page, 0, 0))
        self._sizes[address] = size
        # Torch asks the driver to which device an address belongs, which it knows only while memory is mapped there.
        self.map(address, 0, self.page)
        tensor = self._tensor_at(address, size)
        self._unmap({address})
        return tensor

    def map(self, address: int, offset: int, size: int) -> None:
        """Replace mappings: see ``PhysicalMemory``. Kernels may use the old mappings, so this waits for the kernels."""
        pages = range(address, address + size, self.page)
        self._unmap(self._mapped.intersection(pages))
        first = offset // self.page
        for page, handle in zip(pages, self._handles[first : first + len(pages)], strict=True):
            self._call("cuMemMap", page, self.page, 0, handle, 0)
            self._mapped.add(page)
        self._call("cuMemSetAccess", address, size, [self._access], 1)

    def release(self, reserved: torch.Tensor) -> None:
        """Unmap a range, and give its addresses back."""
        address = reserved.data_ptr()
        size = self._sizes.pop(address)
        self._unmap(self._mapped.intersection(range(address, address + size, self.page)))
        self._call("cuMemAddressFree", address, size)

    def free(self) -> None:
        """Unmap and release all pages."""
        self._unmap(set(self._mapped))
        if self._whole is not None:
            self.release(self._whole)
            self._whole = None
        for handle in self._handles:
            self._call("cuMemRelease", handle)
        self._handles.clear()

    def _unmap(self, pages: set[int]) -> None:
        if pages and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for page in pages:
            self._call("cuMemUnmap", page, self.page)
            self._mapped.discard(page)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the driver, and return its result; OSError if it fails."""
        error, *results = getattr(self._driver, name)(*arguments)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise OSError(f"{name} of the GPU's driver failed: {error}")
        return results[0] if results else None

    def _cuda_tensor(self, address: int, size: int) -> torch.Tensor:
        return torch.as_tensor(_Array(address, size), device=self._device)


class _Array:
    """Memory of a GPU, as torch takes it over from others."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
