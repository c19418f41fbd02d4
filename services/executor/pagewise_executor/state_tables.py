"""The blocks of states of the rows of an input batch, and the batches that recurrent layers compute.

A row writes the states behind its last token into its *current block*. A *switch* at n tokens leaves the states behind
the first n in the current block, and makes another one current. So a block that a row has switched away from is a
snapshot, from which several rows may continue.

States cannot go back. So a step that verifies a draft reads the current block of its row and writes nothing; when it is
known how many tokens the row keeps, recurrent layers compute these once more, and write (``settle``). A switch behind
tokens that it does not keep stays for the steps that reach them. This module does not import torch, because the
simulated runner uses it too.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pagewise_executor.page_map import PageMap
from pagewise_executor.plan_checks import InvalidPlanError
from pagewise_executor.step_work import Draft, Int32s, Int64s

_NONE = -1


class SequenceBatch(NamedTuple):
    """Sequences with equally many tokens, which recurrent layers compute at once.

    ``tokens`` int64 [sequences, tokens]: indices in the flat batch. ``read``, ``written`` int32 [sequences, pages per
    block]: the pages from which states come, and into which they go. ``read`` is None if the sequences begin, and
    ``written`` if they verify drafts.
    """

    tokens: Int64s
    read: Int32s | None
    written: Int32s | None


class StateSnapshot(NamedTuple):
    """The states of ``row`` behind its first ``num_tokens`` tokens, which stay in ``block``."""

    row: int
    num_tokens: int
    block: int


class Piece(NamedTuple):
    """Tokens of a row from index ``offset`` of the flat batch on, between two switches, with its blocks of states.
    ``read``: -1 if the row begins; ``written``: -1 if it verifies a draft."""

    offset: int
    read: int
    written: int


class _Kind(NamedTuple):
    """The common properties of the pieces of one batch. ``turn``: how many pieces of a row come before."""

    turn: int
    size: int
    begins: bool = False
    verifies: bool = False


class StateTables:
    """The blocks of the group ``number``, of states, by row. ``snapshots``: the snapshots that the step leaves.
    ``sequences``: the pieces of each row that the step computes or settles, with their numbers of tokens, in their
    order."""

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
        """Forget the switches and blocks of the step before."""
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
        """Forget a row. Return its current block as a snapshot, if that has the states behind its computed tokens."""
        block, switches = int(self._current[row]), self._switches.pop(row)
        self._current[row] = _NONE
        return [StateSnapshot(row, num_computed, block)] if num_computed and not switches else []

    def pages_of(self, blocks: Sequence[int] | Int64s) -> Int32s:
        """Return the pages of blocks [n, pages per block]."""
        return self._pages.pages(self.number, np.array(blocks, np.int32))

    def cut(self, rows: Int64s, starts: Int64s, stops: Int64s, drafts: Collection[int] = ()) -> list[SequenceBatch]:
        """Cut the tokens of a step at switches; return the batches in which recurrent layers compute them, in order.

        ``rows`` [n] compute the positions [start, stop) [n], in the order of the flat batch. ``drafts``: the rows that
        verify drafts, which are not cut.

        Raises:
            InvalidPlanError: a row switches at tokens that it does not compute, or a block has no pages.
        """
        found: dict[_Kind, list[Piece]] = {}
        self.sequences, offset = [], 0
        for row, start, stop in zip(rows.tolist(), starts.tolist(), stops.tolist(), strict=True):
            if row in drafts:
                piece = Piece(offset, int(self._current[row]), _NONE)
                self.sequences.append([(stop - start, piece)])
                found.setdefault(_Kind(0, stop - start, verifies=True), []).append(piece)
            else:
                self._add_pieces(found, row, start, stop, offset)
            offset += stop - start
        ends = dict(zip(rows.tolist(), stops.tolist(), strict=True))
        for row in self._switched:
            last = self._switches[row][-1][0] if self._switches[row] else _NONE
            if last >= (ends[row] if row in drafts else 0):
                raise InvalidPlanError(f"row {row} switches at {last} tokens, which it does not reach")
        return self._batches(found)

    def settle(self, drafts: Sequence[Draft]) -> list[SequenceBatch]:
        """Return the batches in which recurrent layers compute the tokens that rows keep of a step with drafts.

        Indices of tokens begin at the first token of the first draft.
        """
        found: dict[_Kind, list[Piece]] = {}
        self.sequences, offset = [], 0
        for draft in drafts:
            self._add_pieces(found, draft.row, draft.start, draft.start + 1 + draft.num_accepted, offset)
            offset += 1 + len(draft.tokens)
        return self._batches(found)

    def _add_pieces(self, found: dict[_Kind, list[Piece]], row: int, start: int, stop: int, offset: int) -> None:
        self.sequences.append(list(self._pieces(row, start, stop, offset)))
        for turn, (size, piece) in enumerate(self.sequences[-1]):
            found.setdefault(_Kind(turn, size, begins=piece.read == _NONE), []).append(piece)

    def _batches(self, found: Mapping[_Kind, Sequence[Piece]]) -> list[SequenceBatch]:
        return [self._batch(kind, found[kind]) for kind in sorted(found)]

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

    def _batch(self, kind: _Kind, pieces: Sequence[Piece]) -> SequenceBatch:
        tokens = np.array([piece.offset for piece in pieces], np.int64)[:, None] + np.arange(kind.size)
        read = None if kind.begins else self.pages_of([piece.read for piece in pieces])
        written = None if kind.verifies else self.pages_of([piece.written for piece in pieces])
        for pages in (read, written):
            if pages is not None and not pages.all():
                raise InvalidPlanError(f"a block of group {self.number} has no pages")
        return SequenceBatch(tokens, read, written)

    def _check(self, row: int, blocks: Int32s) -> None:
        size = self._pages.num_blocks(self.number)
        if not (blocks.min() >= 0 and blocks.max() < size):
            raise InvalidPlanError(f"row {row} gets a block outside the {size} of group {self.number}")
