"""Recurrent modules by the CPU operations: gated delta nets, KDA, Mamba-2 and short convolutions of any family.

A trial finds the form of a module (``recurrence_trial.py``). PyTorch computes modules that fit no form.
"""

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pagewise_executor.models.recurrence_trial import Projections, RecurrenceTrial
from pagewise_executor.models.recurrent import CONV, RECURRENT, RecurrentLayer, StateBatch, StateKey

if TYPE_CHECKING:
    from pagewise_kernels.cpu.recurrent import Places, RecurrentStep, Weights


log = logging.getLogger(__name__)

_TYPES = (torch.float32, torch.bfloat16)
"""In which the operations compute conv states."""


class CpuRecurrence:
    """Computes tokens of sequences. ``chunks``: also several tokens of a sequence, and the first tokens of one."""

    def __init__(self, projections: Projections, step: "RecurrentStep", out: nn.Module, *, chunks: bool) -> None:
        self._projections, self._step, self._out, self.chunks = projections, step, out, chunks

    def takes(self, batch: StateBatch) -> bool:
        """Return whether it computes such tokens."""
        return self.chunks or (batch.read is not None and batch.tokens.shape[1] == 1)

    def __call__(
        self, hidden: torch.Tensor, batches: Sequence[StateBatch], memory: torch.Tensor, starts: Mapping[StateKey, int]
    ) -> torch.Tensor:
        """Return the outputs [tokens, size] for hidden states [tokens, size], of which ``batches`` have the indices.

        The states are read from the blocks of pages of ``memory``, and written to others or the same. ``starts``: the
        first byte of each state in a block.
        """
        from pagewise_kernels.cpu.recurrent import Blocks

        projected = self._projections(hidden)
        outputs = self._step.empty_outputs(projected)
        state_start = starts.get((RECURRENT, 0), 0)
        for batch in batches:
            blocks = Blocks(memory, batch.read, batch.written, starts[CONV, 0], state_start)
            self._step.compute(projected, batch.tokens, blocks, outputs)
        result: torch.Tensor = self._out(outputs)
        return result


class _TriedStep:
    """A step that a trial computes with states in tensors: each sequence has one page. See ``Make``."""

    def __init__(self, weights: "Weights", places: "Places", state: tuple[int, ...] | None, kept: int) -> None:
        from pagewise_kernels.cpu.recurrent import RecurrentStep

        self.step = RecurrentStep(weights, places, state, kept)  # type: ignore[arg-type]

    def compute(self, projected: torch.Tensor, states: Mapping[StateKey, torch.Tensor], *, begun: bool) -> torch.Tensor:
        """Return the outputs, and update the states: see ``Step``."""
        from pagewise_kernels.cpu.recurrent import Blocks

        count, tokens, _ = projected.shape
        sizes = [state[0].numel() for state in states.values()]
        starts = dict(zip(states, itertools.accumulate([4 * size for size in sizes], initial=0), strict=False))
        memory = torch.cat([state.flatten(1) for state in states.values()], dim=1)
        pages = torch.arange(count, dtype=torch.int32)[:, None]
        start = starts.get((RECURRENT, 0), 0)
        blocks = Blocks(memory.view(torch.uint8), pages if begun else None, pages, starts[CONV, 0], start)
        flat, rows = projected.flatten(0, 1), torch.arange(count * tokens).view(count, tokens)
        outputs = self.step.compute(flat, rows, blocks, self.step.empty_outputs(flat)).view(count, tokens, -1)
        for state, part in zip(states.values(), torch.split(memory, sizes, dim=1), strict=True):
            state.copy_(part.view(state.shape))
        return outputs


def find_recurrences(model: nn.Module, layers: Sequence[RecurrentLayer]) -> dict[str, CpuRecurrence]:
    """Return the replacements of a model's recurrent modules, by the names of the modules."""
    found = {}
    for layer in layers:
        config: Any = model.config
        if any(state.key[0] == CONV and state.dtype not in _TYPES for state in layer.states):
            continue
        module, size = model.get_submodule(layer.name), config.get_text_config().hidden_size
        if (form := RecurrenceTrial(module, layer.states, size, _TriedStep).find()) is not None:
            found[layer.name] = CpuRecurrence(form.projections, form.step.step, form.out, chunks=form.chunks)
    if layers:
        chunks = sum(one.chunks for one in found.values())
        log.info(
            "CPU operations compute single tokens of %d of %d recurrent layers, and chunks of %d",
            len(found), len(layers), chunks,
        )  # fmt: skip
    return found
