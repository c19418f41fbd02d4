"""What the kernels should compute, in plain PyTorch and float64."""

import torch


def attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    start: int,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    attention_chunk: int | None = None,
) -> torch.Tensor:
    """One sequence: q [queries, heads, head_dim] at positions from ``start`` on; keys, values [num_blocks, block_size,
    kv_heads, head_dim]; table [blocks]; sinks [heads]: logits without values. Returns float64 [queries, heads,
    head_dim]."""
    queries, heads, dim = q.shape
    length = start + queries
    k = keys[table.long()].flatten(0, 1)[:length].double()
    v = values[table.long()].flatten(0, 1)[:length].double()
    group = heads // keys.shape[2]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * (scale if scale is not None else dim**-0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    own = torch.arange(start, length, device=q.device)[:, None]
    token = torch.arange(length, device=q.device)[None, :]
    seen = token <= own
    if window is not None:
        seen &= token > own - window
    if attention_chunk is not None:
        seen &= token // attention_chunk == own // attention_chunk
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, queries, 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., :length]
    return torch.einsum("hqk,khd->qhd", weights, v)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (weight.double() + offset)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    wide, c, s = x.double(), cos.double()[:, None], sin.double()[:, None]
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat([first * c - second * s, second * c + first * s, rest], dim=-1)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def spread(scales: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """Scales [blocks of outputs, blocks of inputs] for each weight of ``shape`` [outs, ins]."""
    wide = scales.double().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[: shape[0], : shape[1]]


def scaled_linear(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight: torch.Tensor,
    scales: torch.Tensor,
    block: tuple[int, int],
    bias: torch.Tensor | None = None,
    group: int | None = None,
) -> torch.Tensor:
    wide = x.float().double()
    if x_scales is not None:
        wide = wide * spread(x_scales, (1, group or x.shape[1]), x.shape)
    result = wide @ (weight.float().double() * spread(scales, block, weight.shape)).T
    return result if bias is None else result + bias.double()
