"""Which blocks of a group of windowed layers the rows of an input batch have. This module does not import torch."""

import numpy as np
from pagewise_shared.protocol import LayerGroup

from pagewise_executor.plan_checks import InvalidPlanError
from pagewise_executor.step_work import Int64s


class WindowTables:
    """The tables of a group of windowed layers. ``number``: of the group.

    ``first`` [num_rows]: the first entry that is not null; ``ends`` [num_rows]: the number of valid entries.
    """

    def __init__(self, number: int, group: LayerGroup, num_rows: int, block_size: int) -> None:
        self.number, self._window, self._chunked, self._block_size = number, group.window, group.chunked, block_size
        self.first: Int64s = np.zeros(num_rows, np.int64)
        self.ends: Int64s = np.zeros(num_rows, np.int64)

    def first_seen(self, positions: Int64s) -> Int64s:
        """Return the first table entry that a query at each position [n] sees."""
        if self._chunked:
            return positions // self._window * self._window // self._block_size
        return np.maximum(positions - self._window + 1, 0) // self._block_size

    def check(self, rows: Int64s, seen: Int64s, stops: Int64s) -> None:
        """Check that the tables of ``rows`` [n] hold all entries from ``seen`` [n] on to positions ``stops`` [n].

        Raises:
            InvalidPlanError: the text names a row of which they do not.
        """
        short = stops > self.ends[rows] * self._block_size
        if short.any():
            row = int(rows[short][0])
            raise InvalidPlanError(
                f"row {row}: {self.ends[row]} blocks of group {self.number} do not hold {stops[short][0]} tokens"
            )
        begun = seen < self.first[rows]
        if begun.any():
            row = int(rows[begun][0])
            raise InvalidPlanError(f"row {row}: the blocks of group {self.number} begin at {self.first[row]}, too late")
