"""LongRoPE (arXiv 2402.13753) for batches of sequences of all lengths.

A model has short factors for sequences of up to ``short_len`` tokens, and long factors for longer ones. All keys of a
sequence are rotated by the same factors, so those of a position depend on how many tokens its sequence has by now.
transformers looks at the longest sequence of a batch. Here the position of each token says which factors it has:

- From ``short_len`` on they are the long ones. No shorter sequence has such a position.
- Below it they are the short ones. A sequence that is longer has ``shift`` added to these positions.

So a decode step needs nothing but its positions, and tables of cosines are indexed by them as ever.
"""

from dataclasses import dataclass

import torch
from torch import nn

from pagewise_executor.rope_lengths import RopeLengths


class LongRope(nn.Module):
    """Replaces a rotary embedding. ``short``, ``long``: the same with either factors, each of which may look at the
    largest position that it is given. ``num_positions``: positions are below it, shifted ones too."""

    def __init__(self, short: nn.Module, long: nn.Module, lengths: RopeLengths) -> None:
        super().__init__()
        self.short, self.long, self.lengths = short, long, lengths
        self.num_positions = lengths.shift + lengths.short_len

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return cos and sin [..., tokens, head_dim] of positions [..., tokens]."""
        short_len, shift = self.lengths
        is_long = position_ids >= short_len
        places = torch.where(position_ids >= shift, position_ids - shift, position_ids)
        beyond = torch.cat([places, torch.full_like(places[..., :1], short_len)], dim=-1)
        short, long = self.short(x, torch.where(is_long, 0, places)), self.long(x, beyond)
        return tuple(torch.where(is_long[..., None], b[..., :-1, :], a) for a, b in zip(short, long, strict=True))


@dataclass(slots=True, frozen=True)
class FixedRope:
    """What was done to a model. ``length``: the one that its keys depend on; None: there is none. ``lengths``: of the
    LongRoPE that it has now; None: the length of a sequence does not matter."""

    length: int | None = None
    lengths: RopeLengths | None = None
