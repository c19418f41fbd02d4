"""The KV pool: the memory that blocks are made of, and how large it may be."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pagewise_shared.config import ExecutorConfig, parse_size
from pagewise_shared.errors import ModelError

Raw = Any
"""Bytes on the device, indexed alike: a numpy array on the CPU, else a tensor."""

BlockIds = npt.NDArray[np.int32]

_CPU_SHARE = 0.25
_CPU_MOST = 4 * 2**30
_CUDA_SHARE = 0.9


class KVPool:
    """K and V of all layers: ``num_blocks`` blocks of ``block_size`` tokens.

    ``keys[layer]`` and ``values[layer]``: [num_blocks, block_size, kv_heads, head_dim]. A slot is
    ``block * block_size + offset``.
    """

    def __init__(
        self, shapes: list[tuple[int, int]], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.device = device
        self.bytes_per_block = bytes_per_block(shapes, block_size, dtype)
        self.keys, self.values = (
            [torch.zeros(num_blocks, block_size, heads, dim, dtype=dtype, device=device) for heads, dim in shapes]
            for _ in range(2)
        )
        self._parts: list[tuple[int, int, Raw]] = []
        start = 0
        for tensor in (*self.keys, *self.values):
            part = self._raw(tensor)
            self._parts.append((start, start + part.shape[1], part))
            start += part.shape[1]

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        """Copy blocks [n, 2] (source, destination) in every layer; all sources are read before any is written."""
        source, destination = pairs[:, 0], pairs[:, 1]
        for tensor in (*self.keys, *self.values):
            tensor[destination] = tensor[source]

    def gather(self, blocks: BlockIds) -> Raw:
        """The content of ``blocks`` [n], all layers in one piece: [n, bytes_per_block] uint8 on the device."""
        staged = self.staging(len(blocks))
        index = self._index(blocks)
        for start, stop, part in self._parts:
            staged[:, start:stop] = part[index]
        return staged

    def scatter(self, blocks: BlockIds, staged: Raw) -> None:
        """The counterpart of ``gather``: write ``staged`` [n, bytes_per_block] into ``blocks`` [n]."""
        index = self._index(blocks)
        for start, stop, part in self._parts:
            part[index] = staged[:, start:stop]

    def staging(self, count: int) -> Raw:
        """Room for ``count`` blocks on the device, uninitialised."""
        room = torch.empty(count, self.bytes_per_block, dtype=torch.uint8, device=self.device)
        return room.numpy() if self.device.type == "cpu" else room

    def _raw(self, tensor: torch.Tensor) -> Raw:
        """[num_blocks, bytes] of one layer's K or V. On the CPU as numpy: torch would start a pool of threads for each
        thread that copies, and they would keep the cores from those that compute."""
        view = tensor.view(torch.uint8).view(self.num_blocks, -1)
        return view.numpy() if self.device.type == "cpu" else view

    def _index(self, blocks: BlockIds) -> Any:
        index = blocks.astype(np.int64)
        return index if self.device.type == "cpu" else torch.from_numpy(index).to(self.device)


def bytes_per_block(shapes: list[tuple[int, int]], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: K and V of all layers, each of (kv_heads, head_dim)."""
    return 2 * block_size * dtype.itemsize * sum(heads * dim for heads, dim in shapes)


def pool_size(config: ExecutorConfig, block_bytes: int, device: torch.device, max_model_len: int) -> int:
    """Blocks the pool gets: ``--num-blocks``, or what ``--kv-memory`` or the free memory has room for.

    More than ``max_num_seqs`` sequences of full length is never needed.

    Raises:
        ModelError: not one block fits, or there is less memory than asked for.
    """
    free = free_memory(device)
    if config.num_blocks is not None:
        wanted = config.num_blocks * block_bytes
    elif config.kv_memory is not None:
        wanted = parse_size(config.kv_memory)
    else:
        useful = config.max_num_seqs * -(-max_model_len // config.block_size) * block_bytes
        room = int(free * _CUDA_SHARE) if device.type == "cuda" else min(int(free * _CPU_SHARE), _CPU_MOST)
        wanted = min(useful, room)
    if wanted > free:
        raise ModelError(f"not enough memory: the KV pool asks for {_gib(wanted)}, {_gib(free)} are free on {device}")
    if wanted < block_bytes:
        raise ModelError(
            f"not enough memory: one KV block takes {_gib(block_bytes)}, the pool would get {_gib(wanted)}"
        )
    return wanted // block_bytes


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device; on the CPU within the limits of the control group."""
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


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
