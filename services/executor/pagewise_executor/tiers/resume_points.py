"""How much of a prefix a tier without ids holds, of a model with several groups of layers."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from pagewise_shared.block_hash import BlockName
from pagewise_shared.protocol import LayerGroup

from pagewise_executor.grouped_batch import page_name
from pagewise_executor.tiers.block_names import num_leading

Contains = Callable[[Sequence[BlockName]], list[bool]]
"""Returns of each block, or page, whether a tier contains it."""

_FIRST_ASKED, _MOST_ASKED = 32, 1024
"""How many blocks of each window are looked for at a time: twice as many each time."""
_NONE = -1


def resume_point(names: Sequence[BlockName], groups: Sequence[LayerGroup], block_size: int, contains: Contains) -> int:
    """Return the greatest number of first blocks of a prefix behind which a sequence can resume from a tier.

    The tier has these blocks of the first group of layers, and the blocks of every other group that the query of the
    next token sees. A block is there if all of its pages are.

    A tier has windows only where sequences once ended or parted, maybe far before the last block that it has of the
    first group. So the search for windows starts there and moves towards the beginning, many blocks at a time, by the
    first pages of their blocks. It looks for the other pages once it has found the first pages of a whole window.
    """
    full, *windowed = groups
    end = num_leading(names, lambda some: _are_whole(some, 0, full, contains))
    windows = [_Window(number, group, block_size, end) for number, group in enumerate(windowed, 1)]
    asked, step = end, _FIRST_ASKED
    while end:
        if (least := min(window.first_needed(end) for window in windows)) < asked:
            start = min(least, max(0, asked - step))
            pages = [page_name(name, window.number, 0) for window in windows for name in names[start:asked]]
            for window, there in zip(windows, np.array(contains(pages)).reshape(len(windows), -1), strict=True):
                window.there[start:asked] = there
            asked, step = start, min(2 * step, _MOST_ASKED)
        lacking = [window.last_lacking(end) for window in windows]
        if max(lacking) == _NONE:
            for window in windows:
                needed = slice(window.first_needed(end), end)
                window.there[needed] = _are_whole(names[needed], window.number, window.group, contains)
            lacking = [window.last_lacking(end) for window in windows]
        if max(lacking) == _NONE:
            return end
        # A sequence that begins behind a lacking block, and before ``end``, needs that block too.
        end = min(block for block in lacking if block != _NONE)
    return 0


class _Window:
    """A group of windowed layers. ``there`` [blocks]: whether the tier has each block; False if that is not known."""

    def __init__(self, number: int, group: LayerGroup, block_size: int, num_blocks: int) -> None:
        self.number, self.group, self._block_size = number, group, block_size
        self.there: npt.NDArray[np.bool_] = np.zeros(num_blocks, bool)

    def first_needed(self, end: int) -> int:
        """The first block that the query of the token behind the first ``end`` blocks sees; ``end``: it sees none."""
        token, window = end * self._block_size, self.group.window
        first = token // window * window if self.group.chunked else token - window + 1
        return max(0, first) // self._block_size

    def last_lacking(self, end: int) -> int:
        """The last of the blocks that are needed behind the first ``end`` blocks and not there; ``_NONE``: all are."""
        first = self.first_needed(end)
        lacking = np.flatnonzero(~self.there[first:end])
        return first + int(lacking[-1]) if len(lacking) else _NONE


def _are_whole(names: Sequence[BlockName], number: int, group: LayerGroup, contains: Contains) -> list[bool]:
    """Return for each block of a group whether all of its pages are there."""
    each = group.pages_per_block
    pages = [page_name(name, number, index) for name in names for index in range(each)]
    there = contains(pages) if pages else []
    return [all(there[start : start + each]) for start in range(0, len(there), each)]
