"""The contexts that the queries of a step attend to, for attention in PyTorch."""

from dataclasses import dataclass, field

import numpy as np
import torch

from pagewise_executor.input_batch import Int64s

_WASTE = 1.25
"""Decodes are grouped by context length. No group reads more than this many times the blocks that it needs."""


@dataclass(slots=True)
class Window:
    """The slots that each decode of a group attends to, in a layer with or without a sliding window.

    ``slots`` [n, span] int64: pool slots, oldest first. Shorter contexts are padded with their newest slot; ``padding``
    [n, span] bool marks these entries, and is None if all contexts are equally long.
    """

    slots: torch.Tensor
    padding: torch.Tensor | None


@dataclass(slots=True)
class DecodeGroup:
    """Decodes of similar context length, which are computed together: those at ``index`` [n] of the flat batch.

    ``blocks`` [n, blocks] int64: their block tables, padded. ``lengths`` [n]: context tokens, the new one included;
    ``longest``: the greatest of them. ``windows``, ``patterns`` and ``masks`` cache what layers of one kind derive from
    these, so that only the first of them computes it.
    """

    index: torch.Tensor
    blocks: torch.Tensor
    lengths: torch.Tensor
    longest: int
    windows: dict[int, Window] = field(default_factory=dict)
    patterns: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)
    masks: dict[int, torch.Tensor] = field(default_factory=dict)

    def window(self, size: int | None, block_size: int) -> Window:
        """Return the slots seen by a layer whose sliding window is ``size`` tokens (None: the whole context)."""
        key = size or 0
        found = self.windows.get(key)
        if found is None:
            span = min(self.longest, size) if size else self.longest
            last = self.lengths[:, None] - 1
            first = (self.lengths[:, None] - span).clamp_(min=0)
            unclipped = first + torch.arange(span, device=self.blocks.device)
            positions = torch.minimum(unclipped, last)
            slots = self.blocks.gather(1, positions // block_size) * block_size + positions % block_size
            padding = unclipped > last
            found = self.windows[key] = Window(slots, padding if bool(padding.any()) else None)
        return found


@dataclass(slots=True)
class ChunkContext:
    """A prefill chunk: ``size`` queries at index ``offset`` of the flat batch, at positions from ``start`` on.

    ``blocks`` [blocks]: the block table of its sequence, as far as the chunk's last token.
    """

    offset: int
    start: int
    size: int
    blocks: torch.Tensor


def group_decodes(blocks_needed: Int64s) -> list[Int64s]:
    """Partition decodes by the number of blocks they need [n] into few groups that are padded by little."""
    order = np.argsort(-blocks_needed, kind="stable")
    groups, start = [], 0
    while start < len(order):
        sizes = blocks_needed[order[start:]]
        padded = sizes[0] * np.arange(1, len(sizes) + 1)
        fine = np.flatnonzero(padded <= _WASTE * np.cumsum(sizes))
        stop = start + int(fine[-1]) + 1
        groups.append(np.sort(order[start:stop]))
        start = stop
    return groups
