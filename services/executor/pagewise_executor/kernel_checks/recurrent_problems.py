"""The forms of recurrent layers whose kernels are checked: a model's, or typical ones."""

from typing import Any

import torch
from pagewise_kernels.cpu.recurrent import Places, Weights

from pagewise_executor.models.loader import LoadedModel
from pagewise_executor.models.plain_recurrence import PlainRecurrence
from pagewise_executor.models.triton_recurrence import find_form


def forms_of(loaded: LoadedModel) -> tuple[PlainRecurrence, ...]:
    """Return the forms of the recurrent layers of a model, one of each shape."""
    found = {}
    for layer in loaded.recurrent if loaded.kernels == "triton" else ():
        if layer.states not in found:
            config: Any = loaded.model.config
            size = config.get_text_config().hidden_size
            found[layer.states] = find_form(loaded.model.get_submodule(layer.name), layer, size)
    return tuple(form.step for form in found.values() if form is not None)


def typical_forms(heads: int, key: int, value: int) -> tuple[PlainRecurrence, ...]:
    """Return a gated delta net, Mamba-2, and a short convolution, with random weights."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    found = []
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
        found.append(PlainRecurrence(weights, of_rows, state, 4))
    thirds = torch.arange(3 * value).view(3, value)
    short = Weights(conv=draw(value, 3), conv_bias=None, conv_silu=False, gate="alone")
    found.append(PlainRecurrence(short, Places(conv=thirds[0], times=thirds[1], gate=thirds[2]), None, 3))
    return tuple(found)
