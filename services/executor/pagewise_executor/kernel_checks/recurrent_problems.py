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
    """Return a gated delta net, KDA, Mamba-2, and a short convolution, with random weights."""
    kinds = ("gated delta net", 1), ("KDA", heads), ("Mamba-2", 1)
    recurrent = [random_form(kind, heads, groups, key, value) for kind, groups in kinds]
    thirds, conv = torch.arange(3 * value).view(3, value), torch.randn(value, 3, generator=_generator())
    short = Weights(conv=conv, conv_bias=None, conv_silu=False, gate="alone")
    return *recurrent, PlainRecurrence(short, Places(conv=thirds[0], times=thirds[1], gate=thirds[2]), None, 3)


def random_form(kind: str, heads: int, groups: int, key: int, value: int) -> PlainRecurrence:
    """Return a form with random weights, always the same: a "gated delta net", "KDA" or "Mamba-2", whose heads share
    keys and queries in groups."""
    generator = _generator()

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    is_delta, channels, inner = kind != "Mamba-2", 2 * groups * key + heads * value, heads * value
    decays = heads * key if kind == "KDA" else heads
    sizes = [channels, inner, decays, heads]
    places = torch.split(torch.arange(sum(sizes)), sizes)
    weights = Weights(
        conv=draw(channels, 4) / 2, conv_bias=None if is_delta else draw(channels), a_log=draw(heads),
        dt_bias=draw(decays), skip=None if is_delta else draw(heads), norm=draw(inner),
        norm_size=value if is_delta else inner // groups, gate="sigmoid" if kind == "KDA" else "silu",
        gate_first=not is_delta,
    )  # fmt: skip
    of_rows = Places(conv=places[0], gate=places[1], decay=places[2], beta=places[3] if is_delta else None)
    return PlainRecurrence(weights, of_rows, (heads, key, value) if is_delta else (heads, value, key), 4)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)
