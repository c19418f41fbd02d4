"""Paged attention as an attention function of transformers.

A model's attention layers call ``paged_attention``: the step writes their K and V into the pool through the slot
mapping, then attends over block tables. No mask function is registered under this name, on purpose: transformers then
makes no mask, and does not read the positions to make one, which would wait for the device.
"""

import torch
from transformers import AttentionInterface

from pagewise_executor.attention.absorbed import Absorbed
from pagewise_executor.attention.backend import PagedLayer
from pagewise_executor.attention.stored_once import StoredOnce

NAME = "pagewise"


def paged_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None, **_: object,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compute the attention of one layer over the paged context; transformers calls this.

    query [1, heads, tokens, head_dim], key and value [1, kv_heads, tokens, head_dim], or with the first and the third
    dimension exchanged. ``s_aux`` [heads]: attention sinks. In a module with ``absorbed``, key and value are the
    latents that the pool keeps. A module with ``stored_once`` has keys and values that are stored as one vector.
    Returns [1, tokens, heads, head_dim of value], or [tokens, 1, heads, head_dim of value].
    """
    layer: PagedLayer = module.paged_layer  # type: ignore[assignment]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    scale = scaling if scaling is not None else q.shape[-1] ** -0.5
    own: Absorbed | StoredOnce | None = getattr(module, "absorbed", None) or getattr(module, "stored_once", None)
    if own is not None:
        q = own.queries(q)
    if isinstance(own, StoredOnce):
        k, v = own.stored(k, v)
    attended = layer.attend(q, k, v, scale, sliding_window, softcap, s_aux)
    if own is not None:
        attended = own.values(attended)
    return attended.reshape(query.shape[0], query.shape[2], *attended.shape[1:]), None


AttentionInterface.register(NAME, paged_attention)
