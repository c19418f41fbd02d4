"""Single tokens of recurrent modules by the CPU operations: of gated delta nets and Mamba-2 of any family.

A module is found by what it does. Its projections are the parts that get its input; when numbers take the place of what
they give, its conv state and the gate of its norm tell which outputs these come from. What is left has few possible
orders. They are tried, as the forms of the norm are, until the operation gives the outputs and states of the module for
tokens that show how it computes. What fits no form is computed by PyTorch.
"""

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import nn

from pagewise_executor.models.recurrent import (
    CONV,
    RECURRENT,
    RecurrentLayer,
    SingleTokens,
    StateCache,
    StateKey,
    cache_name,
)

if TYPE_CHECKING:
    from pagewise_kernels.cpu.recurrent import Places, RecurrentStep, Weights

log = logging.getLogger(__name__)

DIMENSIONS: dict[StateKey, int] = {(CONV, 0): 2, (RECURRENT, 0): 3}
"""The states of a module that the operations may compute, with the dimensions of each."""
_HIDDEN = torch.tensor([0.3, 1.0, 1.0, 3.0])
"""Sizes of the hidden states of a comparison, each of another sequence."""
_MOST = 1e-4
"""By so much of the largest value, results may be apart."""


class CpuRecurrence:
    """Computes single tokens of sequences that have states."""

    def __init__(self, projections: Sequence[nn.Module], step: "RecurrentStep", out: nn.Module) -> None:
        self._projections, self._step, self._out = projections, step, out

    def __call__(
        self, hidden: torch.Tensor, memory: torch.Tensor, read: torch.Tensor, written: torch.Tensor,
        starts: Mapping[StateKey, int],
    ) -> torch.Tensor:  # fmt: skip
        """Return the outputs [sequences, size] for hidden states [sequences, size].

        The states are read from the blocks of pages ``read`` [sequences, pages per block] of ``memory``, and written to
        ``written``. ``starts``: the first byte of each state in a block.
        """
        from pagewise_kernels.cpu.recurrent import Blocks

        parts = [projection(hidden) for projection in self._projections]
        projected = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        blocks = Blocks(memory, read, written, starts[CONV, 0], starts[RECURRENT, 0])
        result: torch.Tensor = self._out(self._step.outputs(projected, blocks))
        return result


@torch.no_grad()
def find_recurrences(model: nn.Module, layers: Sequence[RecurrentLayer]) -> dict[str, CpuRecurrence]:
    """Return what computes single tokens as recurrent modules of a model do, by their names."""
    found: dict[str, CpuRecurrence] = {}
    for layer in layers:
        config: Any = model.config
        shapes = {state.key: state.shape for state in layer.states}
        dimensions = {key: len(shape) for key, shape in shapes.items()}
        if dimensions == DIMENSIONS and all(state.dtype == torch.float32 for state in layer.states):
            trial = FormTrial(model.get_submodule(layer.name), shapes, config.get_text_config().hidden_size)
            if (one := trial.find(partial(_made, shapes))) is not None:
                found[layer.name] = one
    if layers:
        log.info("%d of %d recurrent layers compute single tokens by CPU operations", len(found), len(layers))
    return found


def _made(
    shapes: Mapping[StateKey, tuple[int, ...]], projections: Sequence[nn.Module], weights: "Weights", places: "Places",
    out: nn.Module,
) -> CpuRecurrence:  # fmt: skip
    from pagewise_kernels.cpu.recurrent import RecurrentStep

    step = RecurrentStep(weights, places, shapes[RECURRENT, 0], shapes[CONV, 0][-1])  # type: ignore[arg-type]
    return CpuRecurrence(projections, step, out)


class _Call(NamedTuple):
    """A part of a module that was called, with what it got and gave."""

    part: nn.Module
    given: tuple[Any, ...]
    result: Any


SingleT = TypeVar("SingleT", bound=SingleTokens)


class FormTrial:
    """A recurrent module, and what it computes of one token of each of some sequences."""

    def __init__(self, module: nn.Module, shapes: dict[StateKey, tuple[int, ...]], size: int) -> None:
        self._module, self._shapes = module, shapes
        self._heads = shapes[RECURRENT, 0][0]
        self._hidden = some(len(_HIDDEN), size) * _HIDDEN[:, None]
        self._before = {key: some(len(_HIDDEN), *shape) / 2 for key, shape in shapes.items()}

    def find(self, make: Callable[[Sequence[nn.Module], "Weights", "Places", nn.Module], SingleT]) -> SingleT | None:
        """Return what ``make`` makes of the form of the module; None: it has no form that computes the same.

        ``make`` gets the projections, the form, and the last part. It raises ValueError or TypeError for forms that it
        does not compute.
        """
        convolutions = [part for part in self._module.children() if isinstance(part, nn.Conv1d)]
        parameters = [getattr(self._module, name, None) for name in ("A_log", "dt_bias")]
        if len(convolutions) != 1 or any(not isinstance(one, nn.Parameter) for one in parameters):
            return None
        after = {key: state.clone() for key, state in self._before.items()}
        expected, calls = self._run(self._hidden, after)
        projections = [part for part, given, _ in calls if given and _same(given[0], self._hidden[:, None])]
        if not isinstance(expected, torch.Tensor) or not projections or not _same(calls[-1].result, expected):
            return None
        norm = next((call.part for call in calls if _is_norm(call)), None)
        outs = [call.result.shape[-1] for call in calls if call.part in projections]
        sources = self._sources(projections, outs, norm)
        if not torch.equal(torch.cat(sources).sort().values, torch.arange(sum(outs))):
            return None  # something is computed of the projections first
        for weights, places in self._forms(convolutions[0], norm, sources):
            try:
                found = make(projections, weights, places, calls[-1].part)
            except (ValueError, TypeError):  # another form may fit
                continue
            if self._computes(found, expected[:, 0], after):
                return found
        return None

    def _run(
        self, hidden: torch.Tensor, states: dict[StateKey, torch.Tensor],
        instead: Mapping[nn.Module, torch.Tensor] | None = None,
    ) -> tuple[Any, list[_Call]]:  # fmt: skip
        """Let the module compute a token of each sequence, and update ``states``; return its outputs and its calls.

        ``instead``: what takes the place of the results of parts.
        """
        calls: list[_Call] = []

        def note(part: nn.Module, given: tuple[Any, ...], result: Any) -> Any:
            calls.append(_Call(part, given, result))
            return (instead or {}).get(part)

        with ExitStack() as stack:
            for part in self._module.children():
                handle = part.register_forward_hook(note)
                stack.callback(handle.remove)
            cache = StateCache(states, begun=True)
            found = self._module.forward(hidden[:, None], **{cache_name(self._module): cache})
        return found, calls

    def _sources(
        self, projections: list[nn.Module], outs: list[int], norm: nn.Module | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return which outputs of the projections are inputs of the convolution, of the gate, and neither."""
        numbers = torch.arange(sum(outs), dtype=torch.float32)[None, None]
        states = {key: torch.zeros(1, *shape) for key, shape in self._shapes.items()}
        instead = dict(zip(projections, torch.split(numbers, outs, dim=2), strict=True))
        _, calls = self._run(self._hidden[:1], states, instead)
        conv = states[CONV, 0][0, :, -1].round()
        gates = [call.given[1].flatten().round() for call in calls if call.part is norm]
        gate = gates[0] if gates else torch.empty(0)
        rest = torch.tensor([i for i in numbers.flatten().tolist() if i not in {*conv.tolist(), *gate.tolist()}])
        if not gates:
            inner = math.prod(self._shapes[RECURRENT, 0][:2])
            gate, rest = rest[:inner], rest[inner:]
        return conv.long(), gate.long(), rest.long()

    def _forms(
        self, convolution: nn.Conv1d, norm: nn.Module | None, sources: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> Iterator[tuple["Weights", "Places"]]:
        """Yield the forms that the module may have, given where the inputs of its parts come from."""
        from pagewise_kernels.cpu.recurrent import Places, Weights

        module: Any = self._module
        conv, gate, rest = sources
        skip, weight = getattr(module, "D", None), getattr(norm, "weight", None)
        inner, heads, sizes = gate.numel(), self._heads, [1]
        groups = max(1, (conv.numel() - inner) // (2 * self._shapes[RECURRENT, 0][1 if skip is None else 2]))
        if weight is not None:
            sizes = [weight.numel()] if weight.numel() < inner else [inner, inner // groups]
            weight = weight.detach().repeat(max(1, inner // weight.numel()))
        eps = next((getattr(norm, name) for name in ("variance_epsilon", "eps") if hasattr(norm, name)), 1e-6)
        orders: list[tuple[torch.Tensor, torch.Tensor | None]] = [(rest, None)]
        if skip is None and rest.numel() == 2 * heads and heads % groups == 0:
            orders = list(_halves(rest, heads, heads // groups))
        for (decay, beta), norm_size, first, scale in itertools.product(
            orders, sizes, (False, True), (1.0, 2.0) if skip is None else (1.0,)
        ):
            yield (
                Weights(
                    conv=convolution.weight.detach().squeeze(1), conv_bias=convolution.bias, a_log=module.A_log,
                    dt_bias=module.dt_bias, skip=skip, norm=weight, norm_size=norm_size, eps=eps, gate_first=first,
                    beta_scale=scale,
                ),
                Places(conv=conv, gate=gate, decay=decay, beta=beta),
            )  # fmt: skip

    def _computes(
        self, recurrence: SingleTokens, expected: torch.Tensor, after: Mapping[StateKey, torch.Tensor]
    ) -> bool:
        """Return whether an operation computes the outputs and states of the module."""
        count, starts, start = len(_HIDDEN), {}, 0
        for key, state in self._before.items():
            starts[key], start = start, start + 4 * state[0].numel()
        memory = torch.cat([state.flatten(1) for state in self._before.values()], dim=1).view(torch.uint8)
        pages = torch.arange(count, dtype=torch.int32)[:, None]
        outputs = recurrence(self._hidden, memory, pages, pages, starts)
        states = torch.split(memory.view(torch.float32), [state[0].numel() for state in after.values()], dim=1)
        return near(outputs, expected) and all(
            near(found, state.flatten(1)) for found, state in zip(states, after.values(), strict=True)
        )


def _halves(rest: torch.Tensor, *sizes: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the orders of inputs of decays and of betas, of which as many as one of ``sizes`` follow each other."""
    for size in dict.fromkeys(sizes):
        first, second = rest.view(-1, 2, size).unbind(1)
        yield second.flatten(), first.flatten()
        yield first.flatten(), second.flatten()


def _is_norm(call: _Call) -> bool:
    """Return whether a part gets values and a gate."""
    tensors = len(call.given) == 2 and all(isinstance(one, torch.Tensor) for one in call.given)
    return tensors and isinstance(getattr(call.part, "weight", None), nn.Parameter)


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether results [sequences, size] are the same but for rounding."""
    errors = (found - expected).abs().amax(dim=1)
    return bool((errors <= _MOST * expected.abs().amax(dim=1)).all())


def _same(found: object, expected: torch.Tensor) -> bool:
    return isinstance(found, torch.Tensor) and torch.equal(found, expected)


def some(*shape: int) -> torch.Tensor:
    """Return values of about one that are the same each time."""
    return torch.cos(torch.arange(math.prod(shape), dtype=torch.float64).square()).float().view(shape) * math.sqrt(2)
