"""Makes RoPE whose frequencies depend on the length of the sequence independent of the batch.

transformers changes such frequencies with the longest position of a batch. A paged cache does not allow this: K was
rotated by the frequencies of the time when it was written, and sequences of all lengths share a batch. LongRoPE has two
sets of frequencies, and ``LongRope`` gives each sequence its own. ``dynamic`` frequencies are fixed to those of
``max_model_len``. They change beyond the model's own limit only, which no ``max_model_len`` exceeds.
"""

import copy
import logging

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pagewise_executor.models.long_rope import FixedRope, LongRope
from pagewise_executor.rope_lengths import RopeLengths

log = logging.getLogger(__name__)

_LENGTH_DEPENDENT = {"longrope", "dynamic"}


def fix_rope(model: nn.Module, max_model_len: int) -> FixedRope:
    """Replace or fix the rotary embeddings that would change with the batch; return what that makes of the model.

    Raises:
        ValueError: the model has a rope type for which that cannot be done.
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
    """Let a rotary embedding have the frequencies of sequences of this length, whatever it is given."""
    inv_freq = module.inv_freq
    assert isinstance(inv_freq, torch.Tensor)
    wanted, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, inv_freq.device, seq_len=length)
    inv_freq.copy_(wanted)
    setattr(module, "attention_scaling", scaling)  # noqa: B010 - nn.Module declares attributes as modules
    setattr(module, "rope_type", "fixed")  # noqa: B010
