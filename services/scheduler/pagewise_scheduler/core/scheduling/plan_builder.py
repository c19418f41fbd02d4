"""The plan of a step while it is made: the changes of rows and blocks, and the copies that wait for it."""

from collections.abc import Iterable, Iterator
from itertools import chain

import msgspec
from pagewise_shared.block_hash import BlockHash, pack_names, salt_tags
from pagewise_shared.protocol import (
    DEVICE,
    BlockCopies,
    GroupedStepPlan,
    NewSequence,
    ProposingStepPlan,
    SegmentMove,
    StepPlan,
    pack_int32s,
    unpack_int32s,
)
from pagewise_shared.protocol.limits import MAX_MOVES, SEQUENCE_OVERHEAD_BYTES
from pagewise_shared.sampling import TokenConstraints
from pagewise_shared.segments import MAX_MOVED_TOKENS

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, cache_salt_of, name_of
from pagewise_scheduler.core.requests.request import RequestSequence
from pagewise_scheduler.core.scheduling.step import Drafts
from pagewise_scheduler.core.tiers.tier import Copies

_Lists = dict[tuple[int, int, int], list[int | CachedBlock]]
"""Pairs of source block and target block, one after the other, by source tier, target tier and group of layers."""


class PendingCopies:
    """Collects the copies of the next plan in lists, each between two tiers, in an order that keeps every copy's source
    intact until it is read.

    Demotions come first, because the copies after them may write the blocks that they read on the device. Among the
    demotions, copies out of lower tiers come first, because the others write there. Copies inside the device come last.
    A list has a target more than once if its tier has evicted the block again before it came: the last source counts.
    """

    def __init__(self) -> None:
        self._inside: list[int] = []
        self._lists: list[_Lists] = []
        self._written: set[tuple[int, int, int | CachedBlock]] = set()

    def __bool__(self) -> bool:
        return bool(self._inside or self._lists)

    @property
    def demotes(self) -> bool:
        """Whether some of the copies go to a lower tier."""
        return bool(self._lists)

    def add(self, copies: Copies) -> None:
        """Add copies that have to be made before their sources are overwritten."""
        for source, source_block, target, target_block, group in copies:
            if target == DEVICE:
                assert isinstance(target_block, int)
                self._inside += (source_block, target_block)
                continue
            # If the source is the target of a copy of this plan, that copy has to come first: begin new lists.
            if not self._lists or (source, group, source_block) in self._written:
                self._lists.append({})
                self._written.clear()
            self._lists[-1].setdefault((source, target, group), []).extend((source_block, target_block))
            self._written.add((target, group, target_block))

    def give_up(self, blocks: Iterable[int]) -> None:
        """Drop the copies inside the device into these blocks."""
        targets = set(blocks)
        pairs = zip(self._inside[::2], self._inside[1::2], strict=True)
        self._inside = [block for pair in pairs if pair[1] not in targets for block in pair]

    def forget_copies_on_write(self) -> None:
        """Drop the copies inside the device, and keep the demotions."""
        self._inside = []

    def clear(self) -> None:
        """Drop all copies."""
        self._inside, self._lists = [], []
        self._written.clear()

    def take(self) -> list[BlockCopies]:
        """Remove and return all copies, in order."""
        taken = [
            _block_copies(*between, lists[between]) for lists in self._lists for between in sorted(lists, reverse=True)
        ]
        if self._inside:
            taken.append(BlockCopies(DEVICE, DEVICE, pack_int32s(self._inside)))
        self.clear()
        return taken


def _block_copies(source: int, target: int, group: int, pairs: list[int | CachedBlock]) -> BlockCopies:
    nodes = [node for node in pairs[1::2] if isinstance(node, CachedBlock)]
    if not nodes:
        return BlockCopies(source, target, pack_int32s(pairs), group=group)  # type: ignore[arg-type]
    indexed = chain.from_iterable(zip(pairs[::2], range(len(nodes)), strict=True))
    names, salts = pack_names(map(name_of, nodes)), tuple(_salts(nodes)) if not group else ()
    packed = pack_int32s(indexed)  # type: ignore[arg-type]
    return BlockCopies(source, target, packed, names=names, group=group, salts=salts)


def _salts(nodes: Iterable[CachedBlock]) -> Iterator[tuple[int, bytes]]:
    """The index and the tags of the cache salt of each node that is the first block of a prefix."""
    for index, node in enumerate(nodes):
        if node.depth == 1:
            yield index, salt_tags(cache_salt_of(node))


class PlanBuilder:
    """Collects the changes that the next plan carries.

    ``copies``: between blocks of this executor. ``chunks``: rows, and how many of their known tokens the step computes.
    ``computed``: rows, and how many of their first tokens have their KV now, because it was loaded. ``moves``: of parts
    of segments, made before anything is computed. ``drafts``: of sequences that decode. ``joined_bytes``: the bytes
    that the sequences that join take in the plan, with their constraints. ``proposals``: by the executor's draft model.
    """

    def __init__(self) -> None:
        self.copies = PendingCopies()
        self.clear()

    def clear(self) -> None:
        """Forget everything collected so far except the demotions: their blocks are in lower tiers already in the
        tiers' bookkeeping."""
        self.copies.forget_copies_on_write()
        self._left: list[int] = []
        self._joined: list[NewSequence] = []
        self._tables: list[tuple[int, int, int]] = []
        self.computed: list[tuple[int, int]] = []
        self.chunks: list[tuple[int, int]] = []
        self.moves: list[SegmentMove] = []
        self.drafts: Drafts = {}
        self.proposals: list[tuple[RequestSequence, int]] = []
        self._constraints: dict[TokenConstraints, int] = {}
        self.joined_bytes = 0
        self._windows: list[tuple[int, int, int]] = []
        self._states: list[tuple[int, int, int, int]] = []
        self._window_copies: dict[tuple[int, int], int] = {}  # by group and target block

    def leave(self, row: int) -> None:
        """The row's sequence leaves. Drops the changes that the next plan had for it."""
        joined = next((new for new in self._joined if new.row == row), None)
        if joined is None:
            self._left.append(row)
        else:  # the executor does not know the sequence yet
            self._joined.remove(joined)
            self.joined_bytes -= _size(joined)
            if not self._joined:
                self._constraints.clear()
                self.joined_bytes = 0
            self.copies.give_up(unpack_int32s(joined.blocks))
            for group, (_, blocks) in enumerate(joined.windows, 1):
                for block in unpack_int32s(blocks) if self._window_copies else ():
                    self._window_copies.pop((group, block), None)
        self._tables = [change for change in self._tables if change[0] != row]
        self.computed = [computed for computed in self.computed if computed[0] != row]
        self._windows = [change for change in self._windows if change[0] != row]
        self._states = [change for change in self._states if change[0] != row]
        self.moves = [move for move in self.moves if move.row != row]
        self.drafts = {sequence: draft for sequence, draft in self.drafts.items() if sequence.row != row}

    def copy(self, copies: Copies) -> None:
        """Make these copies before their sources are overwritten."""
        if copies:
            self.copies.add(copies)

    def set_blocks(self, row: int, index: int, blocks: list[int]) -> None:
        """The row's block table has ``blocks`` from ``index`` on."""
        self._tables += [(row, number, block) for number, block in enumerate(blocks, index)]

    def set_block(self, row: int, index: int, block: int) -> None:
        """The row's block table has ``block`` at ``index``."""
        self._tables.append((row, index, block))

    def set_windows(self, row: int, added: Iterable[tuple[int, int, int]], *, joins: bool = False) -> None:
        """The row's tables of windowed layers have these further blocks, as ``grow_windows`` returns them.

        ``joins``: it takes its row in this plan, with its whole windows and the states with which it begins.
        """
        for group, token, block in added:
            if token >= 0:
                self._states.append((row, group, token, block))
            elif not joins:
                self._windows.append((row, group, block))

    def join(self, sequence: RequestSequence, num_computed_tokens: int, root: BlockHash) -> None:
        """The sequence takes its row, with the blocks it holds now. ``root``: the hash before its first block."""
        sampling, constraints = sequence.sampling, -1
        if (shared := sampling.constraints) is not None:
            sampling = msgspec.structs.replace(sampling, constraints=None)
            if shared not in self._constraints:
                self._constraints[shared] = len(self._constraints)
                self.joined_bytes += shared.num_bytes
            constraints = self._constraints[shared]
        windows = (one.joined() for one in sequence.table.windows)
        joined = NewSequence(
            row=sequence.row,
            tokens=sequence.token_bytes(),
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_computed_tokens=num_computed_tokens,
            blocks=pack_int32s(sequence.table.blocks),
            sampling=sampling,
            root=root,
            constraints=constraints,
            adapter=sequence.request.adapter_slot,
            windows=tuple((first, pack_int32s(blocks)) for first, blocks in windows),
        )
        self.joined_bytes += _size(joined)
        self._joined.append(joined)
        for group, one in enumerate(sequence.table.windows, 1):
            if one.source >= 0:
                self._window_copies[group, one.blocks[-1]] = one.source
                one.source = -1

    @property
    def moves_enough(self) -> bool:
        """Whether no other sequence with segments continues in this plan."""
        return len(self.moves) >= MAX_MOVES or sum(one.stop - one.start for one in self.moves) >= MAX_MOVED_TOKENS

    def build(self, epoch: int, step: int, loads: list[BlockCopies], unmapped: bytes = b"") -> StepPlan:
        """The plan with everything collected so far. Empties the builder.

        ``loads``: copies to the device. ``unmapped``: see ``GroupedStepPlan``.
        """
        # Loads come last: they may overwrite the sources of demotions and of copies inside the device.
        copies = (*self.copies.take(), *loads) if self.copies or loads else ()
        if self._window_copies:
            copies = (*copies[: len(copies) - len(loads)], *_in_groups(self._window_copies), *loads)
        plan = StepPlan(
            epoch=epoch,
            step=step,
            left=tuple(self._left),
            copies=copies,
            joined=tuple(self._joined),
            tables=pack_int32s([*chain.from_iterable(self._tables)]) if self._tables else b"",
            computed=tuple(self.computed),
            chunks=tuple(self.chunks),
            constraints=tuple(self._constraints),
            moves=tuple(self.moves),
            drafts=tuple((sequence.row, draft.tobytes()) for sequence, draft in self.drafts.items()),
        )
        if unmapped or self._windows or self._states:
            windows, states = (pack_int32s([*chain.from_iterable(some)]) for some in (self._windows, self._states))
            plan = GroupedStepPlan(**msgspec.structs.asdict(plan), windows=windows, unmapped=unmapped, states=states)
        if self.proposals:
            pairs = pack_int32s([*chain.from_iterable((one.row, count) for one, count in self.proposals)])
            plan = ProposingStepPlan(**msgspec.structs.asdict(plan), proposals=pairs)
        self.clear()
        return plan


def _in_groups(sources: dict[tuple[int, int], int]) -> Iterator[BlockCopies]:
    """The copies inside the device in each group of windowed layers. ``sources``: by group and target block."""
    by_group: dict[int, list[int]] = {}
    for (group, target), source in sources.items():
        by_group.setdefault(group, []).extend((source, target))
    for group, pairs in by_group.items():
        yield BlockCopies(DEVICE, DEVICE, pack_int32s(pairs), group=group)


def _size(joined: NewSequence) -> int:
    """An upper bound on the bytes of a sequence in a plan, without constraints that it shares with other sequences."""
    grammar = joined.sampling.grammar
    size = len(grammar) if grammar.isascii() else len(grammar.encode())
    windows = sum(len(blocks) for _, blocks in joined.windows)
    return len(joined.tokens) + len(joined.blocks) + windows + size + SEQUENCE_OVERHEAD_BYTES
