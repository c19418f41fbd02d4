"""The input batch of a model with several groups of layers: tables of each group, and the pages of their blocks.

The plan names blocks. A block of a group consists of pages, and page j of each block belongs to the same layers: the
*slot* j of the group. So each slot has a table of its own for every row, which names pages, and its layers attend as
the layers of a model with one group do. ``state_tables`` has the blocks of a group of states, which is the last. This
module does not import torch, because the simulated runner uses it too.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from pagewise_shared.block_hash import BlockHash, BlockName
from pagewise_shared.protocol import DEVICE, Hello, LayerGroup, NewSequence, StepPlan, pack_int32s
from pagewise_shared.sampling import SamplingParams

from pagewise_executor.block_copies import CopyJob, PageCopyJob
from pagewise_executor.input_batch import InputBatch, int32s
from pagewise_executor.page_labels import KeptBlocks, PageLabels
from pagewise_executor.page_map import NULL_PAGE, PageMap
from pagewise_executor.plan_checks import InvalidPlanError, checked_copies
from pagewise_executor.state_tables import SequenceBatch, StateSnapshot, StateTables
from pagewise_executor.step_work import Int32s, Int64s, StepWork
from pagewise_executor.window_tables import WindowTables

Stretch = tuple[int, int, int]
"""A stretch of a row's table: row, start, stop."""


class SlotBatch:
    """The input batch as the attention of one slot's layers sees it.

    ``block_tables`` [num_rows, max_blocks] int32 name pages. Other members: see ``InputBatch``. Tables of windowed
    layers begin with null pages, which are no prefixes that decodes share.
    """

    def __init__(self, batch: "GroupedBatch", group: int, tables: Int32s) -> None:
        self.group, self.block_tables, self._batch = group, tables, batch
        self.shares_prefixes = not group
        self.block_size, self.num_computed = batch.block_size, batch.num_computed

    def flat_batch(self, work: StepWork) -> tuple[Int64s, Int64s]:
        """Return the row and the position of each token of a step."""
        return self._batch.flat_batch(work)

    def slot_mapping(self, rows: Int64s, positions: Int64s) -> Int64s:
        """Return the slot of the slot's pool of each position [n] of its row [n]."""
        pages = self.block_tables[rows, positions // self.block_size].astype(np.int64)
        return pages * self.block_size + positions % self.block_size


class GroupedBatch(InputBatch):
    """The input batch of a model with several ``groups`` of layers.

    ``num_pages``: the pages of each tier, by the tier's number; 0 if its blocks have no ids. Other parameters: see
    ``InputBatch``, whose block tables are the tables of the first group. ``slots``: the batch as each slot's layers see
    it, first the slots of the first group, then of the next. Copies are copies of pages.

    Each group but a group of states, which has no slots and no tables, has ``tables`` [slots, num_rows, max_blocks]
    int32, the pages of its blocks; ``ends`` [num_rows], the numbers of valid entries; ``changed``, the stretches that
    are new in this step; and ``spans``, the most entries from the first one that a query of the step sees to the end of
    its table, 0 in the first group. A group of states has ``states``, and ``state_batches``, the batches of the step;
    when a step with drafts is counted, they are the batches of the tokens that its rows keep.
    """

    def __init__(self, groups: Sequence[LayerGroup], num_pages: Mapping[int, int], **options: Any) -> None:
        self.groups = groups
        pages_per_block = [group.pages_per_block for group in groups]
        self._maps = {tier: PageMap(count, pages_per_block) for tier, count in num_pages.items() if count}
        self._on_device = self._maps[DEVICE]
        super().__init__(pool_blocks=self._on_device.num_blocks(0), **options)
        self._sizes = [
            {tier: self._maps[tier].num_blocks(number) if tier in self._maps else 0 for tier in num_pages}
            for number in range(len(groups))
        ]
        self._first_slots = [sum(pages_per_block[:group]) for group in range(len(groups))]
        num_rows, attending = len(self.block_tables), [group for group in groups if not group.state]
        # The pages [slots, num_rows, max_blocks], of all groups with tables and of each.
        slots = [group.pages_per_block for group in attending]
        self._all_tables: Int32s = np.zeros((sum(slots), *self.block_tables.shape), np.int32)
        self.tables: list[Int32s] = np.split(self._all_tables, np.cumsum(slots)[:-1])
        self._windows = [
            WindowTables(number, group, num_rows, self.block_size) for number, group in enumerate(attending[1:], 1)
        ]
        self.states: StateTables | None = None
        if (last := len(attending)) < len(groups):
            self.states = StateTables(last, num_rows, self._on_device)
        self.state_batches: list[SequenceBatch] = []
        self.slots = [SlotBatch(self, number, table) for number, tables in enumerate(self.tables) for table in tables]
        self.ends = [self.num_blocks, *(window.ends for window in self._windows)]
        self.changed: list[list[Stretch]] = [[] for _ in attending]
        self.spans = [0] * len(attending)
        # Blocks that this plan puts into tables, by group: row, first index, blocks.
        self._added: list[list[tuple[int, int, Int32s]]] = [[] for _ in attending]
        self._flat: tuple[StepWork, tuple[Int64s, Int64s]] | None = None
        self._labels: PageLabels | None = None
        self._overwritten: list[Int32s] = []  # pages without computed tokens that this plan puts into tables

    def label_with(self, labels: PageLabels) -> None:
        """Keep the labels of the device's pages up to date."""
        self._labels = labels
        labels.attach(self._all_tables)

    def _label(self, row: int) -> None:
        assert self._labels is not None
        pages = self.tables[0][0, row, : self.num_blocks[row]]
        self._labels.label(row, self.sequences[row], int(self.num_computed[row]), pages)

    def restore(self, kept: KeptBlocks) -> None:
        """Give the blocks of an inventory that stays valid their pages. No plan has come yet."""
        for tier, pages in self._maps.items():
            pages.restore(kept.pages(tier))

    def apply(self, plan: StepPlan) -> StepWork:
        """Apply a plan as ``InputBatch`` does, with the tables of all groups. Entries behind the windows become null.

        Raises:
            InvalidPlanError: as of ``InputBatch``; or a table lacks blocks that its layers see, or pages are missing.
        """
        self._flat, self.changed, self._overwritten = None, [[] for _ in self.tables], []
        for added in self._added:
            added.clear()
        if self.states is not None:
            self.states.begin_plan()
        work = super().apply(plan)
        self._extend_windows(int32s(plan.windows))
        self._added[0] += ((row, start, self.block_tables[row, start:stop]) for row, start, stop in work.changed_tables)
        for number, added in enumerate(self._added):
            self._fill(number, added)
        rows, starts, stops = self._computed_ranges(work)
        for window in self._windows:
            seen = window.first_seen(starts)
            window.check(rows, seen, stops)
            self.spans[window.number] = int((window.ends[rows] - seen).max(initial=0))
            self._pass(window, rows, seen)
        if self.states is not None:
            self._switch_states(int32s(plan.states))
            self._overwritten.append(self.states.map().ravel())
            self.state_batches = self.states.cut(rows, starts, stops, [draft.row for draft in work.drafts])
        return work

    def remove(self, row: int) -> None:
        """Remove a sequence as ``InputBatch`` does. Attention that pads tables to equal lengths reads null pages then.

        Raises:
            InvalidPlanError: the row holds none.
        """
        if row in self.sequences:
            if self.states is not None:
                self._note(self.states.leave(row, int(self.num_computed[row])))
            if self._labels is not None:
                self._label(row)
                self._labels.left(row)
        super().remove(row)
        self.tables[0][:, row, : self.num_blocks[row]] = NULL_PAGE
        for window in self._windows:
            self.tables[window.number][:, row, window.first[row] : window.ends[row]] = NULL_PAGE

    def flat_batch(self, work: StepWork) -> tuple[Int64s, Int64s]:
        """Return the rows and positions of ``InputBatch``, which all slots share."""
        if self._flat is None or self._flat[0] is not work:
            self._flat = work, super().flat_batch(work)
        return self._flat[1]

    def overwritten(self, work: StepWork) -> Int32s:
        """Return the pages of the device that are written to, as ``InputBatch`` returns blocks, if they have labels."""
        targets = [job.pairs[:, 1] for job in work.copies if job.target == DEVICE]
        return np.concatenate([np.zeros(0, np.int32), *targets, *self._overwritten])

    def advance(self, work: StepWork) -> None:
        """Count the tokens of an issued step as ``InputBatch`` does."""
        self._flat = None
        super().advance(work)
        if self.states is not None:
            if work.drafts:
                self.state_batches = self.states.settle(work.drafts)
            self._note(self.states.snapshots)

    def _note(self, snapshots: Iterable[StateSnapshot]) -> None:
        """Note the pages of states that stay as they are behind the last token of a block."""
        if self._labels is None or self.states is None:
            return
        for row, num_tokens, block in snapshots:
            if num_tokens % self.block_size == 0:
                rows, indices = np.array([row]), np.array([num_tokens // self.block_size - 1])
                self._labels.note(rows, self._first_slots[-1], indices, self.states.pages_of([block]).T)

    def _check_groups(self, plan: StepPlan) -> None:
        if plan.moves:
            raise InvalidPlanError("segments are not moved in a model with several groups of layers")
        if self.states is None and plan.states:
            raise InvalidPlanError("the plan has blocks of states, but the model has no recurrent layers")
        wanted = len(self.groups) - 1
        for new in plan.joined:
            if len(new.windows) != wanted:
                raise InvalidPlanError(f"row {new.row} joins with {len(new.windows)} of {wanted} windows")

    def _join(self, new: NewSequence, sampling: SamplingParams) -> int:
        row = super()._join(new, sampling)
        if self.states is not None:
            num_tokens, packed = new.windows[-1]
            self.states.join(row, num_tokens, int32s(packed))
        for window, (first, packed) in zip(self._windows, new.windows, strict=False):
            blocks, most = int32s(packed), self.block_tables.shape[1]
            if not 0 <= first <= first + len(blocks) <= most:
                raise InvalidPlanError(f"row {row} joins with blocks {first} to {first + len(blocks)} of {most}")
            self._check_ids(window.number, row, blocks)
            window.first[row], window.ends[row] = first, first + len(blocks)
            if first:
                self.tables[window.number][:, row, :first] = NULL_PAGE
                self.changed[window.number].append((row, 0, first))
            self._added[window.number].append((row, first, blocks))
        return row

    def _extend_windows(self, triples: Int32s) -> None:
        if len(triples) % 3:
            raise InvalidPlanError("changes to tables of windowed layers come in triples of row, group and block")
        for row, group, block in triples.reshape(-1, 3).tolist():
            if row not in self.sequences:
                raise InvalidPlanError(f"row {row} gets a block of group {group} but holds no sequence")
            if not 1 <= group < len(self.tables):
                raise InvalidPlanError(f"row {row} gets a block of group {group} of {len(self.tables)}")
            blocks = np.array([block], np.int32)
            self._check_ids(group, row, blocks)
            ends = self._windows[group - 1].ends
            if (end := int(ends[row])) >= self.block_tables.shape[1]:
                raise InvalidPlanError(f"row {row} gets more than {end} blocks of group {group}")
            self._added[group].append((row, end, blocks))
            ends[row] = end + 1

    def _switch_states(self, quadruples: Int32s) -> None:
        if len(quadruples) % 4:
            raise InvalidPlanError("switches of states come in quadruples of row, group, number of tokens and block")
        assert self.states is not None
        for row, group, num_tokens, block in quadruples.reshape(-1, 4).tolist():
            if row not in self.sequences or group != self.states.number:
                raise InvalidPlanError(f"row {row} switches its states of group {group}, which it does not have")
            self.states.switch(row, num_tokens, block)

    def _check_ids(self, group: int, row: int, blocks: Int32s) -> None:
        size = self._sizes[group][DEVICE]
        if len(blocks) and not (blocks.min() >= 0 and blocks.max() < size):
            raise InvalidPlanError(f"row {row} gets a block outside the {size} of group {group}")

    def _fill(self, group: int, added: Sequence[tuple[int, int, Int32s]]) -> None:
        """Write the pages of blocks that this plan adds to the tables of a group: row, first index, blocks."""
        if not added:
            return
        pages = self._on_device.map(group, np.concatenate([blocks for _, _, blocks in added])).T
        tables, changed, done = self.tables[group], self.changed[group], 0
        for row, first, blocks in added:
            tables[:, row, first : first + len(blocks)] = pages[:, done : done + len(blocks)]
            changed.append((row, first, first + len(blocks)))
            done += len(blocks)
        if self._labels is not None:
            rows = np.repeat([row for row, _, _ in added], [len(blocks) for _, _, blocks in added])
            indices = np.concatenate([np.arange(first, first + len(blocks)) for _, first, blocks in added])
            self._labels.note(rows, self._first_slots[group], indices, pages)
            self._overwritten.append(pages[:, indices >= self.num_computed[rows] // self.block_size].ravel())

    def _computed_ranges(self, work: StepWork) -> tuple[Int64s, Int64s, Int64s]:
        """Return the rows that compute, and the positions [start, stop) that each computes [n]."""
        chunks = [(chunk.row, chunk.start, chunk.start + chunk.size) for chunk in work.chunks]
        rows, starts, stops = np.array(chunks, np.int64).reshape(-1, 3).T
        at = self.num_computed[work.decoding]
        return tuple(map(np.concatenate, ((work.decoding, rows), (at, starts), (at + 1, stops))))  # type: ignore[return-value]

    def _pass(self, window: WindowTables, rows: Int64s, seen: Int64s) -> None:
        """Replace the entries of ``rows`` [n] before ``seen`` [n], which no query sees any more, by the null page."""
        passed = np.flatnonzero(seen > window.first[rows])
        tables, changed = self.tables[window.number], self.changed[window.number]
        for row, first in zip(rows[passed].tolist(), seen[passed].tolist(), strict=True):
            before = int(window.first[row])
            tables[:, row, before:first] = NULL_PAGE
            changed.append((row, before, first))
            window.first[row] = first

    # ---- copies --------------------------------------------------------------------------------------

    def _copies(self, plan: StepPlan) -> list[CopyJob]:
        """Return the copies of the plan as copies of pages, after the blocks that it names were unmapped.

        Copies inside the device are one list for all groups, which reads all sources first: a target in one group may
        get the pages of a source in another. They come before loads, which may overwrite their sources.
        """
        jobs = checked_copies(plan, self._sizes)
        sources = [self._sources(job) for job in jobs]
        self._label_sources(jobs, sources)
        self._unmap(int32s(plan.unmapped))
        made = list[PageCopyJob]()
        written = dict[tuple[int, int], Int32s]()  # by the lists so far, in each tier and group
        for job, pages in zip(jobs, sources, strict=True):
            before = written.get((job.source, job.group), job.pairs[:0, 0])
            made.append(self._of_pages(job, pages, np.isin(job.pairs[:, 0], before)))
            to = job.target, job.group
            written[to] = np.concatenate([written.get(to, job.pairs[:0, 1]), job.pairs[:, 1]])
        inside = [job for job in made if job.source == job.target == DEVICE and job.peer is None]
        down = [job for job in made if job.target != DEVICE]
        up = [job for job in made if job.target == DEVICE and (job.source != DEVICE or job.peer is not None)]
        if len(inside) > 1:
            inside = [dataclasses.replace(inside[0], pairs=np.concatenate([job.pairs for job in inside]))]
        return [*down, *inside, *up]

    def _label_sources(self, jobs: Sequence[CopyJob], sources: Sequence[Int32s]) -> None:
        """Label pages that go to a tier with ids, which keeps the labels. In this plan the pages may enter tables."""
        if self._labels is None:
            return
        for job, pages in zip(jobs, sources, strict=True):
            if job.source == DEVICE != job.target and job.target in self._maps:
                for row in self._labels.rows_of(pages.ravel()):
                    self._label(row)

    def _unmap(self, triples: Int32s) -> None:
        if len(triples) % 3:
            raise InvalidPlanError("unmapped blocks come in triples of tier, group and block")
        by_group: dict[tuple[int, int], list[int]] = {}
        for tier, group, block in triples.reshape(-1, 3).tolist():
            sizes = self._sizes[group] if 0 <= group < len(self.groups) else {}
            if not 0 <= block < sizes.get(tier, 0):
                raise InvalidPlanError(f"there is no block {block} of group {group} in tier {tier} to be unmapped")
            by_group.setdefault((tier, group), []).append(block)
        for (tier, group), blocks in by_group.items():
            self._maps[tier].unmap(group, np.array(blocks, np.int32))

    def _sources(self, job: CopyJob) -> Int32s:
        """Return the pages of the source of each copy [n, pages per block]; null where the block has none yet."""
        blocks = job.pairs[:, 0]
        if job.peer is None and job.source in self._maps:
            return self._maps[job.source].pages(job.group, blocks)
        return self._numbered(job.group, blocks)

    def _numbered(self, group: int, blocks: Int32s) -> Int32s:
        """Return numbers for the pages of blocks whose pages are not known here [n, pages per block]."""
        each = self.groups[group].pages_per_block
        return (blocks[:, None] * each + np.arange(each)).astype(np.int32)

    def _of_pages(self, job: CopyJob, sources: Int32s, written: npt.NDArray[np.bool_]) -> PageCopyJob:
        """Return a list of copies as copies of pages. ``sources``: the pages before the plan, null where there were
        none. ``written``: whether the source is a target of an earlier list of the plan, so that the plan has given it
        its pages."""
        group, targets, names = job.group, job.pairs[:, 1], job.names
        if job.target in self._maps:
            pages = self._maps[job.target].map(group, targets)
        else:
            pages = self._numbered(group, targets)
        if job.peer is None and job.source in self._maps:
            if written.any():
                sources[written] = self._maps[job.source].pages(group, job.pairs[written, 0])
            if not sources.all():
                raise InvalidPlanError(f"a block of group {group} is copied that has no pages")
        if names:
            names = [page_name(name, group, index) for name in names for index in range(pages.shape[1])]
        pairs = np.stack([sources.ravel(), pages.ravel()], axis=1)
        where = job.epoch, job.step, job.source, job.target
        return PageCopyJob(*where, pairs, job.peer, names, group, job.salts, targets)

    def pages_for_peer(self, tier: int, group: int, numbers: Int32s) -> Int32s | None:
        """Return the pages of a tier that another executor has asked for by their numbers (see ``PageCopyJob``); None:
        there are no such pages. Called on any thread, while the blocks are pinned."""
        if tier not in self._maps or not 0 <= group < len(self.groups) or numbers.min() < 0:
            return None
        blocks, indices = np.divmod(numbers, self.groups[group].pages_per_block)
        if blocks.max() >= self._sizes[group][tier]:
            return None
        pages: Int32s = self._maps[tier].pages(group, blocks)[np.arange(len(blocks)), indices]
        return pages if pages.all() else None


def page_name(block: BlockName, group: int, index: int) -> BlockName:
    """Return the name of a page of a block in tiers that find blocks by their names.

    The first page of the first group has the block's own name, by which such a tier looks prefixes up. The tier evicts
    the other pages together with this one.
    """
    if not group and not index:
        return block
    own = hashlib.sha256(block.hash + pack_int32s([group, index])).digest()
    return BlockName(BlockHash(own), block.hash)


def batch_for(info: Hello, tiers: Mapping[int, int], **options: int) -> InputBatch:
    """Return the input batch of the executor that ``info`` describes. ``tiers`` and ``options``: see ``InputBatch``."""
    sizes = {"max_model_len": info.max_model_len, "block_size": info.block_size, "num_adapters": info.adapters.slots}
    if info.groups:  # the blocks of tiers are pages then
        return GroupedBatch(info.groups, {DEVICE: info.num_pages, **tiers}, **(sizes | options))
    return InputBatch(pool_blocks=info.num_blocks, tiers=tiers, **(sizes | options))
