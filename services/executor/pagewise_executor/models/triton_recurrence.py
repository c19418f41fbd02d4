"""Recurrent modules by the Triton kernels: all tokens of a flat batch at once, with the states in their pages."""

import logging
from collections.abc import Mapping, Sequence

import torch
from pagewise_kernels.recurrent import BlockStates, Recurrence, ShortConvolution, convolve_short, recur
from torch import nn

from pagewise_executor.models.recurrent import CONV, RECURRENT, RecurrentContext, RecurrentLayer
from pagewise_executor.models.recurrent_forms import Form, PlainRecurrence, PlainShort, find_form, on_device

log = logging.getLogger(__name__)

_ALIGNED = 4
"""Bytes: of which the states of each layer have a multiple, so that the next ones begin with a whole value."""


class TritonRecurrence:
    """Replaces the forward pass of a recurrent module of a form that the kernels compute.

    ``context``: has the plan of the step, and the pages of blocks.
    """

    def __init__(self, form: Form, layer: RecurrentLayer, context: RecurrentContext, device: torch.device) -> None:
        self._layer, self._context, self._form = layer, context, form
        shapes = {state.key: state.shape for state in layer.states}
        self._kernels = kernels_of_form(form.plain, shapes[CONV, 0][-1], device)
        self._states: list[BlockStates] = []

    def attach(self, memory: torch.Tensor, start: int) -> int:
        """Keep the states in ``memory``, pages uint8 [pages, page bytes], from byte ``start`` of each block on; return
        the byte behind them."""
        held = {}
        for state in self._layer.states:
            held[state.key] = BlockStates(memory, self._context.tables, start, state.dtype)
            start += state.num_bytes
        self._states = [held[key] for key in ((CONV, 0), (RECURRENT, 0)) if key in held]
        return start

    def detach(self) -> None:
        """Drop the references to the memory of states."""
        self._states = []

    def __call__(self, hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """Compute the outputs [1, tokens, size] of a flat batch, and update the states of its sequences."""
        plan = self._context.plan
        assert plan is not None
        parts = [projection(hidden_states[0]) for projection in self._form.projections]
        projected = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if isinstance(self._kernels, ShortConvolution):
            found = convolve_short(self._kernels, projected, plan, self._states[0])
        else:
            found = recur(self._kernels, projected, plan, self._states[0], self._states[1])
        outputs: torch.Tensor = self._form.out(found)[None]
        return outputs


def kernels_of_form(
    plain: PlainRecurrence | PlainShort, kept: int, device: torch.device
) -> Recurrence | ShortConvolution:
    """Return what the kernels take for a form. ``kept``: inputs of each channel in the conv state.

    Raises:
        ValueError: they do not compute it.
    """
    if isinstance(plain, PlainShort):
        bias = None if plain.conv_bias is None else plain.conv_bias.to(device)
        places = plain.conv_from, plain.factor_from, plain.gate_from
        return ShortConvolution(plain.conv.to(device), bias, *places, kept)
    return Recurrence(*on_device(plain, device), plain.state, kept, plain.limits)  # type: ignore[arg-type]


def find_kernels(
    model: nn.Module, layers: Sequence[RecurrentLayer], context: RecurrentContext, dtype: torch.dtype,
    device: torch.device,
) -> Mapping[str, TritonRecurrence]:  # fmt: skip
    """Return what computes recurrent modules of a model by the kernels, by their names. Others stay with PyTorch."""
    found = {}
    for layer in layers:
        if any(one.num_bytes % _ALIGNED for one in layers):
            break
        form = find_form(model.get_submodule(layer.name), layer, model.config.get_text_config().hidden_size, dtype)  # type: ignore[union-attr, operator]
        if form is None:
            continue
        try:
            found[layer.name] = TritonRecurrence(form, layer, context, device)
        except ValueError as error:
            log.info("%s is computed by PyTorch: %s", layer.name, error)
    if len(found) < len(layers):
        log.warning("PyTorch computes %d of %d recurrent layers, slower", len(layers) - len(found), len(layers))
    elif layers:
        log.info("the Triton kernels compute all %d recurrent layers", len(layers))
    return found
