"""The same problems for others, where they are installed: FlashInfer, PyTorch's attention, FlexAttention.

Each is a name and a function that prepares and returns the call; the caller reports their exceptions.
"""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from pagewise_kernels.attention import Chunk, PrefillPlan
from pagewise_kernels.attention.specialised import SPECIALISED, specialised_prefill_attention
from pagewise_kernels.kv_layer import KVLayer

Make = Callable[[], Callable[[], Any]]

_FLASHINFER = "fa2"
"""Left to itself it takes FlashAttention 3 for prefill on Hopper, which it compiles with nvcc for minutes where that is
not cached: more than a run has. That one is the faster there, so beating this one means less."""


def decode(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor
) -> Iterator[tuple[str, Make]]:
    """Decode attention as in ``pagewise_kernels.attention.decode_attention``."""

    def flashinfer(tensor_cores: bool) -> Callable[[], Any]:
        import flashinfer as library

        blocks, block_size = tables.shape[1], keys.shape[1]
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(q), "NHD", use_tensor_cores=tensor_cores, backend=_FLASHINFER
        )
        indptr = torch.arange(0, len(q) * blocks + 1, blocks, dtype=torch.int32, device=q.device)
        wrapper.plan(
            indptr, tables.flatten(), (lengths - 1) % block_size + 1, q.shape[1], keys.shape[2], q.shape[2], block_size,
            q_data_type=q.dtype, kv_data_type=keys.dtype,
        )  # fmt: skip
        return lambda: wrapper.run(q, (keys, values))

    def sdpa() -> Callable[[], Any]:
        # On contiguous KV, which a server would have to copy first.
        k, v = (t[tables.long()].flatten(1, 2).transpose(1, 2).contiguous() for t in (keys, values))
        queries = q[:, :, None]
        return lambda: torch.nn.functional.scaled_dot_product_attention(queries, k, v, enable_gqa=True)

    if _has_flashinfer(q):
        yield f"flashinfer {_FLASHINFER}", lambda: flashinfer(True)
        yield "flashinfer, no tensor cores", lambda: flashinfer(False)
    yield "torch sdpa", sdpa


def prefill(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor
) -> Iterator[tuple[str, Make]]:
    """One chunk from position 0 on, as in ``pagewise_kernels.attention.prefill_attention``."""
    size = len(q)

    def flashinfer() -> Callable[[], Any]:
        import flashinfer as library

        block_size, blocks = keys.shape[1], tables.shape[1]
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(_workspace(q), "NHD", backend=_FLASHINFER)
        starts = torch.tensor([0, size], dtype=torch.int32, device=q.device)
        pages = torch.tensor([0, blocks], dtype=torch.int32, device=q.device)
        wrapper.plan(
            starts, pages, tables.flatten(), ((lengths - 1) % block_size + 1)[:1], q.shape[1], keys.shape[2],
            q.shape[2], block_size, causal=True, q_data_type=q.dtype, kv_data_type=keys.dtype,
        )  # fmt: skip
        return lambda: wrapper.run(q, (keys, values))

    def together() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        k, v = (t[tables[0].long()].flatten(0, 1)[:size].transpose(0, 1)[None].contiguous() for t in (keys, values))
        return q.transpose(0, 1)[None].contiguous(), k, v

    def sdpa() -> Callable[[], Any]:
        queries, k, v = together()
        attend = torch.nn.functional.scaled_dot_product_attention
        return lambda: attend(queries, k, v, is_causal=True, enable_gqa=True)

    def flex() -> Callable[[], Any]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        queries, k, v = together()
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, size, size, device="cuda")
        compiled = torch.compile(flex_attention, dynamic=False)
        return lambda: compiled(queries, k, v, block_mask=mask, enable_gqa=True)

    def specialised() -> Callable[[], Any]:
        plan = PrefillPlan(
            [Chunk(0, 0, size, 0)], heads=q.shape[1], kv_heads=keys.shape[2], head_dim=q.shape[2], kv_dtype=keys.dtype,
            device=q.device, config=SPECIALISED,
        )  # fmt: skip
        layer = KVLayer(keys, values)
        return lambda: specialised_prefill_attention(q, layer, tables, plan)

    yield "torch sdpa", sdpa
    if q.device.type == "cuda":
        yield "flex", flex
    if _has_flashinfer(q):
        yield f"flashinfer {_FLASHINFER}", flashinfer
    if q.device.type == "cuda" and torch.cuda.get_device_capability(q.device)[0] == 9:
        yield "pagewise, gluon", specialised  # the last, because it has not run on a device yet


def _has_flashinfer(q: torch.Tensor) -> bool:
    return q.device.type == "cuda" and importlib.util.find_spec("flashinfer") is not None


def _workspace(q: torch.Tensor) -> torch.Tensor:
    return torch.empty(256 * 2**20, dtype=torch.uint8, device=q.device)
