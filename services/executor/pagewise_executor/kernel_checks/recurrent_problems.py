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


def typical_forms(heads: int, key: int, value: int) -> dict[str, PlainRecurrence]:
    """Return a gated delta net, KDA, Mamba-2, and a short convolution, with random weights, by their names."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    found = {}
    for name, groups, decays in (("gated delta net", 1, heads), ("KDA", heads, heads * key), ("Mamba-2", 1, heads)):
        is_delta, channels, inner = name != "Mamba-2", 2 * groups * key + heads * value, heads * value
        sizes = [channels, inner, decays, heads]
        places = torch.split(torch.arange(sum(sizes)), sizes)
        weights = Weights(
            conv=draw(channels, 4) / 2, conv_bias=None if is_delta else draw(channels), a_log=draw(heads),
            dt_bias=draw(decays), skip=None if is_delta else draw(heads), norm=draw(inner),
            norm_size=value if is_delta else inner, gate="sigmoid" if name == "KDA" else "silu",
            gate_first=not is_delta,
        )  # fmt: skip
        of_rows = Places(conv=places[0], gate=places[1], decay=places[2], beta=places[3] if is_delta else None)
        state = (heads, key, value) if is_delta else (heads, value, key)
        found[name] = PlainRecurrence(weights, of_rows, state, 4)
    thirds = torch.arange(3 * value).view(3, value)
    short = Weights(conv=draw(value, 3), conv_bias=None, conv_silu=False, gate="alone")
    of_thirds = Places(conv=thirds[0], times=thirds[1], gate=thirds[2])
    found["short convolution"] = PlainRecurrence(short, of_thirds, None, 3)
    return found
