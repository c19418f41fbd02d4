"""The forms of recurrent layers whose kernels are checked: those of a model, or typical ones."""

from typing import Any

import torch
from pagewise_kernels.cpu.recurrent import Places, Weights
from torch import nn

from pagewise_executor.models.loader import LoadedModel
from pagewise_executor.models.recurrent import CONV
from pagewise_executor.models.recurrent_forms import PlainRecurrence, PlainShort, find_form

KeptForm = tuple[PlainRecurrence | PlainShort, int]
"""A form, and how many inputs of each channel the conv state has."""


def forms_of(loaded: LoadedModel) -> tuple[KeptForm, ...]:
    """Return the forms of the recurrent layers of a model, one of each shape."""
    found = {}
    for layer in loaded.recurrent if loaded.kernels == "triton" else ():
        if layer.states not in found:
            config: Any = loaded.model.config
            size = config.get_text_config().hidden_size
            found[layer.states] = find_form(loaded.model.get_submodule(layer.name), layer, size, loaded.dtype)
    kept = [next(state.shape[-1] for state in states if state.key[0] == CONV) for states in found]
    return tuple((form.plain, each) for form, each in zip(found.values(), kept, strict=True) if form is not None)


def typical_forms(heads: int, key: int, value: int) -> tuple[KeptForm, ...]:
    """Return a gated delta net, Mamba-2, and a short convolution, with random weights."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    found: list[KeptForm] = []
    for is_delta in (True, False):
        channels, inner = 2 * key + heads * value, heads * value
        places = torch.split(torch.arange(channels + inner + 2 * heads), [channels, inner, heads, heads])
        weights = Weights(
            conv=draw(channels, 4) / 2, conv_bias=None if is_delta else draw(channels), a_log=draw(heads),
            dt_bias=draw(heads), skip=None if is_delta else draw(heads), norm=draw(inner),
            norm_size=value if is_delta else inner, gate_first=not is_delta,
        )  # fmt: skip
        of_rows = Places(conv=places[0], gate=places[1], decay=places[2], beta=places[3] if is_delta else None)
        state = (heads, key, value) if is_delta else (heads, value, key)
        unused = nn.Identity()
        found.append((PlainRecurrence(state, (0.0, float("inf")), [], weights, of_rows, unused), 4))
    found.append((PlainShort(draw(value, 3), None, *torch.arange(3 * value).view(3, value)), 3))
    return tuple(found)
