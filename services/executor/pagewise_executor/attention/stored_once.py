"""Attention whose keys are made of its values, which are then stored once (Gemma 4 26B and 31B).

The value of a token and head is its key before norm and rotation, divided by its root mean square. So the key is the
value times the weight of the norm, of which some elements are rotated afterwards. The weight multiplies the query
instead, and then key and value are equal except for the rotated elements. With these in front of the key and behind
the value, the pool keeps one vector for a token and head, and the two overlap in it:

    | rotated, of the key | in common | rotated, of the value |
    | <------------- key -----------> |
                          | <----------- value -------------> |

Kernels read keys and values at two addresses as they always do.
"""

import torch
from torch import nn


class StoredOnce(nn.Module):
    """The order in which queries, keys and values of an attention module are stored, and the weight of its queries.

    Args:
        weight: [head_dim], of the norm of keys.
        pairs: of elements of a key that are rotated: each of the first ones with the one half a head behind it.

    ``shared``: the number of elements that key and value have in common.
    """

    def __init__(self, weight: torch.Tensor, pairs: int) -> None:
        super().__init__()
        plain = len(weight) // 2 - pairs
        self.shared = 2 * plain
        self._parts = [pairs, plain, pairs, plain]
        _, second, _, last = torch.split(weight.detach(), self._parts)
        ones = torch.ones_like(weight[: 2 * pairs])
        self._weight = nn.Buffer(torch.cat([ones, second, last]), persistent=False)

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """Return queries of stored keys for rotated q [tokens, heads, head_dim]."""
        first, second, third, last = torch.split(q, self._parts, dim=-1)
        return torch.cat([first, third, second, last], dim=-1).mul_(self._weight)

    def stored(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rotated keys and values [tokens, kv_heads, head_dim] as they are stored, overlapping in memory."""
        first, _, third, _ = torch.split(k, self._parts, dim=-1)
        of_value = torch.split(v, self._parts, dim=-1)
        vectors = torch.cat([first, third, of_value[1], of_value[3], of_value[0], of_value[2]], dim=-1)
        return vectors[..., : k.shape[-1]], vectors[..., -v.shape[-1] :]

    def values(self, sums: torch.Tensor) -> torch.Tensor:
        """Return sums of values [tokens, heads, head_dim] for sums of stored values."""
        pairs, plain, *_ = self._parts
        second, last, first, third = torch.split(sums, [plain, plain, pairs, pairs], dim=-1)
        return torch.cat([first, second, third, last], dim=-1)
