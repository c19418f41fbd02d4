"""Where a prompt takes snapshots.

A window serves some places before its end, too. States serve one place alone, so a snapshot of states that lies a block
too far is worth nothing. The next prompt often changes the last tokens of a prompt: of its template, or back to a place
where the text was cut. So it is counted how many blocks before their ends prompts are left, and the snapshot is taken
where it is worth the most.

Inside of long prompts a snapshot saves something if another prompt leaves there. That is so seldom that none is worth
the pages of what would be evicted for it, so there are no more of them than the prompt leaves pages free for.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from pagewise_scheduler.core.memory.block_table import BlockTable, CachedPrefix
from pagewise_scheduler.core.memory.eviction import EvictionPolicy
from pagewise_scheduler.core.memory.eviction_roles import Place
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, ancestors
from pagewise_scheduler.core.tiers.snapshot import Snapshot
from pagewise_scheduler.core.tiers.snapshots import SnapshotPool
from pagewise_scheduler.core.tiers.windows import WindowGroup

_MOST_LEFT = 64
"""Blocks before the end of a prompt in which it may be left for the next one."""
_LEAST_TOKENS = 256
"""Least tokens between places inside of a prompt."""
_MOST_COUNTED = 512.0
"""Prompts that are counted before their number is halved."""


class SnapshotPlaces:
    """Chooses places by what was seen of earlier prompts; inside of prompts, only if ``policy`` learns."""

    def __init__(self, block_size: int, policy: EvictionPolicy) -> None:
        self._block_size, self._policy = block_size, policy
        self._least = -(-_LEAST_TOKENS // block_size)
        # By number of blocks: prompts that were left so many blocks before their end. At first, as if templates had
        # changed in four of eight.
        self._left = [4.0, 4.0, *[0.0] * (_MOST_LEFT - 2)]

    def choose(
        self,
        table: BlockTable,
        prefix: CachedPrefix,
        begin: int,
        end: int,
        groups: Sequence[WindowGroup],
        num_free: int,
    ) -> None:
        """Note in the table of a prompt of ``end`` full blocks, of which ``begin`` are cached, where it is to take
        snapshots. ``num_free``: free pages that it leaves."""
        table.end, junction = end, prefix.junction
        states = next((group for group in groups if not group.margin), None)
        place = Place.JUNCTION
        if states is not None:
            place = self._observe(prefix.path, junction, states)
            end -= self._before_end(end - begin)
        places = dict[int, Place]()
        if begin and any(not one.blocks for one in prefix.windows):
            places[begin] = Place.PROMPT
        if begin < junction < end - min(group.margin for group in groups):
            places[junction] = place
        if states is not None:
            first = max(begin, junction)
            most = num_free // states.pages_per_block if self._policy.learns else 0
            places |= dict.fromkeys(self._inside(first, end, most), Place.INSIDE)
        if begin < end:
            places[end] = Place.PROMPT
        table.places, table.due = places, [*places]

    def leave_out(self, table: BlockTable, start: int, num_tokens: int, groups: Sequence[WindowGroup]) -> None:
        """Take fewer snapshots inside of a prompt if a step from ``start`` to ``num_tokens`` tokens would need more
        blocks than a sequence may have."""
        room = min(group.most_blocks - len(one.blocks) - 1 for group, one in zip(groups, table.windows, strict=True))
        near = [depth for depth in table.due if start < depth * self._block_size < num_tokens]
        for depth in [one for one in near if table.places.get(one) == Place.INSIDE][: max(0, len(near) - room)]:
            table.due.remove(depth)

    def _inside(self, first: int, last: int, most: int) -> list[int]:
        """At most so many places between two others."""
        number = max(0, min(most, (last - first) // self._least - 1))
        return [first + (last - first) * index // (number + 1) for index in range(1, number + 1)]

    def _observe(self, path: Sequence[CachedBlock], junction: int, pool: SnapshotPool) -> Place:
        """A prompt has ``junction`` blocks in common with earlier ones: count how far before its end it has left the
        prompt that it follows. Returns whether that was near its end, or in its inside."""
        if not 0 < junction <= len(path):
            return Place.JUNCTION
        node = path[junction - 1]
        if node in pool.at and not node.children:
            return Place.LEFT  # the blocks behind it were evicted
        if (followed := _prompt_near(islice(_behind(node), _MOST_LEFT), pool)) is None:
            followed = _prompt_near(islice(ancestors(node), _MOST_LEFT), pool)
        if followed is not None and (left := followed.node.depth + followed.tail - junction) < _MOST_LEFT:
            self._count(max(0, left))
            return Place.LEFT
        return Place.JUNCTION

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
    return next((one for one in found if one is not None and one.place == Place.PROMPT), None)
