"""Attention of prefill chunks by libraries that may be faster than the Triton kernel: FlashAttention 3 and FlashInfer.

``--attention`` names one, or the fastest is chosen when the executor starts (``prefill_choice``), among these and our
kernel with specialised warps (``specialised_prefill``). It must be installed, support the model, and give PyTorch's
results for a small problem of each kind of layer that the model has: with its heads, and with a window and a cap of the
scores where layers have them. Decodes are computed by the Triton kernels, which CUDA graphs have recorded.

Written from the sources of flash-attn's ``hopper/flash_attn_interface.py`` and of flashinfer 0.6.6. It has not been run
on a device, which is why the results are compared.
"""

import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from pagewise_shared.errors import ModelError

from pagewise_executor.attention.backend import AttentionShape
from pagewise_executor.attention.torch_attention import attend_chunk
from pagewise_executor.uploads import Uploads

if TYPE_CHECKING:
    from pagewise_kernels.attention import Chunk

log = logging.getLogger(__name__)

_HALVES = (torch.bfloat16, torch.float16)
_WORKSPACE_BYTES = 128 * 2**20
TOLERANCE = 0.05
"""The most by which results may differ from PyTorch's, where values are drawn from a normal distribution."""

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""q [tokens, heads, head_dim], keys and values [num_blocks, block_size, kv_heads, head_dim] to [tokens, heads,
head_dim]. A call computes the tokens of all chunks of a step."""


@dataclass(slots=True)
class ChunkTables:
    """The chunks of a step, and the block tables ``tables`` int32 [rows, blocks] on the host."""

    chunks: "list[Chunk]"
    tables: npt.NDArray[np.int32]
    block_size: int
    upload: Uploads
    _on_device: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = field(default=None, init=False)

    @property
    def sizes(self) -> npt.NDArray[np.int32]:
        """Queries of each chunk."""
        return np.array([chunk.size for chunk in self.chunks], np.int32)

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of each chunk's context, its own included."""
        return np.array([chunk.start + chunk.size for chunk in self.chunks], np.int32)

    def on_device(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return int32 where the chunks begin [n + 1], their ``lengths`` [n], and their block tables [n, blocks]."""
        if self._on_device is None:
            blocks = -(-int(self.lengths.max()) // self.block_size)
            tables = self.tables[[chunk.table for chunk in self.chunks], :blocks]
            firsts, lengths, blocks_of = self.upload.together(begins(self.sizes), self.lengths, tables)
            self._on_device = firsts, lengths, blocks_of
        return self._on_device


class PrefillLibrary(ABC):
    """Computes the attention of prefill chunks, whose K and V are in the pool already.

    It computes the kinds of layers for which it gives PyTorch's results; Triton computes the others. ``block_size``: of
    the pool, in tokens.
    """

    name: ClassVar[str]

    def __init__(self, block_size: int, device: torch.device) -> None:
        self.block_size, self.device = block_size, device
        self._errors: dict[AttentionShape, str] = {}

    @abstractmethod
    def error(self, shape: AttentionShape) -> str:
        """Return the reason for which the library's own rules exclude layers of this kind; empty if there is none."""

    @abstractmethod
    def plan(self, shape: AttentionShape, tables: ChunkTables) -> Attend:
        """Prepare the attention of a step's layers of one kind."""

    def computes(self, shape: AttentionShape) -> bool:
        """Whether it computes layers of this kind. It tries a kind that had no trial at the executor's start."""
        if shape not in self._errors and (error := self.try_out(shape)):
            log.warning("attention of prompts: %s, and Triton's where it cannot: %s", self.name, error)
        return not self._errors[shape]

    def try_out(self, shape: AttentionShape) -> str:
        """Return why layers of this kind cannot be computed; empty if they can."""
        try:
            error = self.error(shape) if shape.attention_chunk is None else "it has no attention chunks"
            if not error:
                difference = largest_difference(self, with_small_limits(shape))
                if not difference <= TOLERANCE:  # also if it is not a number
                    error = f"results differ from PyTorch's by {difference:.3f} ({_described(shape)})"
        except Exception as raised:  # a third party's library may fail to compile or load in any way
            error = f"{type(raised).__name__}: {str(raised).partition(chr(10))[0]} ({_described(shape)})"
        self._errors[shape] = error
        return error


class FlashAttention3(PrefillLibrary):
    """FlashAttention 3 (arXiv 2407.08608) by the wheel ``flash_attn_interface``. It takes blocks of any size."""

    name = "fa3"

    def __init__(self, block_size: int, device: torch.device) -> None:
        super().__init__(block_size, device)
        if torch.cuda.get_device_capability(device)[0] != 9:
            raise ModelError("FlashAttention 3 needs compute capability 9.0")
        self._attend = _import("flash_attn_interface").flash_attn_with_kvcache

    def error(self, shape: AttentionShape) -> str:
        """Return why layers of this kind cannot be computed; empty if they can."""
        dim = shape.head_dim
        if dim % 8 or dim > 256:
            return f"heads of {dim}, no multiple of 8 up to 256"
        return _unsupported(shape)

    def plan(self, shape: AttentionShape, tables: ChunkTables) -> Attend:
        """Prepare the attention of a step's layers of one kind."""
        starts, lengths, blocks = tables.on_device()
        longest = int(tables.sizes.max())
        # Its window counts the tokens before the query, and ours the query as well.
        window = (-1, -1) if shape.window is None else (shape.window - 1, 0)

        def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            attended: torch.Tensor = self._attend(
                q, keys, values, cache_seqlens=lengths, page_table=blocks, cu_seqlens_q=starts, max_seqlen_q=longest,
                softmax_scale=shape.scale, causal=True, window_size=window, softcap=shape.softcap or 0.0,
            )  # fmt: skip
            return attended

        return attend


class FlashInfer(PrefillLibrary):
    """FlashInfer's prefill over paged KV (arXiv 2501.01005). It compiles kernels when it meets a new kind of layer."""

    name = "flashinfer"

    def __init__(self, block_size: int, device: torch.device) -> None:
        super().__init__(block_size, device)
        self._library = _import("flashinfer")
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[AttentionShape, Any] = {}

    def error(self, shape: AttentionShape) -> str:
        """Return why layers of this kind cannot be computed; empty if they can."""
        dim = shape.head_dim
        return _unsupported(shape) or ("" if dim in (64, 128, 256) else f"heads of {dim}, not 64, 128, 256")

    def plan(self, shape: AttentionShape, tables: ChunkTables) -> Attend:
        """Prepare the attention of a step's layers of one kind.

        Kinds of layers alternate within a step, so each has a wrapper of its own.
        """
        wrapper = self._wrappers.get(shape)
        if wrapper is None:
            wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
            self._wrappers[shape] = wrapper
        lengths, size = tables.lengths, tables.block_size
        blocks = -(-lengths // size)
        indices = [tables.tables[chunk.table, :count] for chunk, count in zip(tables.chunks, blocks, strict=True)]
        # It reads all but the blocks on the host.
        wrapper.plan(
            torch.from_numpy(begins(tables.sizes)), torch.from_numpy(begins(blocks)),
            tables.upload(np.concatenate(indices)), torch.from_numpy((lengths - 1) % size + 1),
            shape.heads, shape.kv_heads, shape.head_dim, size, causal=True, sm_scale=shape.scale,
            window_left=-1 if shape.window is None else shape.window - 1, logits_soft_cap=shape.softcap,
            q_data_type=shape.dtype, kv_data_type=shape.dtype,
        )  # fmt: skip

        def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            attended: torch.Tensor = wrapper.run(q.contiguous(), (keys, values))
            return attended

        return attend


def with_small_limits(shape: AttentionShape) -> AttentionShape:
    """Return the same kind of layer with numbers that matter for the short contexts of ``largest_difference``."""
    from pagewise_kernels.attention.config import LARGEST_TILE

    window = None if shape.window is None else min(shape.window, 7)
    softcap = None if shape.softcap is None else min(shape.softcap, 2.0)
    chunk = None if shape.attention_chunk is None else min(shape.attention_chunk, LARGEST_TILE)
    return replace(shape, scale=1.25 * shape.head_dim**-0.5, window=window, softcap=softcap, attention_chunk=chunk)


def _described(shape: AttentionShape) -> str:
    return f"{shape.heads} heads of {shape.head_dim} over {shape.kv_heads}" + "".join(
        f", {name} {value:g}" for name, value in (("window", shape.window), ("cap", shape.softcap)) if value is not None
    )


def largest_difference(library: PrefillLibrary, shape: AttentionShape) -> float:
    """Return by how much results of a library differ from PyTorch's, at most, for two chunks of small contexts."""
    from pagewise_kernels.attention import Chunk

    block_size, device = library.block_size, library.device
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(device, shape.dtype)

    chunks = [Chunk(0, 0, 2 * block_size + 3, 1), Chunk(2 * block_size + 3, block_size + 1, 5, 0)]
    tables = np.array([[7, 2, 5], [1, 6, 3]], np.int32)
    step = ChunkTables(chunks, tables, block_size, Uploads(device))
    keys, values = (draw(8, block_size, shape.kv_heads, shape.head_dim) for _ in range(2))
    q = draw(int(step.sizes.sum()), shape.heads, shape.head_dim)
    found = library.plan(shape, step)(q, keys, values)
    worst = 0.0
    for chunk in chunks:
        own, blocks = slice(chunk.first, chunk.first + chunk.size), torch.from_numpy(tables[chunk.table]).to(device)
        k, v = (t[blocks.long()].flatten(0, 1)[: chunk.start + chunk.size].float() for t in (keys, values))
        expected = attend_chunk(q[own].float(), k, v, chunk.start, shape.scale, shape.window, shape.softcap)
        worst = max(worst, float((found[own].float() - expected).abs().max()))
    return worst


def begins(sizes: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return where each of these stretches begins, and where the last one ends: int32 [len(sizes) + 1]."""
    return np.concatenate([np.zeros(1, np.int32), np.cumsum(sizes, dtype=np.int32)])


def _unsupported(shape: AttentionShape) -> str:
    if shape.dtype not in _HALVES:
        return f"it computes in bfloat16 and float16, not in {str(shape.dtype).removeprefix('torch.')}"
    if shape.shared:
        return "it is not tried with keys and values that overlap"
    return "it is called without attention sinks" if shape.sinks else ""


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ModelError(f"{module} is not installed: {error}") from None
