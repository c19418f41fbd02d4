"""The block tables of a model's layers on the device, to which each step sends only the changed entries."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from pagewise_kernels.attention.config import LARGEST_TILE
from pagewise_kernels.shapes import power_of_two

from pagewise_executor.attention.backend import BatchTables
from pagewise_executor.grouped_batch import GroupedBatch, Stretch
from pagewise_executor.input_batch import InputBatch
from pagewise_executor.kv.layer_groups import PageLayout
from pagewise_executor.page_map import NULL_PAGE
from pagewise_executor.plan_checks import InvalidPlanError
from pagewise_executor.step_work import Int32s, Int64s, StepWork

Changes = tuple[Int64s, Int32s]
"""Indices into the tables of a slot [n], and the entries at these indices in the tables of each slot of the group
[slots, n]."""


class TableShape(NamedTuple):
    """The tables of a group: of ``slots`` slots, with ``width`` entries for each row. ``ring``: block i is entry
    i % width."""

    slots: int
    width: int
    ring: bool = False


class SlotTables(NamedTuple):
    """The tables of one slot: int32 [num_rows + 1, width]. ``ring``: see ``TableShape``."""

    tables: torch.Tensor
    ring: bool


def table_shapes(pages: PageLayout | None, max_model_len: int, block_size: int, most_tokens: int) -> list[TableShape]:
    """Return the shapes of the tables of each group of layers; with None, of a model with one group.

    ``most_tokens``: of a step. A row of a group of windowed layers needs entries for the window before the first token
    of a step, for the step's tokens, and for the rest of the tile in which the window begins. So its table is a ring of
    so many entries, rounded up to a power of two, if that is shorter than the longest sequence.
    """
    whole = -(-max_model_len // block_size)
    if pages is None:
        return [TableShape(1, whole)]
    shapes = []
    for group in pages.groups:
        seen = group.window - 1 + most_tokens + LARGEST_TILE
        width = power_of_two(-(-seen // block_size) + 1)
        ring = bool(group.window) and width < whole
        shapes.append(TableShape(group.pages_per_block, width if ring else whole, ring))
    return shapes


class GroupTables:
    """The tables of a group of layers: a copy of the tables of the input batch.

    ``on_device`` int32 [slots, num_rows + 1, width]: the row behind the others belongs to queries that pad a batch.
    ``ring``: see ``TableShape``.
    """

    def __init__(self, shape: TableShape, num_rows: int, device: torch.device) -> None:
        self.ring, self._width = shape.ring, shape.width
        self.on_device = torch.zeros(shape.slots, num_rows + 1, shape.width, dtype=torch.int32, device=device)
        self._changed: list[Stretch] = []

    def reset(self, tables: Int32s, ends: Int64s) -> None:
        """Copy ``tables`` [slots, rows, blocks] from now on, of which the first ``ends`` [rows] entries are valid."""
        slots, rows, blocks = tables.shape
        assert slots == len(self.on_device)
        assert rows < self.on_device.shape[1]
        assert self.ring or blocks == self._width
        self.host, self._ends = tables, ends
        self._changed.clear()

    def note(self, changed: Sequence[Stretch], span: int) -> None:
        """Note stretches of the tables that have changed. ``span``: the most entries that a row of a step needs.

        Raises:
            InvalidPlanError: they do not fit into a ring.
        """
        if self.ring and span > self._width:
            raise InvalidPlanError(f"a sequence needs {span} blocks of its window at once, of {self._width} at most")
        self._changed += changed

    def take(self) -> Changes:
        """Return the changes since the last call."""
        changed, self._changed = self._changed, []
        width = self._width
        if not changed:
            return np.zeros(0, np.int64), np.zeros((len(self.host), 0), np.int32)
        if not self.ring:
            where = np.concatenate([np.arange(row * width + start, row * width + stop) for row, start, stop in changed])
            return where, np.concatenate([self.host[:, row, start:stop] for row, start, stop in changed], axis=1)
        stretches = ((row * width, np.arange(max(start, stop - width), stop)) for row, start, stop in changed)
        # Of blocks that share an entry, the last one counts.
        where = np.unique(np.concatenate([begin + blocks % width for begin, blocks in stretches]))
        rows, entries = np.divmod(where, width)
        blocks = entries + (self._ends[rows] - 1 - entries) // width * width
        return where, np.where(blocks < 0, NULL_PAGE, self.host[:, rows, np.maximum(blocks, 0)]).astype(np.int32)

    def change(self, where: torch.Tensor, blocks: torch.Tensor) -> None:
        """Apply the changes of ``take``, which are on the device now."""
        if len(where):
            self.on_device.view(len(self.on_device), -1).index_copy_(1, where, blocks)


class DeviceTables:
    """The tables of all groups. ``slots``: the tables of each slot, first of the first group, then of the next."""

    def __init__(self, shapes: Sequence[TableShape], num_rows: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self.groups = [GroupTables(shape, num_rows, device) for shape in shapes]
        self.slots = [SlotTables(tables, group.ring) for group in self.groups for tables in group.on_device]

    def reset(self, batch: InputBatch) -> None:
        """Copy the tables of an empty batch from now on."""
        if isinstance(batch, GroupedBatch):
            hosts, ends = batch.tables, batch.ends
        else:
            hosts, ends = [batch.block_tables[None]], [batch.num_blocks]
        for group, host, valid in zip(self.groups, hosts, ends, strict=True):
            group.reset(host, valid)

    def note(self, batch: BatchTables, work: StepWork) -> None:
        """Note the changes of a step, which ``batch`` has applied. They are sent to the device with the next step that
        computes something.

        Raises:
            InvalidPlanError: a window is larger than its table.
        """
        if not isinstance(batch, GroupedBatch):
            self.groups[0].note(work.changed_tables, 0)
            return
        tile = -(-LARGEST_TILE // self._block_size)
        for group, stretches, span in zip(self.groups, batch.changed, batch.spans, strict=True):
            group.note(stretches, span + tile)

    def take(self) -> list[Int64s | Int32s]:
        """Return the changes since the last call, for ``change``: the result of ``GroupTables.take`` of each group."""
        return [array for group in self.groups for array in group.take()]

    def change(self, changes: Sequence[torch.Tensor]) -> None:
        """Apply the changes of ``take``, which are on the device now."""
        for group, where, blocks in zip(self.groups, changes[::2], changes[1::2], strict=True):
            group.change(where, blocks)

    def slot_mapping(self, rows: Int64s, positions: Int64s) -> Int64s:
        """Return for each slot the place in its pool of each position [n] of its row [n]: int64 [slots, n or n + 1].

        There is an even number of columns, because kernels are compiled for addresses that are divisible by 16.
        """
        size = self._block_size
        found = np.zeros((len(self.slots), len(rows) + len(rows) % 2), np.int64)
        pages = np.concatenate([group.host[:, rows, positions // size] for group in self.groups])
        found[:, : len(rows)] = pages.astype(np.int64) * size + positions % size
        return found
