"""The forms of recurrent modules, found on copies in float32 on the CPU, and what they compute, by PyTorch.

A copy has small projections in place of the module's own, which may be quantised or a part of several. So its form is
found in milliseconds, whatever computes the projections: ``cpu_recurrence`` explains how. A form is taken if it gives
the outputs and states of the copy for one token and for several, of sequences that begin or go on.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from pagewise_kernels.cpu.recurrent import Places, Weights
from torch import nn

from pagewise_executor.models.cpu_recurrence import DIMENSIONS, FormTrial, near, some
from pagewise_executor.models.recurrent import CONV, RECURRENT, RecurrentLayer, StateCache, StateKey, cache_name

_SIZE = 16
"""Of the hidden states of a copy."""
_TOKENS = 5
"""Of the sequences that a copy computes."""
_NO_LIMITS = (0.0, float("inf"))

States = Mapping[StateKey, torch.Tensor]
"""The states of some sequences, [sequences, *shape], which are updated in place."""


class PlainRecurrence:
    """Computes a gated delta net or Mamba-2 between its projections, token by token in float32.

    ``state``: the shape of the recurrent state. ``limits``: of dt, in prompts.
    """

    def __init__(
        self, state: tuple[int, ...], limits: tuple[float, float], projections: Sequence[nn.Module], weights: Weights,
        places: Places, out: nn.Module,
    ) -> None:  # fmt: skip
        delta = weights.skip is None
        self.weights, self.places, self.state, self.limits = weights, places, state, limits
        self._projections, self._out = projections, out
        self._heads, self._key, self._value = state if delta else (state[0], state[2], state[1])
        self._groups, rest = divmod(len(weights.conv) - self._heads * self._value, 2 * self._key)
        if rest or self._groups < 1 or self._heads % self._groups or delta != (places.beta is not None):
            raise ValueError(f"{weights} and {places} do not fit a state {state}")

    def __call__(
        self, hidden: torch.Tensor, memory: torch.Tensor, read: torch.Tensor, written: torch.Tensor,
        starts: Mapping[StateKey, int],
    ) -> torch.Tensor:  # fmt: skip
        """Return outputs as ``SingleTokens`` do; each block is one page, which is read and written."""
        values = memory.view(torch.float32)
        conv = values[:, : starts[RECURRENT, 0] // 4].view(len(values), len(self.weights.conv), -1)
        recurrent = values[:, starts[RECURRENT, 0] // 4 :].view(len(values), *self.state)
        projected = torch.cat([part(hidden) for part in self._projections], dim=1)
        states = {(CONV, 0): conv, (RECURRENT, 0): recurrent}
        result: torch.Tensor = self._out(self.compute(projected[:, None], states, begun=True)[:, 0])
        return result

    def compute(self, projected: torch.Tensor, states: States, *, begun: bool) -> torch.Tensor:
        """Return outputs [sequences, tokens, heads · value] for ``projected`` [sequences, tokens, size].

        ``begun``: the states are those behind earlier tokens; else they have no meaning yet.
        """
        weights, places = self.weights, self.places
        count, tokens, _ = projected.shape
        rows = projected.float()
        mixed = F.silu(convolved(rows[..., places.conv], weights.conv, weights.conv_bias, states[CONV, 0], begun=begun))
        held = states[RECURRENT, 0]
        state = held.float().clone() if begun else torch.zeros_like(held, dtype=torch.float32)
        results = rows.new_empty(count, tokens, self._heads, self._value)
        for token in range(tokens):
            dt = F.softplus(rows[:, token, places.decay] + weights.dt_bias)
            dt = dt if begun and tokens == 1 else dt.clamp(*self.limits)
            decay = torch.exp(-weights.a_log.exp() * dt)[..., None, None]
            if weights.skip is None:
                state, results[:, token] = self._delta(rows[:, token], mixed[:, token], state * decay)
            else:
                x, k, q = self._parts(mixed[:, token], value_first=True)
                state = decay * state + (dt[..., None] * x)[..., None] * k[:, :, None]
                results[:, token] = (state * q[:, :, None]).sum(3) + weights.skip[:, None] * x
        held.copy_(state)
        return self._gated(results.flatten(2), F.silu(rows[..., places.gate]))

    def _delta(self, row: torch.Tensor, mixed: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.places.beta is not None
        q, k, v = self._parts(mixed, value_first=False)
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        beta = self.weights.beta_scale * row[:, self.places.beta].sigmoid()
        delta = beta[..., None] * (v - (state * k[..., None]).sum(2))
        state = state + k[..., None] * delta[:, :, None]
        return state, (state * q[..., None]).sum(2) / self._key**0.5

    def _parts(self, mixed: torch.Tensor, *, value_first: bool) -> list[torch.Tensor]:
        """Split convolved channels [sequences, channels] into keys, queries and values [sequences, heads, size]."""
        keys, values = self._groups * self._key, self._heads * self._value
        found: list[torch.Tensor] = []
        for part in torch.split(mixed, [values, keys, keys] if value_first else [keys, keys, values], dim=1):
            is_value = len(found) == (0 if value_first else 2)
            shaped = part.reshape(len(part), -1, self._value if is_value else self._key)
            found.append(shaped if is_value else shaped.repeat_interleave(self._heads // self._groups, 1))
        return found

    def _gated(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        weights = self.weights
        if weights.gate_first or weights.norm is None:
            x = x * gate
        if weights.norm is not None:
            parts = x.reshape(*x.shape[:2], -1, weights.norm_size)
            parts = parts * (parts.square().mean(-1, keepdim=True) + weights.eps).rsqrt()
            x = parts.flatten(2) * weights.norm
            x = x if weights.gate_first else x * gate
        return x


class PlainShort:
    """Computes a short convolution between its projections. The parameters are those of ``ShortConvolution``."""

    def __init__(
        self, conv: torch.Tensor, conv_bias: torch.Tensor | None, conv_from: torch.Tensor, factor_from: torch.Tensor,
        gate_from: torch.Tensor,
    ) -> None:  # fmt: skip
        self.conv, self.conv_bias = conv, conv_bias
        self.conv_from, self.factor_from, self.gate_from = conv_from, factor_from, gate_from

    def compute(self, projected: torch.Tensor, states: States, *, begun: bool) -> torch.Tensor:
        """Return results [sequences, tokens, channels]: see ``PlainRecurrence``."""
        rows = projected.float()
        inputs = rows[..., self.conv_from] * rows[..., self.factor_from]
        return convolved(inputs, self.conv, self.conv_bias, states[CONV, 0], begun=begun) * rows[..., self.gate_from]


def convolved(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, held: torch.Tensor, *, begun: bool
) -> torch.Tensor:
    """Return the convolutions of channels [sequences, tokens, channels], and keep their last inputs in ``held``
    [sequences, channels, kept]."""
    known = held.float() if begun else torch.zeros_like(held, dtype=torch.float32)
    all_inputs = torch.cat([known, inputs.transpose(1, 2)], dim=2)
    held.copy_(all_inputs[..., -held.shape[2] :])
    needed = all_inputs[..., -(inputs.shape[1] + weight.shape[1] - 1) :]
    return F.conv1d(needed, weight[:, None], bias, groups=len(weight)).transpose(1, 2)


class Form(NamedTuple):
    """The form of a recurrent module: its own ``projections``, in the order of the plain form's rows, and ``out``,
    which comes last."""

    plain: PlainRecurrence | PlainShort
    projections: Sequence[nn.Module]
    out: nn.Module


@torch.no_grad()
def find_form(module: nn.Module, layer: RecurrentLayer, hidden_size: int, dtype: torch.dtype) -> Form | None:
    """Return the form of a module; None: it has none of those that are known."""
    shapes = {state.key: state.shape for state in layer.states}
    dimensions = {key: len(shape) for key, shape in shapes.items()}
    if dimensions not in (DIMENSIONS, {(CONV, 0): 2}):
        return None
    device = next(module.parameters()).device
    states = {one.key: torch.zeros(2, *one.shape, dtype=one.dtype, device=device) for one in layer.states}
    hidden = some(2, 1, hidden_size).to(device, dtype)
    calls: list[tuple[nn.Module, Any, Any]] = []
    hooks = [
        part.register_forward_hook(lambda part, given, result: calls.append((part, given, result)))
        for part in module.children()
    ]
    found = module.forward(hidden, **{cache_name(module): StateCache(states, begun=True)})
    for hook in hooks:
        hook.remove()
    projections = {part: result.shape[-1] for part, given, result in calls if given and _same(given[0], hidden)}
    if not projections or not _same(calls[-1][2], found):
        return None
    out = calls[-1][0]
    instead: dict[int, nn.Module] = {id(out): nn.Identity()}
    for number, (part, outs) in enumerate(projections.items()):
        instead[id(part)] = linear = nn.Linear(_SIZE, outs, bias=False)
        linear.weight = nn.Parameter(some(outs + number, _SIZE)[number:] / 2)
    small = copy.deepcopy(module, instead).float().cpu()
    limits = getattr(module, "time_step_limit", _NO_LIMITS)
    if dimensions == DIMENSIONS:
        made = partial(PlainRecurrence, shapes[RECURRENT, 0], tuple(limits))
        plain: PlainRecurrence | PlainShort | None = FormTrial(small, shapes, _SIZE).find(made)
        candidates: Sequence[PlainRecurrence | PlainShort] = [] if plain is None else [plain]
    else:
        candidates = _short_forms(small, shapes[CONV, 0][0], sum(projections.values()))
    parts = [instead[id(part)] for part in projections]
    for plain in candidates:
        if all(
            _computes(plain, small, parts, shapes, count, begun) for count in (1, _TOKENS) for begun in (True, False)
        ):
            return Form(plain, list(projections), out)
    return None


def _short_forms(module: nn.Module, channels: int, size: int) -> list[PlainShort]:
    """Return the forms that a short convolution may have: which third of its projections is the gate."""
    convolutions = [part for part in module.children() if isinstance(part, nn.Conv1d)]
    if len(convolutions) != 1 or size != 3 * channels:
        return []
    weight, bias = convolutions[0].weight.detach().squeeze(1), convolutions[0].bias
    thirds = torch.arange(size).view(3, channels)
    return [PlainShort(weight, bias, *thirds[list(order)]) for order in ((0, 2, 1), (1, 2, 0), (0, 1, 2))]


def _computes(
    plain: PlainRecurrence | PlainShort, module: nn.Module, projections: Sequence[nn.Module],
    shapes: Mapping[StateKey, tuple[int, ...]], count: int, begun: bool,
) -> bool:  # fmt: skip
    """Return whether a form gives the outputs and states of a copy for two sequences with ``count`` tokens."""
    hidden = some(2, count, _SIZE) * 2
    expected = {key: some(2, *shape) / 2 for key, shape in shapes.items()}
    states = {key: state.clone() for key, state in expected.items()}
    wanted = module.forward(hidden, **{cache_name(module): StateCache(expected, begun=begun)})
    projected = torch.cat([part(hidden) for part in projections], dim=2)
    found = plain.compute(projected, states, begun=begun)
    return near(found.flatten(1), wanted.flatten(1)) and all(
        near(states[key].flatten(1), expected[key].flatten(1)) for key in shapes
    )


def on_device(plain: PlainRecurrence, device: torch.device) -> tuple[Weights, Places]:
    """Return the weights of a form and where its inputs are, on a device."""

    def moved(one: Any) -> Any:
        names = {name: getattr(one, name) for name in type(one).__dataclass_fields__}
        return replace(one, **{name: x.detach().to(device) for name, x in names.items() if isinstance(x, torch.Tensor)})

    return moved(plain.weights), moved(plain.places)


def _same(found: object, expected: object) -> bool:
    if not isinstance(found, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return False
    return found.shape == expected.shape and torch.equal(found, expected)
