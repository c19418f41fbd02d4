"""Where a prompt takes snapshots of states.

States serve one place alone, so a snapshot that lies a block too far is worth nothing. The prompt behind often changes
the last tokens of a prompt: of its template, or back to a place where it was cut. So it is counted how many blocks
before their ends prompts are left, and the snapshot is taken where most of them can begin with it.
"""

from collections.abc import Sequence

from pagewise_scheduler.core.memory.eviction_roles import Place, role
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, ancestors
from pagewise_scheduler.core.tiers.snapshots import SnapshotPool

_MOST_LEFT = 64
"""Blocks before the end of a prompt in which it may be left for the next one."""
_LEAST_TOKENS = 256
"""Least tokens between places inside of a prompt."""
_MOST_COUNTED = 512.0
"""Prompts that are counted before their number is halved."""


class SnapshotPlaces:
    """Chooses places by what was seen of earlier prompts."""

    def __init__(self, block_size: int) -> None:
        self._least = -(-_LEAST_TOKENS // block_size)
        # By number of blocks: prompts that were left so many blocks before their end. At first, as if a template had
        # changed in one of two.
        self._left = [1.0, 1.0, *[0.0] * (_MOST_LEFT - 2)]

    def inside(self, first: int, last: int, spacing: float) -> list[int]:
        """Places between two others, with at least so many blocks between them."""
        least = max(spacing, self._least)
        number = int((last - first) / least) - 1
        return [first + (last - first) * index // (number + 1) for index in range(1, number + 1)]

    def observe(self, path: Sequence[CachedBlock], begin: int, junction: int, pool: SnapshotPool) -> None:
        """A prompt has ``junction`` blocks in common with earlier ones: count how far before its end it has left the
        prompt that it follows, or that it has left one in its inside. It begins behind ``begin`` blocks."""
        if not 0 < junction <= len(path):
            return
        node: CachedBlock | None = path[junction - 1]
        assert node is not None
        if node in pool.at and not node.children:
            return  # the blocks behind were evicted
        for _ in range(_MOST_LEFT):
            snapshot = pool.at.get(node)
            if snapshot is not None and snapshot.place == Place.PROMPT and snapshot.node.depth > junction:
                break
            if not node.children:
                snapshot = None
                break
            node = next(reversed(node.children.values()))
        if snapshot is None:
            near = zip(range(_MOST_LEFT), ancestors(path[junction - 1]), strict=False)
            found = (one for _, node in near if (one := pool.at.get(node)) is not None and one.place == Place.PROMPT)
            snapshot = next(found, None)
        if snapshot is None and junction - begin >= self._least:
            pool.roles.used(role(Place.INSIDE, 0, followed=True))  # it would have been
        elif snapshot is not None:
            left = max(0, snapshot.node.depth + snapshot.tail - junction)
            if left < _MOST_LEFT:
                self._count(left)

    def _count(self, left: int) -> None:
        self._left[left] += 1.0
        if sum(self._left) > _MOST_COUNTED:
            self._left = [count / 2 for count in self._left]

    def before_end(self, num_blocks: int) -> int:
        """How many blocks before the end of a prompt the states are worth the most, if ``num_blocks`` would be computed
        again without them."""
        best = most = 0.0
        begins = 0.0
        for left, count in zip(range(num_blocks), self._left, strict=False):
            begins += count
            if begins * (num_blocks - left) > most:
                best, most = left, begins * (num_blocks - left)
        return int(best)
