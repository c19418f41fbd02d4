"""The blocks of states of the rows of an input batch, and the batches that recurrent layers compute.

A row writes the states behind its last token into its *current block*. A *switch* at n tokens leaves the states behind
the first n in the current block, and makes another one current. So a block that was switched away from is a snapshot,
and several rows may go on from it. This module does not import torch, because the simulated runner uses it too.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from pagewise_executor.input_batch import Int32s, Int64s
from pagewise_executor.page_map import PageMap
from pagewise_executor.plan_checks import InvalidPlanError

_NONE = -1


class SequenceBatch(NamedTuple):
    """Sequences with equally many tokens, which recurrent layers compute at once.

    ``tokens`` int64 [sequences, tokens]: indices in the flat batch. ``read``, ``written`` int32 [sequences, pages per
    block]: the pages from which states come, and into which they go. ``read`` is None if the sequences begin.
    """

    tokens: Int64s
    read: Int32s | None
    written: Int32s


class StateSnapshot(NamedTuple):
    """The states of ``row`` behind its first ``num_tokens`` tokens, which stay in ``block``."""

    row: int
    num_tokens: int
    block: int


class Piece(NamedTuple):
    """Tokens of a row from index ``offset`` of the flat batch on, between two switches, with its blocks of states.
    ``read``: -1 if the row begins."""

    offset: int
    read: int
    written: int


class StateTables:
    """The blocks of the group ``number``, of states, by row. ``snapshots``: those that the step leaves. ``sequences``:
    the pieces of each row that the step computes, with their numbers of tokens, in the order of the flat batch."""

    def __init__(self, number: int, num_rows: int, pages: PageMap) -> None:
        self.number, self._pages = number, pages
        self._current: Int64s = np.full(num_rows, _NONE, np.int64)
        self._switches: dict[int, list[tuple[int, int]]] = {}
        self._switched: list[int] = []
        self.snapshots: list[StateSnapshot] = []
        self._new: list[int] = []
        self._named: list[int] = []
        self.sequences: list[list[tuple[int, Piece]]] = []

    def begin_plan(self) -> None:
        """Forget what the step before did."""
        self._switched, self.snapshots, self._new = [], [], []

    def join(self, row: int, num_tokens: int, blocks: Int32s) -> None:
        """Take the blocks of a row that joins: its current block, and maybe the one to which it switches.

        Raises:
            InvalidPlanError: it has other numbers of blocks, or ids that do not exist.
        """
        if not 1 <= len(blocks) <= 2 or num_tokens < 0:
            raise InvalidPlanError(f"row {row} joins with {len(blocks)} blocks of states behind {num_tokens} tokens")
        self._check(row, blocks)
        self._current[row], self._switches[row] = blocks[0], [(num_tokens, int(one)) for one in blocks[1:]]
        self._new.append(int(blocks[-1]))
        self._named += blocks.tolist()

    def switch(self, row: int, num_tokens: int, block: int) -> None:
        """Note that the states behind ``num_tokens`` tokens stay, and that later ones are written to ``block``.

        Raises:
            InvalidPlanError: there is no such block.
        """
        self._check(row, np.array([block], np.int32))
        self._switches[row].append((num_tokens, block))
        self._switched.append(row)
        self._new.append(block)
        self._named.append(block)

    def take_named(self) -> Int64s:
        """Return the blocks that rows got since the last call."""
        named, self._named = self._named, []
        return np.unique(np.array(named, np.int64))

    def map(self) -> Int32s:
        """Give pages to the blocks that rows write from this plan on; return them [n, pages per block].

        Raises:
            InvalidPlanError: there are too few free pages.
        """
        return self._pages.map(self.number, np.array(self._new, np.int32))

    def leave(self, row: int, num_computed: int) -> list[StateSnapshot]:
        """Forget a row. Returns what stays in its current block, if that has the states behind its computed tokens."""
        block, switches = int(self._current[row]), self._switches.pop(row)
        self._current[row] = _NONE
        return [StateSnapshot(row, num_computed, block)] if num_computed and not switches else []

    def pages_of(self, blocks: Sequence[int] | Int64s) -> Int32s:
        """Return the pages of blocks [n, pages per block]."""
        return self._pages.pages(self.number, np.array(blocks, np.int32))

    def cut(self, rows: Int64s, starts: Int64s, stops: Int64s) -> list[SequenceBatch]:
        """Cut the tokens of a step at switches; return the batches in which recurrent layers compute them, in order.

        ``rows`` [n] compute the positions [start, stop) [n], in the order of the flat batch.

        Raises:
            InvalidPlanError: a row switches at tokens that it does not compute, or a block has no pages.
        """
        found: dict[tuple[int, int, bool], list[Piece]] = {}
        self.sequences, offset = [], 0
        for row, start, stop in zip(rows.tolist(), starts.tolist(), stops.tolist(), strict=True):
            self.sequences.append(list(self._pieces(row, start, stop, offset)))
            for turn, (size, piece) in enumerate(self.sequences[-1]):
                found.setdefault((turn, size, piece.read == _NONE), []).append(piece)
            offset += stop - start
        for row in self._switched:
            if later := self._switches[row]:
                raise InvalidPlanError(f"row {row} switches at {later[-1][0]} tokens, which it does not reach")
        return [self._batch(size, begins, pieces) for (_, size, begins), pieces in sorted(found.items())]

    def _pieces(self, row: int, start: int, stop: int, offset: int) -> Iterable[tuple[int, Piece]]:
        """Yield the pieces of a row, each with its number of tokens. The last switch is done afterwards."""
        current, switches = int(self._current[row]), self._switches[row]
        read, at, last = current if start else _NONE, start, _NONE
        while switches and switches[0][0] < stop:
            num_tokens, block = switches.pop(0)
            if num_tokens < start or num_tokens <= last:
                raise InvalidPlanError(f"row {row} switches at {num_tokens} tokens, which it has passed")
            if num_tokens > at:
                yield num_tokens - at, Piece(offset + at - start, read, current)
                read, at = current, num_tokens
            if num_tokens:
                self.snapshots.append(StateSnapshot(row, num_tokens, current))
            current, last = block, num_tokens
        self._current[row] = current
        yield stop - at, Piece(offset + at - start, read, current)

    def _batch(self, size: int, begins: bool, pieces: Sequence[Piece]) -> SequenceBatch:
        tokens = np.array([piece.offset for piece in pieces], np.int64)[:, None] + np.arange(size)
        read = None if begins else self.pages_of([piece.read for piece in pieces])
        written = self.pages_of([piece.written for piece in pieces])
        for pages in (written,) if read is None else (read, written):
            if not pages.all():
                raise InvalidPlanError(f"a block of group {self.number} has no pages")
        return SequenceBatch(tokens, read, written)

    def _check(self, row: int, blocks: Int32s) -> None:
        size = self._pages.num_blocks(self.number)
        if not (blocks.min() >= 0 and blocks.max() < size):
            raise InvalidPlanError(f"row {row} gets a block outside the {size} of group {self.number}")
