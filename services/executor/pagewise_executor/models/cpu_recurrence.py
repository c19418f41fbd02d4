"""Recurrent modules by the CPU operations: gated delta nets, KDA, Mamba-2 and short convolutions of any family.

A module is found by what it does (``recurrence_trial.py``). What fits no form is computed by PyTorch.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pagewise_executor.models.recurrence_trial import Projections, RecurrenceTrial
from pagewise_executor.models.recurrent import CONV, RECURRENT, RecurrentLayer, StateBatch, StateKey

if TYPE_CHECKING:
    from pagewise_kernels.cpu.recurrent import RecurrentStep


log = logging.getLogger(__name__)


class CpuRecurrence:
    """Computes tokens of sequences. ``chunks``: also several tokens of a sequence, and those with which it begins."""

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


@torch.no_grad()
def find_recurrences(model: nn.Module, layers: Sequence[RecurrentLayer]) -> dict[str, CpuRecurrence]:
    """Return what computes tokens as recurrent modules of a model do, by their names."""
    found = {}
    for layer in layers:
        config: Any = model.config
        trial = RecurrenceTrial(model.get_submodule(layer.name), layer.states, config.get_text_config().hidden_size)
        if (form := trial.find()) is not None:
            found[layer.name] = CpuRecurrence(form.projections, form.step, form.out, chunks=form.chunks)
    if layers:
        chunks = sum(one.chunks for one in found.values())
        log.info(
            "CPU operations compute single tokens of %d of %d recurrent layers, and chunks of %d",
            len(found), len(layers), chunks,
        )  # fmt: skip
    return found
