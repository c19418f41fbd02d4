"""Fixes RoPE frequencies that depend on the length of the sequence: to those of the longest sequence that is served.

transformers changes such frequencies with the longest position of a batch. A paged cache does not allow this: K was
rotated by the frequencies of the time when it was written, and sequences of all lengths share a batch. As in vLLM, the
frequencies follow from ``max_model_len``. docs/limits.md says for which sequences that differs from transformers.
"""

import logging

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

log = logging.getLogger(__name__)

_LENGTH_DEPENDENT = {"longrope", "dynamic"}


def fix_rope(model: nn.Module, max_model_len: int) -> list[str]:
    """Fix the frequencies of rotary embeddings that would change with the batch; return the rope types that were fixed.

    Raises:
        ValueError: the model has a rope type that cannot be fixed.
    """
    fixed = []
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds = set(kind.values()) if isinstance(kind, dict) else {kind}
        if not kinds & _LENGTH_DEPENDENT:
            continue
        if not isinstance(kind, str):
            raise ValueError(
                f"rope types that differ by layer ({', '.join(sorted(map(str, kinds)))}) are not supported"
            )
        inv_freq = module.inv_freq
        assert isinstance(inv_freq, torch.Tensor)
        wanted, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, inv_freq.device, seq_len=max_model_len)
        inv_freq.copy_(wanted)
        setattr(module, "attention_scaling", scaling)  # noqa: B010 - nn.Module declares attributes as modules
        setattr(module, "rope_type", "fixed")  # noqa: B010
        _tell(kind, module.config, max_model_len)
        fixed.append(kind)
    return fixed


def _tell(kind: str, config: object, max_model_len: int) -> None:
    """Say in the log for which sequences the frequencies are fixed, and which of them transformers computes otherwise.

    ``dynamic`` frequencies change beyond the model's own limit only, which no ``max_model_len`` exceeds.
    """
    original = dict(getattr(config, "rope_parameters", None) or {}).get("original_max_position_embeddings")
    if kind == "longrope" and original is not None and max_model_len > original:
        log.warning(
            "all sequences have the longrope factors of those of more than %d tokens, where transformers has other "
            "factors for shorter ones: --max-model-len %d computes shorter ones as transformers does, and no others",
            original, original,
        )  # fmt: skip
    else:
        log.info("%s rope fixed for sequences of up to %d tokens", kind, max_model_len)
