"""Paged attention on the CPU: norm, rotation, KV write and attention of a layer are one operation."""

import ctypes
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pagewise_kernels.cpu.library import AttentionArguments, empty, load_library, threads
from pagewise_kernels.cpu.operations import TYPES
from pagewise_kernels.kv_layer import INT4, INT8, KVLayer

MAX_HEAD_DIM = 512
MAX_KEY_DIM = 640
"""The same of keys of which a part are their values: latents."""
MAX_GROUP = 192
"""Query heads that may share a KV head."""

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


class Rotation(NamedTuple):
    """The rotation of queries and keys, and their norm, before attention.

    ``cos``, ``sin`` [tokens, head_dim], whose two halves are equal: RoPE. ``head_norm`` [heads + kv_heads, head_dim] or
    None: the weights of an RMSNorm of each head before it, with ``eps``.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    head_norm: torch.Tensor | None = None
    eps: float = 0.0


class CpuStep:
    """The attention of one step, with the arguments that all of its layers have in common.

    Args:
        slots: the slot of each token of the flat batch [tokens] in the pool.
        tables: block tables [rows, blocks] of ids of blocks of the pool, which are not checked again.
        rows, lengths: of the decodes [decodes], which come first in the flat batch: the row of the block tables, and
            the tokens in the context, the new one included.
        chunks: int64 [chunks, 4]: offset in the flat batch, row, position of the first token, number of tokens.
        prefixes: int64 [prefixes, 3]: decodes members[begin : begin + count] have equal block tables for the first
            tokens, fewer than each of their lengths: begin, count, tokens. A decode is in at most one of them.

    Raises:
        ValueError: lengths, chunks or prefixes are outside the batch or the block tables.
    """

    def __init__(
        self, slots: Int64s, tables: Int32s, rows: Int64s, lengths: Int64s, chunks: Int64s, *, block_size: int,
        prefixes: Int64s | None = None, members: Int64s | None = None,
    ) -> None:  # fmt: skip
        self._library = load_library()
        prefixes = np.zeros((0, 3), np.int64) if prefixes is None else np.ascontiguousarray(prefixes)
        members = np.zeros(0, np.int64) if members is None else np.ascontiguousarray(members)
        slots, rows, lengths, chunks = (np.ascontiguousarray(array) for array in (slots, rows, lengths, chunks))
        _check_step(slots, tables, rows, lengths, chunks, block_size, prefixes, members)
        self._kept = (slots, tables, rows, lengths, chunks, prefixes, members)  # while the structure points to them
        self._num_prefixes = len(prefixes)
        self.tokens, self.block_size = len(slots), block_size
        self._arguments = AttentionArguments(
            slots=slots.ctypes.data, tables=tables.ctypes.data, table_stride=tables.strides[0] // 4,
            block_size=block_size, tokens=len(slots), decodes=len(rows), num_chunks=len(chunks), rows=rows.ctypes.data,
            lengths=lengths.ctypes.data, chunks=chunks.ctypes.data, prefixes=prefixes.ctypes.data,
            num_prefixes=len(prefixes), members=members.ctypes.data, threads=threads(),
        )  # fmt: skip
        self._at = ctypes.byref(self._arguments)
        self.shared = AttentionArguments.from_buffer_copy(self._arguments)
        """The arguments that all layers have in common; ``attend`` adds the arguments of a layer to a copy."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: KVLayer, *, scale: float,
        window: int | None = None, softcap: float | None = None, rotation: Rotation | None = None,
        sinks: torch.Tensor | None = None, attention_chunk: int | None = None, write: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        """Write k and v [tokens, kv_heads, head_dim] into the pool, attend with q [tokens, heads, head_dim].

        All have one type, float32 or bfloat16, and the pool has it too, or eight or four bits. ``window``: a query sees
        so many tokens, itself included. With ``rotation``, queries and keys are rotated first, and ``q`` is changed in
        place. ``sinks`` [heads]: a logit of each query head that takes part in its softmax without a value.
        ``attention_chunk``: a query sees the tokens of its own chunk of so many tokens. Without ``write``, K and V are
        in the pool already. Of a layer of latents, v is not read. Returns [tokens, heads, head_dim of a value].

        Raises:
            ValueError: shapes or strides do not fit. TypeError: types do not. MemoryError: there is none.
        """
        self._check(q, k, v, layer, rotation)
        if sinks is not None:
            sinks = _checked_sinks(sinks, q.shape[1])
        value_dim = layer.latent or layer.head_dim
        out = empty((*q.shape[:2], value_dim), q.dtype)
        a = self._arguments
        a.q, a.k, a.v, a.out = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        a.q_token, a.q_head, _ = q.stride()
        a.k_token, a.k_head, _ = k.stride()
        a.v_token, a.v_head, _ = v.stride()
        set_layer(a, layer, q.shape[1], scale, window, attention_chunk)
        a.bf16, a.softcap = q.dtype == torch.bfloat16, softcap or 0.0
        a.tokens = self.tokens if write else 0
        # Windows of equal lengths begin at different tokens, and attention chunks behind a prefix.
        a.num_prefixes = 0 if window or attention_chunk else self._num_prefixes
        if rotation is not None:
            a.cos, a.sin, a.norm_eps = rotation.cos.data_ptr(), rotation.sin.data_ptr(), rotation.eps
            a.head_norm = rotation.head_norm.data_ptr() if rotation.head_norm is not None else None
        else:
            a.cos = a.sin = a.head_norm = None
        a.sinks = sinks.data_ptr() if sinks is not None else None
        if self._library.pagewise_attend(self._at):
            raise MemoryError("no memory for the parts of an attention step")
        return out

    def _check(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: KVLayer, rotation: Rotation | None
    ) -> None:
        tokens, heads, dim = q.shape
        new = (tokens, layer.kv_heads)
        found, expected = (self.tokens, self.block_size, dim), (tokens, layer.block_size, layer.head_dim)
        if (*found, k.shape, v.shape) != (*expected, (*new, layer.head_dim), (*new, layer.latent or layer.head_dim)):
            raise ValueError(
                f"{self.tokens} tokens in blocks of {self.block_size}: q, k, v, keys and values cannot be "
                f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}, {list(layer.keys.shape)} and "
                f"{list(layer.values.shape)}"
            )
        check_heads(layer, heads)
        if {q.dtype, k.dtype, v.dtype} - {q.dtype if layer.dtype in (INT8, INT4) else layer.dtype} or not (
            q.dtype in TYPES and q.device.type == "cpu"
        ):
            raise TypeError(
                "attention takes tensors of one type, float32 or bfloat16, on the CPU, and KV of the same or in fewer "
                f"bits, not {q.dtype}, {k.dtype}, {v.dtype} and {layer.dtype}"
            )
        if {q.stride(2), k.stride(2), v.stride(2)} != {1}:
            raise ValueError("the elements of a head lie next to each other in q, k and v")
        if rotation is not None:
            check_rotation(rotation.cos, rotation.sin, tokens, dim, q.dtype)
            if rotation.head_norm is not None:
                check_head_norm(rotation.head_norm, heads + layer.kv_heads, dim, q.dtype)


def check_heads(layer: KVLayer, heads: int) -> None:
    """Raise ValueError if the operation cannot compute so many query heads: the memory of its threads is limited."""
    dim, kv_heads = layer.head_dim, layer.kv_heads
    fits = 1 <= dim <= (MAX_KEY_DIM if layer.latent else MAX_HEAD_DIM) and layer.latent <= MAX_HEAD_DIM
    if heads % kv_heads or heads // kv_heads > MAX_GROUP or not fits:
        raise ValueError(f"{heads} heads of {dim} with {kv_heads} KV heads are not supported")


def set_layer(
    a: AttentionArguments, layer: KVLayer, heads: int, scale: float, window: int | None, attention_chunk: int | None
) -> None:
    """Set the arguments of a layer: its pool, its shape, and its window or attention chunk."""
    a.keys, a.values = layer.keys.data_ptr(), layer.values.data_ptr()
    a.key_block, a.key_slot, a.key_head = a.value_block, a.value_slot, a.value_head = layer.keys.stride()[:3]
    a.key_scales, a.value_scales = [scale.data_ptr() for scale in layer.scales] if layer.scales else (None, None)
    a.scale_block, a.scale_slot, a.scale_head = layer.scale_strides
    a.heads, a.kv_heads, a.dim, a.value_dim = heads, layer.kv_heads, layer.head_dim, layer.latent or layer.head_dim
    a.int4, a.scale, a.window, a.attention_chunk = layer.dtype == INT4, scale, window or 0, attention_chunk or 0


def _checked_sinks(sinks: torch.Tensor, heads: int) -> torch.Tensor:
    if sinks.shape != (heads,) or not sinks.is_floating_point() or sinks.device.type != "cpu":
        raise ValueError(f"sinks are floats on the CPU, one for each of {heads} heads, not {list(sinks.shape)}")
    return sinks.float().contiguous()


def _check_step(
    slots: Int64s, tables: Int32s, rows: Int64s, lengths: Int64s, chunks: Int64s, block_size: int, prefixes: Int64s,
    members: Int64s,
) -> None:  # fmt: skip
    if tables.ndim != 2 or tables.dtype != np.int32 or not tables[:1].flags.c_contiguous:
        raise ValueError(f"block tables are int32 [rows, blocks], not {tables.dtype} {list(tables.shape)}")
    if {array.dtype for array in (slots, rows, lengths, chunks, prefixes, members)} != {np.dtype(np.int64)}:
        raise ValueError("slots, rows, lengths, chunks and prefixes are int64")
    if (chunks.shape, prefixes.shape, lengths.shape) != ((len(chunks), 4), (len(prefixes), 3), rows.shape):
        raise ValueError("a chunk has four numbers, a prefix three, and each decode a length: the batch is none")
    room, (offset, row, start, size) = tables.shape[1] * block_size, chunks.T
    if len(rows) > len(slots) or not _within(
        (rows, 0, len(tables)), (lengths, 1, room + 1), (row, 0, len(tables)), (start, 0, room), (size, 1, room + 1),
        (start + size, 0, room + 1), (offset, len(rows), len(slots) + 1), (offset + size, 0, len(slots) + 1),
    ):  # fmt: skip
        raise ValueError("decodes or chunks are outside the batch or the block tables")
    if len(prefixes):
        _check_prefixes(prefixes, members, lengths, room)


def _check_prefixes(prefixes: Int64s, members: Int64s, lengths: Int64s, room: int) -> None:
    """Check the prefixes that decodes with contexts of ``lengths`` share. ``room``: the tokens of a block table."""
    (begin, count, shared), most = prefixes.T, len(members) + 1
    ranges = ((begin, 0, most), (count, 1, most), (begin + count, 0, most), (shared, 1, room))
    if not _within(*ranges, (members, 0, len(lengths))) or len(np.unique(members)) < len(members):
        raise ValueError("prefixes are of decodes of the batch, each in at most one of them")
    if any((lengths[members[b : b + n]] <= tokens).any() for b, n, tokens in prefixes.tolist()):
        raise ValueError("a prefix is shorter than each context that it begins")


def _within(*ranges: tuple[Int64s, int, int]) -> bool:
    return all(not len(values) or (values.min() >= low and values.max() < high) for values, low, high in ranges)


def check_rotation(cos: torch.Tensor, sin: torch.Tensor, tokens: int, dim: int, dtype: torch.dtype) -> None:
    """Raise ValueError if cos and sin are not of RoPE of ``tokens``."""
    for tensor in cos, sin:
        if (tensor.shape, tensor.dtype) != ((tokens, dim), dtype) or dim % 2 or not tensor.is_contiguous():
            raise ValueError(f"cos and sin are contiguous {dtype} [tokens, head_dim], not {list(tensor.shape)}")


def check_head_norm(norm: torch.Tensor, heads: int, dim: int, dtype: torch.dtype) -> None:
    """Raise ValueError if a norm does not have a weight for each of so many heads, of queries and keys."""
    if (norm.shape, norm.dtype) != ((heads, dim), dtype) or not norm.is_contiguous():
        raise ValueError(f"head_norm is {dtype} [heads + kv_heads, head_dim], not {list(norm.shape)}")
