"""The KV pool: the device memory that blocks are made of, and how large it may be."""

import functools
import itertools
import logging
import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from pagewise_kernels.kv_layer import FP8, GROUP, INT4, INT8, RECORD, KVLayer, Scales
from pagewise_shared.config import parse_size, size_text
from pagewise_shared.errors import ModelError
from pagewise_shared.start_checks import check_pool

from pagewise_executor.device_defaults import SizedConfig

if TYPE_CHECKING:
    from pagewise_executor.kv.layer_groups import PageLayout

log = logging.getLogger(__name__)

Raw = Any
"""Bytes of blocks: a numpy array on the CPU, else a tensor. Both are indexed alike."""

KVShape = tuple[int, int] | tuple[int, int, int] | tuple[int, int, int, int]
"""KV heads and head size of a layer. If it keeps one vector for key and value: the sizes of the vector, of values, and
of keys unless they are the whole vector (see ``KVPool``)."""
BlockIds = npt.NDArray[np.int32]
Layout = Literal["layers", "blocks", "tokens"]


_CPU_SHARE = 0.25
_CPU_MOST = 4 * 2**30
_OUTSIDE_MOST = 2**30
"""Bytes of a GPU that this process may have taken without torch: for its context, kernels and libraries."""
_MOST_OF_FREE = 0.98
"""The share of the memory that is free on a GPU of which a pool may be made: allocations have gaps."""


@dataclass(slots=True, frozen=True)
class _Part:
    """K, V or their scales of one layer: the shape [block_size, kv_heads, ..] in one block, and the type."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count * self.dtype.itemsize


class KVPool:
    """K and V of all layers: ``num_blocks`` blocks of ``block_size`` tokens.

    ``shapes``: of each layer, KV heads and their dimension. A layer of latents (MLA) has a third number: so many
    elements at the end of a key are the value, which is stored as a part of the key only. A layer whose keys and values
    overlap has a fourth: so many elements at the beginning of a vector are the key.

    ``keys[layer]`` and ``values[layer]``: [num_blocks, block_size, kv_heads, head_dim] (in four bits, of records:
    ``KVLayer``). A slot is
    ``block * block_size + offset``. ``scales[layer]``: of KV in eight bits, else None. ``layers``: keys, values and
    scales as kernels take them. ``device``: a CUDA device always has an index, because threads that copy to and from
    the pool make it their current device.

    ``layout``: "layers" keeps the blocks of each layer together; "blocks" keeps all layers of a block together, so that
    a block is copied in one piece; "tokens" does so too, and in a block all layers of a token, so that the tokens of
    blocks that follow each other lie at equal distances in each layer. ``triton``: the Triton kernels make
    the copies. ``memory``: the memory of the pool, uint8 [num_blocks * bytes_per_block]; None: the pool allocates it.
    ``block_bytes``: the bytes of a block, if it has more than its layers take; not in the layout "layers".
    ``copied``: on a GPU, the event after the last copies inside the pool, which have read their sources then.

    Raises:
        ModelError: the device has no room for it.
    """

    def __init__(
        self, shapes: Sequence[KVShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device,
        *, layout: Layout = "layers", triton: bool = False, memory: torch.Tensor | None = None, block_bytes: int = 0,
    ) -> None:  # fmt: skip
        self.num_blocks, self.block_size = num_blocks, block_size
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.bytes_per_block = block_bytes or bytes_per_block(shapes, block_size, dtype)
        self.copied: torch.cuda.Event | None = None
        self._triton = triton
        self._memory = memory
        self._over = functools.partial(KVPool, shapes, block_size=block_size, dtype=dtype, device=device, layout=layout)
        # Each region is uint8 [parts, num_blocks, bytes]: parts of equal size, or the whole of each block.
        self.regions: list[torch.Tensor] = []
        groups = _parts(shapes, block_size, dtype)
        if layout == "layers":
            views = [view for group in groups for view in self._apart(group)]
        else:
            views = self._together([part for group in groups for part in group], layout == "tokens")
        # The views of each group: keys of all layers, then values of the layers that store them.
        layers, rest = len(shapes), iter(views)
        stored = list(zip(shapes, itertools.islice(rest, layers), strict=True))
        self.keys = [vectors[..., : shape[3]] if len(shape) == 4 else vectors for shape, vectors in stored]
        self.values = [next(rest) if len(shape) == 2 else vectors[..., -shape[2] :] for shape, vectors in stored]
        scales = list(rest)
        self.scales: list[Scales | None] = [
            Scales(scales[layer], scales[layers + layer]) if scales else None for layer in range(layers)
        ]
        self.layers = list(map(KVLayer, self.keys, self.values, self.scales))

    def over(self, memory: torch.Tensor, num_blocks: int) -> "KVPool":
        """Return a pool in the layout of this one over ``memory`` uint8 [num_blocks * bytes_per_block]."""
        return self._over(num_blocks, memory=memory)

    def _apart(self, parts: list[_Part]) -> list[torch.Tensor]:
        """Allocate the parts apart from each other, in one region if they are all of one size."""
        if len({part.size for part in parts}) == 1:
            region = self._region(len(parts), parts[0].size)
            return [_view(region[number], part) for number, part in enumerate(parts)]
        return [_view(self._region(1, part.size)[0], part) for part in parts]

    def _together(self, parts: list[_Part], by_token: bool) -> list[torch.Tensor]:
        """Allocate one region in which all parts of a block, or of each token in it, are next to each other."""
        region = self._region(1, self.bytes_per_block)[0]
        if by_token:
            region = region.view(self.num_blocks, self.block_size, -1)
        views, start = [], 0
        for part in parts:
            stop = start + part.size // (self.block_size if by_token else 1)
            views.append(_view(region[..., start:stop], part))
            start = stop
        return views

    def _region(self, parts: int, size: int) -> torch.Tensor:
        shape = parts, self.num_blocks, size
        if self._memory is not None:
            start = sum(region.numel() for region in self.regions)
            self.regions.append(self._memory[start : start + math.prod(shape)].view(shape))
            return self.regions[-1]
        try:
            region = _zeros(math.prod(shape), self.device).view(shape)
        except (torch.OutOfMemoryError, OSError) as error:
            raise no_room_for_pool(self.device, self.num_blocks * self.bytes_per_block) from error
        self.regions.append(region)
        return region

    def copy_blocks(self, pairs: npt.NDArray[np.int32]) -> None:
        """Copy blocks [n, 2] (source, destination) in every layer; all sources are read before any is written."""
        if self._triton and not np.intersect1d(pairs[:, 0], pairs[:, 1]).size:
            from pagewise_kernels.block_copy import copy_blocks

            ids = self.on_device(pairs)
            for region in self.regions:
                copy_blocks(region, ids)
        else:
            self.scatter(pairs[:, 1], self.gather(pairs[:, 0]))
        if self.device.type == "cuda":
            self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.copied.record()

    def gather(self, blocks: BlockIds) -> Raw:
        """Return the content of ``blocks`` [n], all layers in one piece: [n, bytes_per_block] uint8 on the device."""
        staged = self.staging(len(blocks))
        self.gather_into(blocks, staged)
        return staged

    def gather_into(self, blocks: BlockIds, staged: Raw) -> None:
        """Copy the content of ``blocks`` [n] into ``staged`` [n, bytes_per_block] uint8."""
        self._move(blocks, staged, gather=True)

    def scatter(self, blocks: BlockIds | torch.Tensor, staged: Raw) -> None:
        """Write ``staged`` [n, bytes_per_block], as ``gather`` returns it, into ``blocks`` [n].

        On a GPU the block ids may come from ``on_device``.
        """
        self._move(blocks, staged, gather=False)

    def staging(self, count: int) -> Raw:
        """Return uninitialised device memory for ``count`` blocks: [count, bytes_per_block] uint8."""
        room = torch.empty(count, self.bytes_per_block, dtype=torch.uint8, device=self.device)
        return room.numpy() if self.device.type == "cpu" else room

    def _move(self, blocks: BlockIds | torch.Tensor, staged: Raw, *, gather: bool) -> None:
        start = 0
        ids = self.on_device(blocks) if isinstance(blocks, np.ndarray) else blocks
        for region in self.regions:
            parts, _, size = region.shape
            columns = staged[:, start : start + parts * size]
            start += parts * size
            if self.device.type == "cpu":
                # numpy, not torch: torch starts a pool of threads for each thread that copies, and these pools would
                # take the cores from the threads that compute.
                _move_parts(region.numpy(), ids.numpy(), columns, gather)
            elif self._triton:
                from pagewise_kernels.block_copy import gather_blocks, scatter_blocks

                (gather_blocks if gather else scatter_blocks)(region, ids, columns)
            else:
                _move_parts(region, ids, columns, gather)

    def on_device(self, ids: npt.NDArray[np.int32]) -> torch.Tensor:
        """Return block ids as int64 on the device. They go through pinned memory: from other memory, a copy may wait
        for the stream."""
        host = torch.from_numpy(ids.astype(np.int64))
        return host.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else host


def no_room_for_pool(device: torch.device, size: int) -> ModelError:
    """Return the error for a device that has no room for a KV pool of ``size`` bytes."""
    return ModelError(
        f"not enough memory on {device} for a KV pool of {size_text(size)}: is another process using it? Ask for less "
        "with --kv-memory, or name another GPU in CUDA_VISIBLE_DEVICES"
    )


def _zeros(size: int, device: torch.device) -> torch.Tensor:
    """Return ``size`` bytes that are zero: uint8 [size].

    On the CPU, blocks take no physical memory before they are written for the first time: filling gigabytes with zeros
    takes as long as importing torch. Not ``numpy.zeros``, which asks for huge pages: where huge pages are emulated, as
    in some virtual machines, writing to new memory took five times as long as with ordinary pages.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _parts(shapes: Sequence[KVShape], block_size: int, dtype: torch.dtype) -> list[list[_Part]]:
    """Return the parts of a block in groups: K and V of all layers, and in eight bits their scales."""
    stored = [*shapes, *(shape for shape in shapes if len(shape) == 2)]
    groups = [[_Part((block_size, shape[0], _stored_size(shape[1], dtype)), dtype) for shape in stored]]
    if dtype in (FP8, INT8):
        groups.append([_Part((block_size, shape[0]), torch.float32) for shape in stored])
    return groups


def _stored_size(dim: int, dtype: torch.dtype) -> int:
    """Return the elements that ``dim`` numbers of a head take: bytes of records in four bits."""
    return -(-dim // GROUP) * RECORD if dtype == INT4 else dim


def _move_parts(region: Raw, index: Any, columns: Raw, gather: bool) -> None:
    """Copy between blocks of a region [parts, num_blocks, bytes] and ``columns`` [n, parts * bytes] of staging."""
    size = region.shape[2]
    for number, part in enumerate(region):
        own = columns[:, number * size : (number + 1) * size]
        if gather:
            own[:] = part[index]
        else:
            part[index] = own


def _view(memory: torch.Tensor, part: _Part) -> torch.Tensor:
    """View ``memory`` uint8 [num_blocks, part.size] as [num_blocks, *part.shape].

    Its rows may lie apart, and so may its tokens: uint8 [num_blocks, block_size, bytes of a token].
    """
    return memory.view(part.dtype).view(len(memory), *part.shape)


def bytes_per_block(shapes: Sequence[KVShape], block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block: K and V of layers of ``shapes``, as ``KVPool`` explains, and their scales."""
    return sum(part.size for group in _parts(shapes, block_size, dtype) for part in group)


def pool_size(
    config: SizedConfig, block_bytes: int, device: torch.device, max_model_len: int, reserved: int = 0,
    on_host: int = 1, layout: "PageLayout | None" = None,
) -> int:  # fmt: skip
    """Return the number of blocks of the pool: ``--num-blocks``, or as many as fit into ``--kv-memory``, the executor's
    share of a GPU's memory, or the free memory of the CPU. With ``layout``, of a model with several groups of layers,
    return the number of pages in the same memory.

    ``block_bytes``: of a block of all layers. ``reserved``: bytes that steps need beside the pool. ``on_host``: ranks
    that share this host's memory, of which none has taken anything yet. The pool never gets more than ``max_num_seqs``
    sequences of full length can use, unless it is asked for. On a GPU the weights have been loaded.

    Raises:
        ModelError: not one block fits, or more memory is asked for than is free.
    """
    free = free_memory(device)
    if config.num_blocks is not None:
        wanted = config.num_blocks * block_bytes
    elif config.kv_memory is not None:
        wanted = parse_size(config.kv_memory)
    else:
        useful = config.max_num_seqs * -(-max_model_len // config.block_size) * block_bytes
        if layout is not None:
            pages = layout.pages_for_all(config.max_num_seqs, max_model_len, config.tokens_in_flight)
            useful = pages * layout.page_bytes
        if device.type == "cuda":
            room = _cuda_room(config, device, free, reserved)
        else:
            room = min(int(free * _CPU_SHARE), _CPU_MOST) // on_host
        wanted = min(useful, room)
    sharing = on_host if device.type == "cpu" else 1
    if sharing * wanted > free:
        each = f" on each of {sharing} ranks" if sharing > 1 else ""
        raise ModelError(
            f"not enough memory: the KV pool asks for {size_text(wanted)}{each}, and {size_text(free)} are free on "
            f"{device}: lower {'--num-blocks' if config.num_blocks is not None else '--kv-memory'}"
        )
    if wanted < block_bytes:
        check_pool(0, config.block_size, block_bytes, max_model_len)
    return wanted // (block_bytes if layout is None else layout.page_bytes)


def _cuda_room(config: SizedConfig, device: torch.device, free: int, reserved: int) -> int:
    """Return the bytes that ``--gpu-memory-utilization`` leaves for the pool.

    Only memory of this process counts: several executors may share a GPU, each with its share. Torch knows its own
    allocations. The driver does not say which process holds the rest of the used memory, so up to ``_OUTSIDE_MOST``
    bytes of it count as this process's context and libraries.

    Raises:
        ModelError: nothing is left.
    """
    total, allocated = torch.cuda.mem_get_info(device)[1], torch.cuda.memory_reserved(device)
    taken = allocated + min(max(0, total - free - allocated), _OUTSIDE_MOST)
    allowed, most = int(total * config.gpu_memory_utilization) - taken, int(free * _MOST_OF_FREE)
    if allowed > most:
        log.warning(
            "--gpu-memory-utilization %g would be %s more, but %s are free on %s: is another process using it?",
            config.gpu_memory_utilization,
            size_text(allowed),
            size_text(free),
            device,
        )
    room = min(allowed, most) - reserved
    if room <= 0:
        raise ModelError(
            f"not enough memory on {device} for a KV pool: of {size_text(total)}, --gpu-memory-utilization "
            f"{config.gpu_memory_utilization:g}, weights and the context take {size_text(taken)} and steps "
            f"{size_text(reserved)}, and {size_text(free)} are free. Raise it, lower --max-num-batched-tokens or "
            "--max-num-seqs, or take a smaller model"
        )
    return room


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on the device; on the CPU, within the limits of the cgroup."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, max(0, int(text) - int(used.read_text())))
    return available
