"""Attention to latents (multi-head latent attention, MLA, DeepSeek-V2, arXiv 2405.04434).

The attention modules of transformers compute a latent and a rotated part of the key for each token, which all heads
share, and then expand them to keys and values of every head. Here they are not expanded: the vector (rotated part,
latent) is the only KV head that the pool keeps for a token. The key of a head is W_K · latent, so its score is a
product of the latent and the query times W_K. The value of a head is W_V · latent, so the weighted sum of its values is
W_V times the weighted sum of latents. The up-projections W_K and W_V are thereby *absorbed*: they multiply queries and
results of the tokens of a step, and not the context.
"""

import torch
from torch import nn


class Absorbed(nn.Module):
    """The up-projections of an attention module as matrices that multiply its queries and its results.

    Args:
        weight: [heads * (plain + value), latent], of the linear layer that expands latents to keys and values.
        plain, rotated: sizes of the parts of a query that are multiplied with W_K · latent, and with the rotated part.
        value: size of a value.

    ``to_latents`` [heads, plain, latent] and ``from_latents`` [heads, latent, value] are views of ``weight``.
    """

    def __init__(self, weight: torch.Tensor, *, plain: int, rotated: int, value: int) -> None:
        super().__init__()
        self.rotated = rotated
        of_heads = weight.detach().view(-1, plain + value, weight.shape[1])
        self.to_latents = nn.Parameter(of_heads[:, :plain], requires_grad=False)
        self.from_latents = nn.Parameter(of_heads[:, plain:].transpose(1, 2), requires_grad=False)

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """Return queries of stored vectors [tokens, heads, rotated + latent] for q [tokens, heads, plain + rotated]."""
        plain = torch.bmm(q[..., : -self.rotated].transpose(0, 1), self.to_latents).transpose(0, 1)
        return torch.cat([q[..., -self.rotated :], plain], dim=-1)

    def values(self, sums: torch.Tensor) -> torch.Tensor:
        """Return sums of values [tokens, heads, value] for sums of latents [tokens, heads, latent]."""
        return torch.bmm(sums.transpose(0, 1), self.from_latents).transpose(0, 1)
