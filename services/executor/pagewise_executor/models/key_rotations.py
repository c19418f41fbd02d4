"""Finds the rotation of each layer's keys by their position (RoPE).

transformers' models differ in it: frequencies by layer, parts of a head that are not rotated, pairs that lie side by
side or half a head apart, layers without RoPE. So a trial computes the keys of one token at two positions, and compares
them. The hidden states are the same at both positions, because the token attends to itself alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
from pagewise_shared.errors import PagewiseError

from pagewise_executor.kv.segment_mover import KeyRotation
from pagewise_executor.models.long_rope import LongRope

_POSITIONS = (1, 98)
_TOKEN = 1
_MOST_ERROR, _MOST_ROUNDED_ERROR = 1e-3, 0.03
"""Relative error up to which a rotation fits keys in float32, and in types of fewer bits."""


class UnknownRotationError(PagewiseError):
    """The keys of a model change with their position in an unknown way; the text names the layer or the reason."""


class _Recorder:
    """Replaces the paged attention of a layer in the trial: keeps the keys, and lets each token attend to itself."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> torch.Tensor:
        self.keys = k
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


@torch.inference_mode()
def find_key_rotations(
    model: torch.nn.Module, attention: Sequence[torch.nn.Module], device: torch.device
) -> list[KeyRotation]:
    """Return the rotation of each layer's keys. ``attention``: the modules that call ``paged_attention``.

    Raises:
        UnknownRotationError: a layer's keys change with their position in another way, or a trial of the model is
        impossible.
    """
    if any(isinstance(module, LongRope) for module in model.modules()):
        raise UnknownRotationError("how its keys are rotated depends on the length of the sequence (LongRoPE)")
    recorders = [_Recorder() for _ in attention]
    for module, recorder in zip(attention, recorders, strict=True):
        module.paged_layer = recorder  # type: ignore[assignment]
    ids = torch.full((1, len(_POSITIONS)), _TOKEN, device=device)
    try:
        # With logits of all tokens: for one, Gemma 4 leaves the other token out of the layers that share their keys.
        model(input_ids=ids, position_ids=torch.tensor([_POSITIONS], device=device), use_cache=False)
    except Exception as error:  # models of others raise many kinds
        raise UnknownRotationError(f"the effect of positions on its keys cannot be tried: {error}") from error
    finally:
        for module in attention:
            del module.paged_layer
    known = _candidates(model)
    return [_fitting(layer, recorder.keys, known) for layer, recorder in enumerate(recorders)]


def _candidates(model: torch.nn.Module) -> list[KeyRotation]:
    """Return no rotation, and the rotations by all frequencies among the model's buffers."""
    found: list[torch.Tensor] = []
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq") and buffer.dim() == 1:
            # Of keys that are stored once with their values, the pairs that are rotated come first.
            for frequencies in buffer.float(), buffer.float()[buffer != 0]:
                if not any(torch.equal(frequencies, other) for other in found):
                    found.append(frequencies)
    return [KeyRotation(torch.zeros(0, device=next(model.parameters()).device))] + [
        KeyRotation(one, interleaved) for one in found for interleaved in (False, True)
    ]


def _fitting(layer: int, keys: Any, known: Sequence[KeyRotation]) -> KeyRotation:
    if keys is None:
        raise UnknownRotationError(f"its layer {layer} does not call paged attention")
    most = _MOST_ERROR if keys.dtype == torch.float32 else _MOST_ROUNDED_ERROR
    before, after = keys[:1].float(), keys[1:].float()
    distance = torch.tensor([_POSITIONS[1] - _POSITIONS[0]], device=keys.device)
    errors = []
    for rotation in known:
        if 2 * len(rotation.frequencies) > keys.shape[-1]:
            errors.append(float("inf"))
            continue
        error = (rotation.rotate(before, *rotation.angles(distance)) - after).norm() / after.norm()
        errors.append(float(error))
    best = min(range(len(known)), key=errors.__getitem__)
    if not errors[best] <= most:
        raise UnknownRotationError(f"the keys of its layer {layer} are not rotated by their position (RoPE)")
    return known[best]
