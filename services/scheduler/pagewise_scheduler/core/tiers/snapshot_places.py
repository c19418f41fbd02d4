"""Where a prompt takes snapshots.

A window serves some places before its end, too. States serve one place alone, so a snapshot of states that lies a block
too far is worth nothing. The next prompt often changes the last tokens of a prompt: of its template, or back to a place
where the text was cut. So it is counted how many blocks before their ends prompts are left, and the snapshot is taken
where it is worth the most.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from pagewise_scheduler.core.memory.block_table import BlockTable, CachedPrefix, StateTable
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, ancestors
from pagewise_scheduler.core.tiers.declared_places import add_declared
from pagewise_scheduler.core.tiers.place_worth import PlaceWorth
from pagewise_scheduler.core.tiers.snapshots import Snapshot, SnapshotPool
from pagewise_scheduler.core.tiers.states import StateGroup
from pagewise_scheduler.core.tiers.windows import WindowGroup

_MOST_LEFT = 64
"""Blocks before the end of a prompt in which it may be left for the next one."""
_NEAR = 5
"""Numbers of such blocks that are as likely as each other until more is known."""
_MOST_COUNTED = 512.0
"""Prompts that are counted before their number is halved."""


class SnapshotPlaces:
    """Chooses places by statistics of earlier prompts. ``worth``: decides for states whose values are learned."""

    def __init__(self, worth: PlaceWorth | None) -> None:
        self._worth = worth
        # By number of blocks: prompts that were left so many blocks before their end. At first, as if two had been,
        # anywhere near it: a place that is some blocks too early costs little, and one that is too late all.
        self._left = [0.4] * _NEAR + [0.0] * (_MOST_LEFT - _NEAR)

    def expect(
        self,
        table: BlockTable,
        prefix: CachedPrefix,
        num_blocks: int,
        groups: Sequence[WindowGroup],
        declared: Sequence[int],
        fork: int,
    ) -> None:
        """Note in the table of a prompt of ``num_blocks`` full blocks, which begins with ``prefix``, where it is to
        take snapshots. ``declared``: further places, in tokens. ``fork``: see ``StateTable``."""
        for one in table.windows:
            if isinstance(one, StateTable):
                one.fork = fork
        begin = max(prefix.resume, len(prefix.blocks))
        self._choose(table, prefix, begin, num_blocks, groups)
        if declared:
            add_declared(table, begin, declared, groups)
        if self._worth is not None:
            self._worth.expect(table, begin, num_blocks)

    def computes(self, table: BlockTable, start: int, stop: int) -> None:
        """The tokens from ``start`` to ``stop`` of a prompt are to be computed next."""
        if self._worth is not None:
            self._worth.choose(table, start, stop)

    def _choose(
        self, table: BlockTable, prefix: CachedPrefix, begin: int, num_blocks: int, groups: Sequence[WindowGroup]
    ) -> None:
        end, junction = num_blocks, prefix.junction
        states = next((group for group in groups if isinstance(group, StateGroup)), None)
        if states is not None:
            self._observe(prefix.path, junction, states)
            end -= self._before_end(end - begin)
        due = [begin] if begin and any(not one.blocks for one in prefix.windows) else []
        table.tails = {depth: num_blocks - depth for depth in (*due, end)}
        if begin < junction < end - min(group.margin for group in groups):
            due.append(junction)
        table.due = [*due, end] if begin < end else due

    def _observe(self, path: Sequence[CachedBlock], junction: int, pool: SnapshotPool) -> None:
        """A prompt has ``junction`` blocks in common with earlier ones: count how far before its end it has left the
        prompt that it follows."""
        if not 0 < junction <= len(path):
            return
        node = path[junction - 1]
        if node in pool.at and not node.children:
            return  # the blocks behind it were evicted
        if (followed := _prompt_near(islice(_behind(node), _MOST_LEFT), pool)) is None:
            followed = _prompt_near(islice(ancestors(node), _MOST_LEFT), pool)
        if followed is not None and followed.tail is not None:
            left = followed.node.depth + followed.tail - junction
            if left < _MOST_LEFT:
                self._count(max(0, left))

    def _count(self, left: int) -> None:
        self._left[left] += 1.0
        if sum(self._left) > _MOST_COUNTED:
            self._left = [count / 2 for count in self._left]

    def _before_end(self, num_blocks: int) -> int:
        """How many blocks before the end of a prompt the states are worth the most, if ``num_blocks`` would be computed
        again without them."""
        best, most, begins = 0, 0.0, 0.0
        for left, count in zip(range(num_blocks), self._left, strict=False):
            begins += count
            if begins * (num_blocks - left) > most:
                best, most = left, begins * (num_blocks - left)
        return best


def _behind(node: CachedBlock) -> Iterator[CachedBlock]:
    """The newest of the blocks behind a block, one after the other."""
    while node.children:
        node = next(reversed(node.children.values()))
        yield node


def _prompt_near(path: Iterable[CachedBlock], pool: SnapshotPool) -> Snapshot | None:
    """The first snapshot on ``path`` that was taken near the end of a prompt."""
    found = (pool.at.get(node) for node in path)
    return next((one for one in found if one is not None and one.tail is not None), None)
