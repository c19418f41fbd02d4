"""The same problems for others, where they are installed: FlashInfer, PyTorch's attention, FlexAttention."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

Call = tuple[str, Callable[[], Any]]


def decode(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor
) -> Iterator[Call]:
    """Decode attention as in ``pagewise_kernels.attention.decode_attention``."""
    if (flashinfer := _flashinfer(q)) is not None:
        blocks = tables.shape[1]
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(q), "NHD")
        block_size = keys.shape[1]
        indptr = torch.arange(0, len(q) * blocks + 1, blocks, dtype=torch.int32, device=q.device)
        last = (lengths - 1) % block_size + 1
        wrapper.plan(
            indptr, tables.flatten(), last, q.shape[1], keys.shape[2], q.shape[2], block_size,
            q_data_type=q.dtype, kv_data_type=keys.dtype,
        )  # fmt: skip
        yield "flashinfer", lambda: wrapper.run(q, (keys, values))
    k, v = (t[tables.long()].flatten(1, 2).transpose(1, 2).contiguous() for t in (keys, values))
    queries = q[:, :, None]
    yield (
        "torch sdpa",  # on KV that lies together, which a server would have to copy first
        lambda: torch.nn.functional.scaled_dot_product_attention(queries, k, v, enable_gqa=True),
    )


def prefill(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor
) -> Iterator[Call]:
    """One chunk from position 0 on, as in ``pagewise_kernels.attention.prefill_attention``."""
    size = len(q)
    if (flashinfer := _flashinfer(q)) is not None:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(q), "NHD")
        block_size, blocks = keys.shape[1], tables.shape[1]
        starts = torch.tensor([0, size], dtype=torch.int32, device=q.device)
        pages = torch.tensor([0, blocks], dtype=torch.int32, device=q.device)
        last = ((lengths - 1) % block_size + 1)[:1]
        wrapper.plan(
            starts, pages, tables.flatten(), last, q.shape[1], keys.shape[2], q.shape[2], block_size,
            causal=True, q_data_type=q.dtype, kv_data_type=keys.dtype,
        )  # fmt: skip
        yield "flashinfer", lambda: wrapper.run(q, (keys, values))
    k, v = (t[tables[0].long()].flatten(0, 1)[:size].transpose(0, 1)[None].contiguous() for t in (keys, values))
    queries = q.transpose(0, 1)[None].contiguous()
    yield (
        "torch sdpa",
        lambda: torch.nn.functional.scaled_dot_product_attention(queries, k, v, is_causal=True, enable_gqa=True),
    )
    if q.device.type == "cuda":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, size, size, device="cuda")
        compiled = torch.compile(flex_attention)
        yield "flex", lambda: compiled(queries, k, v, block_mask=mask, enable_gqa=True)


def _flashinfer(q: torch.Tensor) -> Any:
    if q.device.type != "cuda":
        return None
    try:
        import flashinfer
    except ImportError:
        return None
    return flashinfer


def _workspace(q: torch.Tensor) -> torch.Tensor:
    return torch.empty(256 * 2**20, dtype=torch.uint8, device=q.device)
