"""The expected results of the kernels, in plain PyTorch and float64."""

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


def sum_of_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sums [tokens, hidden], in float64, of the outputs of the ``chosen`` experts [tokens, k]."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for expert in range(len(down)):
        tokens, slots = (chosen == expert).nonzero(as_tuple=True)
        made = silu_mul(x[tokens].double() @ gate_up[expert].double().T) @ down[expert].double().T
        out.index_add_(0, tokens, made * weights[tokens, slots, None].double())
    return out


def drawn_experts(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Inputs, gate and up, and down of experts. ``shape``: tokens, experts, experts of a token, hidden, inner."""
    tokens, experts, _, hidden, inner = shape
    x = torch.randn(tokens, hidden + 8, device=device).to(dtype)[:, :hidden]
    gate_up = (torch.randn(experts, 2 * inner, hidden, device=device) / hidden**0.5).to(dtype)
    return x, gate_up, (torch.randn(experts, hidden, inner, device=device) / inner**0.5).to(dtype)
