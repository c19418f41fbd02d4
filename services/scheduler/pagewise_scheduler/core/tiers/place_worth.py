"""Which places of a prompt are worth a snapshot of states, and the places inside of prompts that are.

A snapshot is worth the seconds that it saves, times its expected uses, per page. Free pages cost nothing. Other pages
cost the value of the memory that is evicted for them. So a long prompt takes snapshots inside of it, too: densely while
pages are free, else as far from each other as the saved seconds outweigh what is evicted. And a place where a snapshot
is clearly worth less than other memory takes none.

A place that takes none is remembered as if it had taken one that was lost. So life tables learn what is missed there.
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
"""Places inside of a prompt are so far from each other that the KV between them takes at least one in so many bytes of
a snapshot."""
_MOST_PLACES = 32
"""Places inside of a prompt."""
_FREE_SHARE = 2
"""One in so many of the free pages may be taken by the snapshots inside of one prompt."""
_CLEARLY = 16.0
"""A snapshot that the rules of places promise is not taken if other memory is worth so many times as much."""
_TIMES_MORE = 2.0
"""A snapshot inside of a prompt is worth so many times as much as what is evicted for it: many are never used."""
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
        """A prompt of ``num_blocks`` full blocks is computed, of which ``begin`` are cached."""
        one = self._of(table)
        one.since, one.num_blocks = begin, num_blocks
        one.step = max(self._least, -(-(num_blocks - begin) // _MOST_PLACES))

    def _of(self, table: BlockTable) -> StateTable:
        one = table.windows[self._group.number - 1]
        assert isinstance(one, StateTable)
        return one

    def choose(self, table: BlockTable, start: int, stop: int) -> None:
        """The tokens from ``start`` to ``stop`` of a prompt are to be computed: choose among the places there."""
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
        """Whether a place takes a snapshot, unless it is clearly not worth its pages and those that go with it."""
        place, saved, pages = JUNCTION, max(0, depth - since), self._group.pages_per_block
        if depth in table.tails:
            place, pages = PROMPT, pages + saved * self._block_pages
        price = self._arena.next_value()
        return _CLEARLY * self._policy.value_of_new(place, depth) * saved >= price * pages

    def _choose_inside(self, table: BlockTable, one: StateTable, start: int, stop: int, spare: int) -> None:
        """Add places between those that are due, as far as the sequence has blocks of states for them.

        It keeps the states behind its last full block anyway, if the prompt goes on. One block is left for its next
        chunk.
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
        """How many blocks behind ``since`` a snapshot is worth its pages."""
        pages, most = self._group.pages_per_block, one.num_blocks
        blocks = most if spare <= 0 else _FREE_SHARE * (most - since) * pages / spare
        if (price := self._group.next_value()) is not None:
            value = self._policy.value_of_new(INSIDE, since + one.step)
            blocks = min(blocks, _TIMES_MORE * price * pages / max(value, _LEAST_VALUE))
        return max(one.step, min(most, ceil(blocks)))


def place_in(table: BlockTable, one: WindowTable, depth: int) -> int:
    """What is at a place where a prompt takes a snapshot (see ``roles``). ``one``: the table of the group."""
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
    """For the states among ``groups``; None: there are none, or their values are not learned."""
    states = [group for group in groups if isinstance(group, StateGroup)]
    return (
        PlaceWorth(states[0], arena, policy, block_pages, owed, alone=len(groups) == 1)
        if states and policy.learns
        else None
    )
