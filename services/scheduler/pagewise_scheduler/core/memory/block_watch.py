"""Watchers of the prefix tree's blocks: a tier with ids calls them when a block enters it, is used, and leaves it.

Without watchers, a tier does one test for each block.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Protocol

from pagewise_shared.protocol import DEVICE

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock

_MOST_USES = 4
"""The number of the last uses of a block between which gaps are reported."""


class BlockWatcher(Protocol):
    """Watches the blocks of one executor whose content is known. ``tier``: the number of a tier."""

    def entered(self, node: CachedBlock, tier: int) -> None:
        """A tier has the block from now on."""
        ...

    def left(self, node: CachedBlock, tier: int) -> None:
        """A tier does not have the block any more. The node still has its ancestors."""
        ...

    def used(self, nodes: Sequence[CachedBlock]) -> None:
        """A sequence begins with these blocks of the device."""
        ...

    def all_gone(self) -> None:
        """The executor or all its KV is lost, so no tier has any block any more."""
        ...


class BlockLifetimes:
    """Measures how long sampled blocks stay on the device, as vLLM does.

    ``sample``: the share of blocks that are measured, chosen by chance when they enter the device. ``report`` is called
    for each measured block that leaves, with three values: the seconds since the block entered, the seconds since its
    last use, and the seconds between its last uses. ``clock``: returns seconds.
    """

    def __init__(
        self,
        sample: float,
        report: Callable[[float, float, Iterable[float]], None],
        clock: Callable[[], float],
    ) -> None:
        self._sample, self._report, self._clock = sample, report, clock
        self._chance = random.random
        self._times: dict[CachedBlock, tuple[float, deque[float]]] = {}

    def entered(self, node: CachedBlock, tier: int) -> None:
        """Choose by chance whether the block is measured."""
        if tier == DEVICE and self._chance() < self._sample:
            self._times[node] = self._clock(), deque(maxlen=_MOST_USES)

    def left(self, node: CachedBlock, tier: int) -> None:
        """Report the block if it was measured."""
        if tier == DEVICE and (times := self._times.pop(node, None)) is not None:
            came, uses = times
            now, gaps = self._clock(), [after - before for before, after in pairwise(uses)]
            self._report(now - came, now - (uses[-1] if uses else came), gaps)

    def used(self, nodes: Sequence[CachedBlock]) -> None:
        """Note the time of this use for each measured block in ``nodes``."""
        if found := self._times.keys() & nodes:
            now = self._clock()
            for node in found:
                self._times[node][1].append(now)

    def all_gone(self) -> None:
        """Report nothing: the blocks were not evicted."""
        self._times.clear()
