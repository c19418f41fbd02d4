"""Decides which places of a prompt take snapshots of states, and chooses places inside of prompts.

The value of a snapshot is the seconds that it saves, times its expected uses, per page. Free pages cost nothing. Other
pages cost the value of the memory that is evicted for them. So a long prompt takes snapshots inside, too: densely while
pages are free, else so far from each other that the value of each snapshot exceeds the value of the evicted memory. A
place takes no snapshot if the value of the snapshot is clearly lower than the value of the evicted memory.

A skipped place is remembered as if its snapshot had been lost, so that life tables learn the missed uses.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from math import ceil

from pagewise_scheduler.core.memory.block_table import BlockTable, StateTable, WindowTable
from pagewise_scheduler.core.memory.eviction import EvictionPolicy
from pagewise_scheduler.core.memory.roles import INSIDE, JUNCTION, PROMPT
from pagewise_scheduler.core.tiers.arena import Arena
from pagewise_scheduler.core.tiers.states import StateGroup
from pagewise_scheduler.core.tiers.windows import WindowGroup

_LEAST_TOKENS = 64
_LEAST_SHARE = 2
"""The KV between two places inside of a prompt takes at least the bytes of a snapshot, divided by this number."""
_MOST_PLACES = 32
"""Maximum number of places inside of a prompt."""
_FREE_SHARE = 2
"""The snapshots inside of one prompt may take the free pages, divided by this number."""
_CLEARLY = 16.0
"""A place near the end of a prompt, a junction or a declared place is skipped if other memory is worth more than its
snapshot, times this number."""
_TIMES_MORE = 2.0
"""A snapshot inside of a prompt has to be worth the evicted memory, times this number, because many are never used."""
_LEAST_VALUE = 1e-12


class PlaceWorth:
    """Chooses among the places of the snapshots of ``group``, and adds some if it is the only one of windowed layers.

    ``block_pages``: pages of a block of the full layers. ``owed``: returns the pages that a table has yet to take up to
    a number of tokens.
    """

    def __init__(
        self,
        group: StateGroup,
        arena: Arena,
        policy: EvictionPolicy,
        block_pages: int,
        owed: Callable[[BlockTable, int], int],
        *,
        alone: bool,
    ) -> None:
        self._group, self._arena, self._policy, self._block_pages = group, arena, policy, block_pages
        self._owed, self._alone = owed, alone
        least = -(-group.pages_per_block // (_LEAST_SHARE * block_pages))
        self._least = max(least, -(-_LEAST_TOKENS // group.block_size))

    def expect(self, table: BlockTable, begin: int, num_blocks: int) -> None:
        """A prompt of ``num_blocks`` full blocks is to be computed, and ``begin`` of them are cached."""
        one = self._of(table)
        one.since, one.num_blocks = begin, num_blocks
        one.step = max(self._least, -(-(num_blocks - begin) // _MOST_PLACES))

    def _of(self, table: BlockTable) -> StateTable:
        one = table.windows[self._group.number - 1]
        assert isinstance(one, StateTable)
        return one

    def choose(self, table: BlockTable, start: int, stop: int) -> None:
        """Choose among the places in the tokens from ``start`` to ``stop`` of a prompt, which are to be computed."""
        one, size = self._of(table), table.block_size
        if not one.step or start >= stop:
            return
        spare = self._arena.num_free - self._owed(table, one.num_blocks * size)
        since = one.since
        for depth in [depth for depth in table.due if start < depth * size <= stop]:
            if spare < self._group.pages_per_block and not self._is_promised(table, depth, since):
                self._group.skip(one, depth, place_in(table, one, depth))
            else:
                since = depth
        if self._alone:
            self._choose_inside(table, one, start, stop, spare)
        taken = (depth for depth in table.due if depth * size <= stop and depth not in one.skipped)
        one.since = max(one.since, *taken, 0)

    def _is_promised(self, table: BlockTable, depth: int, since: int) -> bool:
        """Whether a place takes a snapshot: its value is not clearly below the value of the pages that it occupies."""
        place, saved, pages = JUNCTION, max(0, depth - since), self._group.pages_per_block
        if depth in table.tails:
            place, pages = PROMPT, pages + saved * self._block_pages
        price = self._arena.next_value()
        return _CLEARLY * self._policy.value_of_new(place, depth) * saved >= price * pages

    def _choose_inside(self, table: BlockTable, one: StateTable, start: int, stop: int, spare: int) -> None:
        """Add places between the places that are due, as far as the sequence has blocks of states for them.

        If the prompt continues after this chunk, the sequence keeps the states behind its last full block anyway, and
        one block is left for its next chunk.
        """
        size, group, due = table.block_size, self._group, table.due
        first, last = start // size, stop // size
        marks = [depth for depth in due if start < depth * size < stop]
        room = group.most_blocks - len(one.blocks) - len(marks) - group.marks_start(one, start, stop)
        goes_on = first < last and stop < due[-1] * size
        if goes_on:
            if last * size < stop and last not in marks:
                if not group.keeps_last(one, start, stop, due):
                    return
                room -= 1
            if room < 0:
                return
            room -= 1
        room = max(0, room)
        since = one.since
        while (following := next((depth for depth in due if depth > since), 0)) and since < last:
            end = min(last, following - one.step)
            worth = since + self._apart(one, since, spare)
            for depth in range(since + one.step, min(end + 1, worth), one.step):
                if depth > first:
                    group.skip(one, depth, INSIDE)
            begin = max(since, first)
            depth = max(worth, begin - (begin - last) // (room + 1))
            if depth > end or (not room and not (goes_on and depth == last)):
                since = following
                continue
            insort(due, depth)
            one.inside.append(depth)
            room -= depth != last
            since = depth

    def _apart(self, one: StateTable, since: int, spare: int) -> int:
        """The number of blocks behind ``since`` from which on a snapshot is worth its pages."""
        pages, most = self._group.pages_per_block, one.num_blocks
        blocks = most if spare <= 0 else _FREE_SHARE * (most - since) * pages / spare
        if (price := self._group.next_value()) is not None:
            value = self._policy.value_of_new(INSIDE, since + one.step)
            blocks = min(blocks, _TIMES_MORE * price * pages / max(value, _LEAST_VALUE))
        return max(one.step, min(most, ceil(blocks)))


def place_in(table: BlockTable, one: WindowTable, depth: int) -> int:
    """The kind of a place where a prompt takes a snapshot (see ``roles``). ``one``: the table of the group."""
    if depth in table.tails:
        return PROMPT
    return INSIDE if isinstance(one, StateTable) and depth in one.inside else JUNCTION


def worth_of(
    groups: Sequence[WindowGroup],
    arena: Arena,
    policy: EvictionPolicy,
    block_pages: int,
    owed: Callable[[BlockTable, int], int],
) -> PlaceWorth | None:
    """The ``PlaceWorth`` of the group of states in ``groups``; None: no group has states, or values are not learned."""
    states = [group for group in groups if isinstance(group, StateGroup)]
    return (
        PlaceWorth(states[0], arena, policy, block_pages, owed, alone=len(groups) == 1)
        if states and policy.learns
        else None
    )
