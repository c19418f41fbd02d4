"""K and V as each format keeps them: numbers in, and the numbers that are read back out.

A vector is the key or the value of one token and head. The operations in C compute the same (``tests/kernels``).
"""

from collections.abc import Callable

import torch

Rounding = Callable[[torch.Tensor], torch.Tensor]
"""Rounds vectors [.., head_dim] in float32."""

GROUP = 32
"""Numbers of a vector that share a scale and a zero in four bits."""
_LEAST = 1e-30


def to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """Round to bfloat16."""
    return x.bfloat16().float()


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Round to float8 (e4m3), with a scale for each vector."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(_LEAST) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def to_int8(x: torch.Tensor) -> torch.Tensor:
    """Round to whole numbers up to 127, with a scale for each vector."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(_LEAST) / 127
    return (x / scale).round() * scale


def to_int4(x: torch.Tensor) -> torch.Tensor:
    """Round to 16 levels between the least and the largest of each ``GROUP`` numbers of a vector, in bfloat16."""
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    low = groups.amin(-1, keepdim=True).bfloat16().float()
    step = ((groups.amax(-1, keepdim=True) - low) / 15).bfloat16().float()
    codes = ((groups - low) / step.clamp_min(_LEAST)).round().clamp(0, 15)
    return (codes * step + low).reshape(x.shape)


def to_int4_by_channel(x: torch.Tensor, tokens: int = 16) -> torch.Tensor:
    """Round to 16 levels for each channel of ``tokens`` tokens: x [.., tokens, head_dim].

    No option does so: the stored numbers of a token would depend on the tokens behind it in its block.
    """
    missing = -x.shape[-2] % tokens
    padded = torch.cat([x, x[..., -1:, :].expand(*x.shape[:-2], missing, -1)], -2)
    columns = padded.reshape(*x.shape[:-2], -1, tokens, x.shape[-1]).transpose(-1, -2)
    rounded = to_int4(columns.repeat_interleave(GROUP // tokens, -1))[..., :: GROUP // tokens]
    return rounded.transpose(-1, -2).reshape(padded.shape)[..., : x.shape[-2], :]
