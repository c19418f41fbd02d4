"""The pages in which the blocks of several groups of layers lie. This module does not import torch."""

from collections.abc import Sequence

import numpy as np

from pagewise_executor.plan_checks import InvalidPlanError
from pagewise_executor.step_work import Int32s

NULL_PAGE = 0
"""Holds zeros and is never written. Entries of tables that no query sees any more name it."""


class PageMap:
    """The pages of the blocks of one tier.

    The tier has ``num_pages`` pages beside the null page, with numbers from 1 on. A block of a group takes
    ``pages_per_block[group]`` of them, which may lie anywhere, when it is first named, and keeps them until it is
    unmapped.
    """

    def __init__(self, num_pages: int, pages_per_block: Sequence[int]) -> None:
        # Of each block of each group; the null page for blocks without pages.
        self._pages: list[Int32s] = [np.zeros((num_pages // each, each), np.int32) for each in pages_per_block]
        self._free: Int32s = np.arange(num_pages, 0, -1, dtype=np.int32)
        self.num_free = num_pages

    def num_blocks(self, group: int) -> int:
        """Return the number of blocks that a group could have alone: the ids of its blocks are below it."""
        return len(self._pages[group])

    def pages(self, group: int, blocks: Int32s) -> Int32s:
        """Return the pages of ``blocks`` [n], the null page where a block has none: [n, pages_per_block]."""
        return self._pages[group][blocks]

    def map(self, group: int, blocks: Int32s) -> Int32s:
        """Return the pages of ``blocks`` [n] as ``pages`` does, after free pages were given to blocks without pages.

        Raises:
            InvalidPlanError: there are too few free pages.
        """
        held = self._pages[group]
        found = held[blocks]
        missing = blocks[found[:, 0] == NULL_PAGE]
        if not len(missing):
            return found
        missing = np.unique(missing)
        count = missing.size * held.shape[1]
        if count > self.num_free:
            raise InvalidPlanError(f"blocks of group {group} need {count} pages, and {self.num_free} are free")
        self.num_free -= count
        held[missing] = self._free[self.num_free : self.num_free + count].reshape(len(missing), -1)
        return held[blocks]

    def restore(self, pages: Sequence[Int32s]) -> None:
        """Give pages to the first blocks of each group, in a map in which no block has pages yet.

        ``pages``: of these blocks, [n, pages_per_block] of each group.
        """
        taken = np.zeros(self.num_free + 1, bool)
        for held, given in zip(self._pages, pages, strict=True):
            held[: len(given)] = given
            taken[given] = True
        free = self._free[~taken[self._free]]
        self.num_free = len(free)
        self._free[: self.num_free] = free

    def unmap(self, group: int, blocks: Int32s) -> None:
        """Free the pages of ``blocks`` [n], as far as they have some."""
        held = self._pages[group]
        blocks = np.unique(blocks)
        pages = held[blocks]
        pages = pages[pages != NULL_PAGE]
        held[blocks] = NULL_PAGE
        self._free[self.num_free : self.num_free + len(pages)] = pages
        self.num_free += len(pages)
