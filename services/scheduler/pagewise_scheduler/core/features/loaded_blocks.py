"""Counts of the blocks that were loaded ahead of their use, and of the ones that were used."""

from collections.abc import Sequence

from pagewise_shared.protocol import DEVICE

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock

_LEAST_UNPROVED, _UNPROVED_SHARE, _PROOF_SECONDS = 64, 0.02, 600.0
"""Learned times may load so many blocks, or this part of the device, more than twice the used ones; after the seconds,
all of them count half."""


class LoadedBlocks:
    """Counts the blocks that were loaded ahead, and the ones of them that were used. It is a ``BlockWatcher``.

    ``num_loaded``, ``num_used``: so far.
    """

    def __init__(self) -> None:
        self.num_loaded = self.num_used = 0
        self._unused: dict[CachedBlock, bool] = {}  # whether at a learned time
        self._learned = self._learned_used = self._halved = 0.0

    def asked(self, num_blocks: int) -> None:
        """So many blocks are to come at a learned time."""
        self._learned += num_blocks

    def came(self, node: CachedBlock, *, learned: bool) -> None:
        """A block has come."""
        self._unused[node] = learned
        self.num_loaded += 1

    def is_proved(self, now: float, num_blocks: int) -> bool:
        """Whether enough of the blocks that were loaded at learned times have been used to load more.

        ``now``: seconds. ``num_blocks``: of the device.
        """
        if now - self._halved > _PROOF_SECONDS:
            self._halved, self._learned, self._learned_used = now, self._learned / 2, self._learned_used / 2
        return self._learned <= 2 * self._learned_used + max(_LEAST_UNPROVED, _UNPROVED_SHARE * num_blocks)

    def entered(self, node: CachedBlock, tier: int) -> None:
        """Do nothing: ``came`` counts."""

    def left(self, node: CachedBlock, tier: int) -> None:
        """A block that leaves the device was not used."""
        if tier == DEVICE:
            self._unused.pop(node, None)

    def used(self, nodes: Sequence[CachedBlock]) -> None:
        """Count the blocks of these that were loaded ahead."""
        for node in self._unused.keys() & nodes:
            self._learned_used += self._unused.pop(node)
            self.num_used += 1

    def all_gone(self) -> None:
        """None of them will be used."""
        self._unused.clear()
