"""The slots of the device, and how adapters are added to a batch: by PyTorch, one adapter after the other."""

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from pagewise_executor.adapters.host import LayerFactors
from pagewise_executor.adapters.layers import AdaptedLinear, AdapterContext
from pagewise_executor.input_batch import Int64s
from pagewise_executor.models.packed_linear import rounded_rows


class Slots(Protocol):
    """Adapters where the model computes."""

    def put(self, slot: int, factors: LayerFactors) -> None:
        """Put an adapter into a slot that no step in flight uses; on any thread. It is there when this returns."""

    def begin(self, slots: Int64s) -> None:
        """The next forward pass has these tokens: the slot of each one's adapter [tokens], -1 for none."""


class TorchSlots:
    """Slots for any device that PyTorch computes on. An adapter stays where it was read, if that is the device."""

    def __init__(self, num_slots: int, context: AdapterContext, device: torch.device) -> None:
        self._slots: list[LayerFactors] = [{} for _ in range(num_slots)]
        self._context, self._device = context, device

    def put(self, slot: int, factors: LayerFactors) -> None:
        """See ``Slots``."""
        if self._device.type == "cpu":
            self._slots[slot] = factors
            return
        self._slots[slot] = {
            layer: [pair.__class__(pair.part, pair.a.to(self._device), pair.b.to(self._device)) for pair in pairs]
            for layer, pairs in factors.items()
        }

    def begin(self, slots: Int64s) -> None:
        """See ``Slots``."""
        self._context.step = _TorchStep(self._groups(slots)) if (slots >= 0).any() else None

    def _groups(self, slots: Int64s) -> "list[_Group]":
        groups = []
        for slot in sorted(set(slots[slots >= 0].tolist())):
            (tokens,) = (slots == slot).nonzero()
            first, last = int(tokens[0]), int(tokens[-1]) + 1
            whole = last - first == len(tokens)
            index = None if whole else torch.from_numpy(tokens).to(self._device)
            groups.append(_Group(self._slots[slot], first, last, index))
        return groups


class _Group(NamedTuple):
    """The tokens of one adapter: ``first`` to ``last`` of the flat batch if ``tokens`` is None, else those."""

    factors: LayerFactors
    first: int
    last: int
    tokens: torch.Tensor | None


class _TorchStep:
    """See ``StepAdapters``."""

    def __init__(self, groups: list[_Group]) -> None:
        self._groups = groups

    def add(self, layer: AdaptedLinear, x: torch.Tensor, y: torch.Tensor) -> None:
        """See ``StepAdapters``."""
        for factors, first, last, tokens in self._groups:
            if (pairs := factors.get(layer.number)) is None:
                continue
            rows, padding = x[first:last] if tokens is None else x[tokens], 0
            if rows.device.type == "cpu" and rows.dtype != torch.float32:
                padding = rounded_rows(len(rows)) - len(rows)  # these go to oneDNN
                rows = F.pad(rows, (0, 0, 0, padding))
            for pair in pairs:
                _, start, stop = layer.parts[pair.part]
                more = F.linear(F.linear(rows, pair.a), pair.b)[: len(rows) - padding]
                if tokens is None:
                    y[first:last, start:stop] += more
                else:
                    y[:, start:stop].index_add_(0, tokens, more)
