"""An executor made of a ``GroupedBatch`` and dicts: it keeps the content of every slot of every page, and checks reads.

Windows are read through tables as they are on a device: rings that are as short as they can be.
"""

from collections.abc import Sequence

import numpy as np
import torch
from pagewise_executor.attention.device_tables import GroupTables, TableShape
from pagewise_executor.grouped_batch import GroupedBatch, SlotBatch
from pagewise_executor.page_labels import PageLabels
from pagewise_executor.page_map import NULL_PAGE
from pagewise_executor.step_work import StepWork, accept, kept_tokens
from pagewise_executor.tiers.block_names import chain
from pagewise_kernels.shapes import power_of_two
from pagewise_shared.block_hash import HASH_BYTES, BlockHash
from pagewise_shared.protocol import DEVICE, LayerGroup, StepPlan, StepResult, pack_int32s

from tests.scheduler.core.checking_executor import next_token


class PagedExecutor:
    """``content``: by page and offset, the slot of a group that was written there, and the tokens up to that one.

    ``roots``: of the block hashes of sequences.
    """

    def __init__(
        self, groups: Sequence[LayerGroup], num_pages: int, block_size: int, max_model_len: int, most_tokens: int
    ) -> None:
        self.groups, self.num_pages, self.block_size, self.longest = groups, num_pages, block_size, max_model_len
        self.most_tokens = most_tokens
        self.reset(1)

    def reset(self, epoch: int) -> None:
        self.epoch = epoch
        self.batch = GroupedBatch(
            self.groups, {DEVICE: self.num_pages}, num_rows=8, max_model_len=self.longest, block_size=self.block_size
        )
        self.labels = PageLabels(1 + self.num_pages, self.block_size)
        self.batch.label_with(self.labels)
        self.roots: set[BlockHash] = set()
        self.content: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        self.tables = [view.block_tables.copy() for view in self.batch.slots]  # as an attention backend copies them
        self.rings = []
        for number, group in enumerate(self.groups[1:], 1):
            width = power_of_two(-(-(group.window - 1 + self.most_tokens) // self.block_size) + 1)
            ring = GroupTables(TableShape(group.pages_per_block, width, ring=True), 8, torch.device("cpu"))
            ring.reset(self.batch.tables[number], self.batch.ends[number])
            self.rings.append(ring)

    def execute(self, plan: StepPlan) -> StepResult:
        batch = self.batch
        work = batch.apply(plan)
        self._follow_changes(work)
        self.labels.forget(batch.overwritten(work))
        self.roots |= {BlockHash(new.root) for new in plan.joined}
        for job in work.copies:
            assert job.source == job.target == DEVICE
            size = range(self.block_size)
            read = [[self.content.get((source, at)) for at in size] for source, _ in job.pairs.tolist()]
            for (_, target), found in zip(job.pairs.tolist(), read, strict=True):
                assert target != NULL_PAGE
                self.content |= {(target, at): one for at, one in enumerate(found) if one is not None}
        for draft in work.drafts:
            draft.follow(batch.sequences[draft.row])
        rows, positions = batch.flat_batch(work)
        tokens = self._tokens(work)
        for number, view in enumerate(batch.slots):
            self._write(number, view, rows, positions, tokens)
        for number, view in enumerate(batch.slots):
            for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
                self._read(number, view, row, position, tokens[row])
        drawn = [
            next_token(tuple(tokens[row][:position]))
            for row, position in zip(work.sampled_rows, batch.sampled_positions(work).tolist(), strict=True)
        ]
        kept = [True] * len(drawn)
        if work.drafts:
            accept(work.drafts, drawn, len(work.decoding))
            kept = kept_tokens(work.drafts, len(work.decoding), len(drawn))
        for row, token, is_kept in zip(work.sampled_rows, drawn, kept, strict=True):
            if is_kept:
                batch.sequences[row].sampled.append(token)
        batch.advance(work)
        if plan.step % 8 == 0:
            self.check_labels()
        return StepResult(plan.epoch, plan.step, pack_int32s(drawn))

    def check_labels(self) -> None:
        """The content of each page matches its label."""
        for page, label in self.labels.known().items():
            slots, tokens = zip(*(self.content[page, at] for at in range(self.block_size)), strict=True)
            assert set(slots) == {int.from_bytes(label[HASH_BYTES:], "little")}
            hashes = {chain(root, pack_int32s(tokens[-1]), self.block_size)[-1].hash for root in self.roots}
            assert label[:HASH_BYTES] in hashes

    def _tokens(self, work: StepWork) -> dict[int, list[int]]:
        tokens = {row: [*held.tokens.tolist(), *held.sampled] for row, held in self.batch.sequences.items()}
        for draft in work.drafts:
            tokens[draft.row] += draft.tokens.tolist()
        return tokens

    def _follow_changes(self, work: StepWork) -> None:
        """The stretches marked as changed are all that have changed, and entries behind the ends are null."""
        batch = self.batch
        for number, ring in enumerate(self.rings, 1):
            ring.note(batch.changed[number], batch.spans[number])
            if work.num_tokens:
                where, pages = ring.take()
                assert len(set(where.tolist())) == len(where), "an entry is written twice, in any order"
                ring.change(torch.from_numpy(where), torch.from_numpy(pages))
        for table, view in zip(self.tables, batch.slots, strict=True):
            for row, start, stop in batch.changed[view.group]:
                table[row, start:stop] = view.block_tables[row, start:stop]
            ends = batch._windows[view.group - 1].ends if view.group else batch.num_blocks
            for row in range(len(table)):
                end = int(ends[row]) if row in batch.sequences else 0
                assert (table[row, :end] == view.block_tables[row, :end]).all()
                assert (view.block_tables[row, end:] == NULL_PAGE).all()

    def _write(
        self, number: int, view: SlotBatch, rows: np.ndarray, positions: np.ndarray, tokens: dict[int, list[int]]
    ) -> None:
        slots = view.slot_mapping(rows, positions).tolist()
        assert len(set(slots)) == len(slots), "two tokens are written to one slot"
        for row, position, slot in zip(rows.tolist(), positions.tolist(), slots, strict=True):
            page, offset = divmod(slot, self.block_size)
            assert page != NULL_PAGE
            self.content[page, offset] = number, tuple(tokens[row][: position + 1])

    def _read(self, number: int, view: SlotBatch, row: int, position: int, tokens: list[int]) -> None:
        group = self.groups[view.group]
        first = max(0, position - group.window + 1) if group.window else 0
        if group.chunked:
            first = position // group.window * group.window
        for seen in range(first, position + 1):
            page = int(view.block_tables[row, seen // self.block_size])
            if group.window:
                tables = self.rings[view.group - 1].on_device[number - self._first_slot(view.group)]
                assert page == int(tables[row, seen // self.block_size % tables.shape[1]])
            found = self.content[page, seen % self.block_size]
            assert found == (number, tuple(tokens[: seen + 1])), "this page holds something else"
        if group.window and position == self.batch.num_computed[row]:
            assert (view.block_tables[row, : first // self.block_size] == NULL_PAGE).all(), "nothing lies behind it"

    def _first_slot(self, group: int) -> int:
        return sum(one.pages_per_block for one in self.groups[:group])
