"""The order of inputs in packed weights in four bits, whose groups need not be neighbours."""

from collections.abc import Sequence

import torch

GROUPS = (128, 64, 32)
"""The numbers of slots that may share a scale in packed weights."""


def slots_of(group_of: torch.Tensor, groups: Sequence[int] = GROUPS) -> tuple[torch.Tensor, int]:
    """Return the input of each slot, int64 [slots], -1: none, and the number of slots that share a scale.

    ``group_of`` int64 [ins]: the group of each input. Inputs of one group take the slots of as many scales as they
    need. ``groups``: the numbers of slots that may share a scale.
    """
    order, counts = group_of.argsort(stable=True), group_of.bincount()

    def padded(group: int) -> torch.Tensor:
        return -(-counts // group) * group

    # The bytes of a slot and its part of a scale and a zero, in the sizes that they have with each number of slots.
    group = min(groups, key=lambda group: float(padded(group).sum()) * (1 / 2 + 3 / group))
    taken = padded(group)
    shift = (taken.cumsum(0) - taken) - (counts.cumsum(0) - counts)
    slots = torch.full((int(taken.sum()),), -1)
    slots[torch.arange(len(order)) + shift[group_of[order]]] = order
    return slots, group
