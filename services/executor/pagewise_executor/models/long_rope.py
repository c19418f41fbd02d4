"""RoPE whose frequencies depend on the length of the sequence, made independent of the batch.

transformers changes such frequencies with the longest position of a batch. A paged cache does not allow this: K was
rotated by the frequencies of the time when it was written, and sequences of all lengths share a batch. ``dynamic``
frequencies are fixed for ``max_model_len``. They change beyond the model's own limit only, which no ``max_model_len``
exceeds. LongRoPE (arXiv 2402.13753) has two sets of frequencies, and each sequence has its own here.

A model has short factors for sequences of up to ``short_len`` tokens, and long factors for longer ones. All keys of a
sequence are rotated by the same factors, which therefore depend on how many tokens the sequence has by now. Here the
position of each token selects its factors:

- From ``short_len`` on they are the long ones. No shorter sequence has such a position.
- Below it they are the short ones. A sequence that is longer has ``shift`` added to these positions.

So a decode step needs nothing but its positions, and tables of cosines are indexed by them as ever.
"""

import copy
import logging
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from pagewise_executor.input_batch import InputBatch
from pagewise_executor.step_work import Int64s

log = logging.getLogger(__name__)

_LENGTH_DEPENDENT = {"longrope", "dynamic"}


class RopeLengths(NamedTuple):
    """``short_len``: the most tokens of a sequence with the short factors; ``shift``: more than any position."""

    short_len: int
    shift: int


class LongRope(nn.Module):
    """Replaces a rotary embedding. ``short``, ``long``: the embeddings with either factors, which may depend on their
    largest position. ``num_positions``: a bound above all positions, shifted ones too."""

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
    """The changes of a model's RoPE. ``length``: the length to which its keys were fixed; None: they do not depend on
    one. ``lengths``: of its ``LongRope``; None: it has none."""

    length: int | None = None
    lengths: RopeLengths | None = None


def rope_positions(lengths: RopeLengths, batch: InputBatch, rows: Int64s, positions: Int64s) -> Int64s:
    """Return positions [tokens] of ``rows`` [tokens] for ``LongRope``: the same array if none is shifted."""
    shifted = (batch.limits[rows] > lengths.short_len) & (positions < lengths.short_len)
    return positions + lengths.shift * shifted if shifted.any() else positions


def fix_rope(model: nn.Module, max_model_len: int) -> FixedRope:
    """Replace or fix the rotary embeddings that would change with the batch; return the changes.

    Raises:
        ValueError: the rope types of the model differ by layer.
    """
    done = FixedRope()
    for name, module in list(model.named_modules()):
        kind = getattr(module, "rope_type", None)
        kinds = set(kind.values()) if isinstance(kind, dict) else {kind}
        if not kinds & _LENGTH_DEPENDENT:
            continue
        if not isinstance(kind, str):
            raise ValueError(
                f"rope types that differ by layer ({', '.join(sorted(map(str, kinds)))}) are not supported"
            )
        if kind == "dynamic":
            _fix(module, kind, max_model_len)
            log.info("dynamic rope fixed for sequences of up to %d tokens", max_model_len)
            done = FixedRope(max_model_len)
            continue
        given = module.config.rope_parameters
        lengths = RopeLengths(int(given["original_max_position_embeddings"]), max_model_len)
        long = copy.deepcopy(module)
        _fix(module, kind, lengths.short_len)
        _fix(long, kind, lengths.short_len + 1)
        scales_differ = given.get("short_mscale") != given.get("long_mscale")
        same = torch.equal(module.inv_freq, long.inv_freq) and not scales_differ
        if max_model_len > lengths.short_len and not same:
            model.set_submodule(name, LongRope(module, long, lengths))
            log.info("sequences of more than %d tokens have the long factors of LongRoPE", lengths.short_len)
            done = FixedRope(lengths=lengths)
    return done


def _fix(module: nn.Module, kind: str, length: int) -> None:
    inv_freq = module.inv_freq
    assert isinstance(inv_freq, torch.Tensor)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    wanted, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, inv_freq.device, seq_len=length)
    inv_freq.copy_(wanted)
    setattr(module, "attention_scaling", scaling)  # noqa: B010 - nn.Module declares attributes as modules
    setattr(module, "rope_type", "fixed")  # noqa: B010
