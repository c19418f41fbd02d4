"""Recurrent modules by the Triton kernels: all tokens of a flat batch at once, with the states in their pages.

A trial finds the form of a module (``recurrence_trial.py``). PyTorch computes modules that fit no form.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from pagewise_kernels.recurrent import (
    BlockStates,
    ChunkPlan,
    Recurrence,
    ShortConvolution,
    advance,
    convolve_short,
    recur,
)
from torch import nn

from pagewise_executor.models.plain_recurrence import PlainRecurrence
from pagewise_executor.models.recurrence_trial import Form, RecurrenceTrial
from pagewise_executor.models.recurrent import CONV, RECURRENT, RecurrentContext, RecurrentLayer, StateBatch

log = logging.getLogger(__name__)

_ALIGNED = 4
"""Bytes: of which the states of each layer have a multiple, so that the next ones begin with a whole value."""


class TritonRecurrence:
    """Replaces the forward pass of a recurrent module of a form that the kernels compute.

    ``context``: has the plan of the step, and the pages of blocks.

    Raises:
        ValueError: the kernels do not compute the shapes of this form.
    """

    def __init__(
        self, form: Form[PlainRecurrence], layer: RecurrentLayer, context: RecurrentContext, device: torch.device
    ) -> None:
        self._layer, self._context, self._form = layer, context, form
        self._kernels = kernels_of(form.step, device)
        self._states: list[BlockStates] = []
        self._drafted: torch.Tensor | None = None

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
        projected = self._form.projections(hidden_states[0])
        drafted = projected[self._context.drafted]
        self._drafted = drafted.clone() if len(drafted) else None
        outputs: torch.Tensor = self._form.out(self._compute(projected, plan))[None]
        return outputs

    def settle(self, batches: Sequence[StateBatch]) -> None:
        """Update the states of sequences that have verified drafts by the tokens that they keep, of which the context
        has the plan."""
        plan = self._context.plan
        assert plan is not None
        assert self._drafted is not None
        # Tokens that no sequence keeps are in no chunk of the plan, so they have no results to gate.
        self._compute(self._drafted, plan, advance)
        self._drafted = None

    def _compute(
        self, projected: torch.Tensor, plan: ChunkPlan, compute: Callable[..., torch.Tensor] = recur
    ) -> torch.Tensor:
        if isinstance(self._kernels, ShortConvolution):
            return convolve_short(self._kernels, projected, plan, self._states[0])
        return compute(self._kernels, projected, plan, self._states[0], self._states[1])


def kernels_of(plain: PlainRecurrence, device: torch.device) -> Recurrence | ShortConvolution:
    """Return the arguments of the kernels for a form.

    Raises:
        ValueError: they do not compute its shapes.
    """
    moved: dict[str, Any] = {
        field.name: one.detach().to(device)
        for field in fields(plain.weights)
        if isinstance(one := getattr(plain.weights, field.name), torch.Tensor)
    }
    weights, places = replace(plain.weights, **moved), plain.places
    if plain.state is None:
        assert places.times is not None
        inputs = places.conv, places.times, places.gate
        return ShortConvolution(weights.conv, weights.conv_bias, *inputs, plain.kept)
    return Recurrence(weights, places, plain.state, plain.kept)  # type: ignore[arg-type]


def find_form(module: nn.Module, layer: RecurrentLayer, hidden_size: int) -> Form[PlainRecurrence] | None:
    """Return the form of a recurrent module; None: it has none that the kernels compute."""
    form = RecurrenceTrial(module, layer.states, hidden_size, PlainRecurrence).find()
    return form if form is not None and form.chunks else None


def find_kernels(
    model: nn.Module, layers: Sequence[RecurrentLayer], context: RecurrentContext, device: torch.device
) -> Mapping[str, TritonRecurrence]:
    """Return the replacements of recurrent modules by the kernels, by the modules' names. PyTorch computes the
    others."""
    found = {}
    for layer in layers:
        if any(one.num_bytes % _ALIGNED for one in layers):
            break
        config: Any = model.config
        form = find_form(model.get_submodule(layer.name), layer, config.get_text_config().hidden_size)
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
