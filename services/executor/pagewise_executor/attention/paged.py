"""The way into transformers' models, through their attention interface.

A model's attention layers call ``paged_attention``: the step writes its K and V into the pool through the slot mapping,
then attends over block tables. No function for masks is registered under its name: transformers then makes none, and
does not look at the positions for it, which would wait for the device.
"""

import torch
from transformers import AttentionInterface

from pagewise_executor.attention.backend import PagedLayer

NAME = "pagewise"


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer over the paged context, as transformers calls it.

    query [1, heads, tokens, head_dim], key and value [1, kv_heads, tokens, head_dim]. Returns [1, tokens, heads,
    head_dim of value].
    """
    layer: PagedLayer = module.paged_layer  # type: ignore[assignment]
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    scale = scaling if scaling is not None else q.shape[-1] ** -0.5
    return layer.attend(q, k, v, scale, sliding_window, softcap)[None], None


AttentionInterface.register(NAME, paged_attention)
