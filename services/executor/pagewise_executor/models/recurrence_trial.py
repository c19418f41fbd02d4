"""Which form of an operation computes the part of a recurrent module between its projections.

The linear layers that get the module's input are projections, and so are the layers that get the outputs of these.
If numbers replace their outputs, the conv state and the gate of the norm show which outputs are the inputs of the
convolution and of the gate. The remaining outputs have few possible orders. The trial computes sample tokens with each
order and each form of the norm, until the operation returns the outputs and states of the module. Operations are the
CPU operations, or the plain form by which the Triton kernels are checked.

The trial is in float32 on the CPU, also of models of other types and devices: a copy of the module computes between
the projections, which stay where they are.
"""

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from pagewise_executor.models.recurrent import CONV, RECURRENT, State, StateCache, StateKey, cache_name
from pagewise_executor.models.recurrent_shards import GatedNormOverRanks

if TYPE_CHECKING:
    from pagewise_kernels.cpu.recurrent import Gate, Places, Weights

_SIZES = torch.tensor([0.3, 1.0, 1.0, 3.0])
"""Sizes of the hidden states of a comparison, each of another sequence."""
_CHUNKS = (3, True), (5, False)
"""The chunks of comparisons: tokens of each sequence, and whether it has states."""
_MOST = 1e-4
"""The greatest difference between results, relative to the largest value."""


class Projections:
    """From hidden states [tokens, size] to rows of projections [tokens, outputs].

    ``chains``: of modules, each of which gets the output of the module before it. Hidden states are multiplied by
    ``scale`` before, and the outputs of all chains by ``vector`` [outputs] behind.
    """

    def __init__(self, chains: Sequence[Sequence[nn.Module]], scale: float, vector: torch.Tensor | None) -> None:
        self._chains, self._scale, self._vector = chains, scale, vector

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the rows."""
        if self._scale != 1:
            hidden = hidden * self._scale
        parts = []
        for chain in self._chains:
            part = hidden
            for module in chain:
                part = module(part)
            parts.append(part)
        projected = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return projected if self._vector is None else projected * self._vector


class Step(Protocol):
    """Computes a module between its projections."""

    def compute(self, projected: torch.Tensor, states: Mapping[StateKey, torch.Tensor], *, begun: bool) -> torch.Tensor:
        """Return outputs [sequences, tokens, inner] for ``projected`` [sequences, tokens, size], all in float32.

        The states [sequences, *shape] are updated in place. ``begun``: they are states of earlier tokens; else the
        sequences begin, and the states have no meaning yet.
        """
        ...


StepT = TypeVar("StepT", bound=Step)
Make = Callable[["Weights", "Places", tuple[int, ...] | None, int], StepT]
"""Returns an operation for a form, the shape of the recurrent state, and the inputs of each channel in the conv state.
It raises ValueError or TypeError for forms that it does not compute."""


class Form(NamedTuple, Generic[StepT]):
    """An operation that computes a module. ``chunks``: also several tokens of a sequence, and the first ones."""

    projections: Projections
    step: StepT
    out: nn.Module
    chunks: bool


class _InFloat32(nn.Module):
    """A part of a module on ``device``, whose inputs and outputs are in float32 on the CPU here."""

    def __init__(self, part: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.whole, self._dtype, self._device = (part,), dtype, device  # in a tuple it is no submodule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the part's outputs, for a flat batch as in a step."""
        result: torch.Tensor = self.whole[0](x.flatten(0, -2).to(self._device, self._dtype))
        return result.float().cpu().view(*x.shape[:-1], -1)


class _Call(NamedTuple):
    """A call of a part of a module, with its inputs and its result."""

    part: nn.Module
    given: tuple[Any, ...]
    result: Any


class _Case(NamedTuple):
    """The computation of a module for the tokens ``hidden`` [sequences, tokens, size]. ``begun``: the sequences have
    states; ``after``: the states behind these tokens; ``last``: the call that returns the module's result, or None."""

    hidden: torch.Tensor
    begun: bool
    after: dict[StateKey, torch.Tensor]
    calls: list[_Call]
    last: _Call | None


class RecurrenceTrial(Generic[StepT]):
    """Runs a recurrent module on tokens of some sequences, and finds the form that computes the same. ``size``: of
    hidden states."""

    def __init__(self, module: nn.Module, states: Sequence[State], size: int, make: "Make[StepT]") -> None:
        self._states, self._size, self._make = states, size, make
        self._shapes = {state.key: state.shape for state in states}
        self._original = module

    @torch.no_grad()
    def find(self) -> Form[StepT] | None:
        """Return the form that computes the same; None if no form does."""
        types = {state.key[0]: state.dtype for state in self._states}
        dimensions = {state.key: len(state.shape) for state in self._states}
        if dimensions not in ({(CONV, 0): 2}, {(CONV, 0): 2, (RECURRENT, 0): 3}):
            return None
        if types.get(RECURRENT, torch.float32) != torch.float32:
            return None
        if any(isinstance(part, GatedNormOverRanks) for part in self._original.modules()):
            return None  # no operation sums over ranks
        parts = [part for part in self._original.modules() if _is_linear(part)]
        self._dtype, self._device = types[CONV], next(self._original.parameters()).device
        memo = {id(part): _InFloat32(part, self._dtype, self._device) for part in parts}
        self._module = copy.deepcopy(self._original, memo).float().cpu()
        self._convolutions = [part for part in self._module.modules() if isinstance(part, nn.Conv1d)]
        return self._find() if len(self._convolutions) == 1 else None

    def _find(self) -> Form[StepT] | None:
        case = self._case(1, begun=True)
        chains, scale = _chains(case.calls, case.hidden)
        if not chains or case.last is None or not isinstance(out := case.last.part, _InFloat32):
            return None
        norm = next((call.part for call in case.calls if _is_norm(call)), None)
        results = [next(call.result for call in case.calls if call.part is chain[-1]) for chain in chains]
        outs, total = [one.shape[-1] for one in results], sum(one.shape[-1] for one in results)
        vectors = [one.detach().flatten() for one in self._module.buffers() if one.numel() == total and one.all()]
        state, kept = self._shapes.get((RECURRENT, 0)), self._shapes[CONV, 0][-1]
        for vector in (None, *vectors):
            projections = Projections(chains, scale, vector)
            for weights, places in self._forms(norm, [chain[-1] for chain in chains], outs, vector):
                try:
                    step = self._make(weights, places, state, kept)
                except (ValueError, TypeError):  # another form may fit
                    continue
                if self._computes(projections, step, case):
                    chunks = all(
                        self._computes(projections, step, self._case(tokens, begun=begun)) for tokens, begun in _CHUNKS
                    )
                    own = [[part.whole[0] for part in chain if isinstance(part, _InFloat32)] for chain in chains]
                    real = Projections(own, scale, None if vector is None else vector.to(self._device, self._dtype))
                    return Form(real, step, out.whole[0], chunks)
        return None

    def _case(self, tokens: int, *, begun: bool) -> _Case:
        """Let the module compute tokens of each sequence."""
        hidden = (_some(len(_SIZES), tokens, self._size) * _SIZES[:, None, None]).bfloat16().float()
        after = self._before(begun=begun)
        result, calls = self._run(hidden, after, begun=begun)
        return _Case(hidden, begun, after, calls, calls[-1] if calls and _same(calls[-1].result, result) else None)

    def _before(self, *, begun: bool) -> dict[StateKey, torch.Tensor]:
        return {
            key: (_some(len(_SIZES), *shape) / 2 if begun else torch.zeros(len(_SIZES), *shape))
            for key, shape in self._shapes.items()
        }

    def _run(
        self, hidden: torch.Tensor, states: dict[StateKey, torch.Tensor],
        instead: Mapping[nn.Module, torch.Tensor] | None = None, *, begun: bool = True,
    ) -> tuple[Any, list[_Call]]:  # fmt: skip
        """Let the module compute tokens, and update ``states``; return its outputs and its calls.

        ``instead``: values that replace the results of parts.
        """
        calls: list[_Call] = []

        def note(part: nn.Module, given: tuple[Any, ...], result: Any) -> Any:
            calls.append(_Call(part, given, result))
            return (instead or {}).get(part)

        with ExitStack() as stack:
            for part in self._module.modules():
                if not list(part.children()):
                    handle = part.register_forward_hook(note)
                    stack.callback(handle.remove)
            cache = StateCache(states, begun=begun)
            found = self._module.forward(hidden, **{cache_name(self._module): cache})
        return found, calls

    def _sources(
        self, norm: nn.Module | None, ends: list[nn.Module], outs: list[int], vector: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return which outputs of the projections are inputs of the convolution, of the gate, and neither."""
        numbers = torch.arange(sum(outs), dtype=torch.float32)[None, None]
        states = {key: torch.zeros(1, *shape) for key, shape in self._shapes.items()}
        given = numbers if vector is None else numbers / vector
        instead = dict(zip(ends, torch.split(given, outs, dim=2), strict=True))
        _, calls = self._run(torch.zeros(1, 1, self._size), states, instead)
        conv = states[CONV, 0][0, :, -1].round()
        gates = [call.given[1].flatten().round() for call in calls if call.part is norm]
        gate = gates[0] if gates else torch.empty(0)
        rest = torch.tensor([i for i in numbers.flatten().tolist() if i not in {*conv.tolist(), *gate.tolist()}])
        if not gates:
            inner = math.prod(self._shapes[RECURRENT, 0][:2])
            gate, rest = rest[:inner], rest[inner:]
        return conv.long(), gate.long(), rest.long()

    def _forms(
        self, norm: nn.Module | None, ends: list[nn.Module], outs: list[int], vector: torch.Tensor | None
    ) -> Iterator[tuple["Weights", "Places"]]:
        """Yield the forms that the module may have."""
        from pagewise_kernels.cpu.recurrent import Places, Weights

        total, (convolution,) = sum(outs), self._convolutions
        base = Weights(conv=convolution.weight.detach().squeeze(1), conv_bias=convolution.bias)
        if (RECURRENT, 0) not in self._shapes:
            if total == 3 * len(convolution.weight):
                thirds = torch.arange(total).view(3, -1)
                for i in range(3):
                    gate, conv, times = thirds.roll(i, 0)
                    yield replace(base, conv_silu=False, gate="alone"), Places(conv=conv, times=times, gate=gate)
            return
        parameters = {name.rpartition(".")[2]: one.detach() for name, one in self._module.named_parameters()}
        if not {"A_log", "dt_bias"} <= set(parameters):
            return
        conv, gate, rest = self._sources(norm, ends, outs, vector)
        if not torch.equal(torch.cat([conv, gate, rest]).sort().values, torch.arange(total)):
            return  # the module computes with the projections first
        skip, weight = parameters.get("D"), getattr(norm, "weight", None)
        inner, heads, key = gate.numel(), *self._shapes[RECURRENT, 0][:: 1 if skip is None else 2][:2]
        sizes, groups = [1], max(1, (conv.numel() - inner) // (2 * key))
        if weight is not None:
            sizes = [weight.numel()] if weight.numel() < inner else [inner, inner // groups]
            weight = weight.detach().repeat(max(1, inner // weight.numel()))
        eps = next((getattr(norm, name) for name in ("variance_epsilon", "eps") if hasattr(norm, name)), 1e-6)
        limits = getattr(self._module, "time_step_limit", None) or (0.0, math.inf)
        orders: list[tuple[torch.Tensor, torch.Tensor | None]] = [(rest, None)]
        if skip is None and rest.numel() == 2 * heads and heads % groups == 0:
            orders = list(_halves(rest, heads, heads // groups))
        elif skip is None and rest.numel() == heads * key + heads:
            orders = [(rest[:-heads], rest[-heads:]), (rest[heads:], rest[:heads])]
        kinds: tuple[Gate, Gate] = ("silu", "sigmoid")
        for (decay, beta), norm_size, kind, first, scale in itertools.product(
            orders, sizes, kinds, (False, True), (1.0, 2.0) if skip is None else (1.0,)
        ):
            yield (
                replace(
                    base, a_log=parameters["A_log"].flatten(), dt_bias=parameters["dt_bias"].flatten(),
                    skip=skip, norm=weight, norm_size=norm_size, eps=eps, gate=kind, gate_first=first, beta_scale=scale,
                    dt_limits=tuple(limits),
                ),
                Places(conv=conv, gate=gate, decay=decay, beta=beta),
            )  # fmt: skip

    def _computes(self, projections: Projections, step: StepT, case: _Case) -> bool:
        """Return whether an operation computes the input of a module's last projection, and the states."""
        if case.last is None:
            return False
        states, (count, tokens, _) = self._before(begun=case.begun), case.hidden.shape
        projected = projections(case.hidden.flatten(0, 1)).view(count, tokens, -1)
        outputs = step.compute(projected, states, begun=case.begun)
        return _near(outputs.flatten(1), case.last.given[0].flatten(1)) and all(
            _near(found.flatten(1), case.after[key].flatten(1)) for key, found in states.items()
        )


def _chains(calls: Sequence[_Call], hidden: torch.Tensor) -> tuple[list[list[nn.Module]], float]:
    """Return the chains of projections, and the factor that the module multiplies hidden states by before them."""
    found: list[tuple[list[nn.Module], Any]] = []
    scale = 1.0
    for part, given, result in calls:
        if not isinstance(part, _InFloat32) or len(given) != 1:
            continue
        if (ratio := _ratio(given[0], hidden)) is not None:
            scale = ratio
            found.append(([part], result))
        else:
            for i, (chain, before) in enumerate(found):
                if _same(given[0], before):
                    found[i] = [*chain, part], result
    return [chain for chain, _ in found], scale


def _ratio(given: torch.Tensor, hidden: torch.Tensor) -> float | None:
    """Return the factor between hidden states and the input of a part; None if there is no common one."""
    if given.shape != hidden.shape:
        return None
    at = hidden.abs().argmax()
    ratio = float(given.flatten()[at].double() / hidden.flatten()[at].double())
    return ratio if torch.allclose(given, hidden * ratio, rtol=1e-6, atol=0) else None


def _halves(rest: torch.Tensor, *sizes: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the orders of inputs of decays and of betas, of which as many as one of ``sizes`` follow each other."""
    for size in dict.fromkeys(sizes):
        first, second = rest.view(-1, 2, size).unbind(1)
        yield second.flatten(), first.flatten()
        yield first.flatten(), second.flatten()


def _is_linear(part: nn.Module) -> bool:
    """Return whether a part may be a projection: it has no parts, and is neither a norm nor a convolution."""
    weight = getattr(part, "weight", None)
    return not list(part.children()) and not (
        isinstance(part, nn.Conv1d) or (isinstance(weight, torch.Tensor) and weight.dim() == 1)
    )


def _is_norm(call: _Call) -> bool:
    """Return whether a part gets values and a gate."""
    tensors = len(call.given) == 2 and all(isinstance(one, torch.Tensor) for one in call.given)
    return tensors and isinstance(getattr(call.part, "weight", None), nn.Parameter)


def _near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether results [sequences, size] are the same but for rounding."""
    errors = (found - expected).abs().amax(dim=1)
    return bool((errors <= _MOST * expected.abs().amax(dim=1)).all())


def _same(found: object, expected: torch.Tensor) -> bool:
    return isinstance(found, torch.Tensor) and torch.equal(found, expected)


def _some(*shape: int) -> torch.Tensor:
    """Return values of about one that are the same each time."""
    return torch.cos(torch.arange(math.prod(shape), dtype=torch.float64).square()).float().view(shape) * math.sqrt(2)
