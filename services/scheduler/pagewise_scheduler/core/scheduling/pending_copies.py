"""Copies between the blocks of one executor that the next plan asks for."""

from collections.abc import Iterable
from itertools import chain

from pagewise_shared.block_hash import pack_names
from pagewise_shared.protocol import DEVICE, BlockCopies, pack_int32s

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, name_of
from pagewise_scheduler.core.tiers.tier import Copies

_Lists = dict[tuple[int, int], list[int | CachedBlock]]
"""Pairs of source block and target block, one after the other, by source tier and target tier."""


class PendingCopies:
    """Collects copies, and puts them into lists between two tiers each, in an order in which each copy reads what it is
    meant to read.

    Demotions come first, because what they read on the device may be written by whatever follows; of several, those out
    of the lower tiers, because the others write there. Then come the copies inside the device. A list names a target
    more than once if a tier has given up again what was to come there: the last of its sources counts.
    """

    __slots__ = ("_inside", "_lists", "_written")

    def __init__(self) -> None:
        self._inside: list[int] = []
        self._lists: list[_Lists] = []
        self._written: set[tuple[int, int | CachedBlock]] = set()

    def __bool__(self) -> bool:
        return bool(self._inside or self._lists)

    @property
    def demotes(self) -> bool:
        """Whether blocks are among them that go to a lower tier."""
        return bool(self._lists)

    def add(self, copies: Copies) -> None:
        """Copies that have to be made before anything is written that they read."""
        for source, source_block, target, target_block in copies:
            if target == DEVICE:
                assert isinstance(target_block, int)
                self._inside += (source_block, target_block)
                continue
            # A block that came to its tier only now, and goes on already, has to have come first.
            if not self._lists or (source, source_block) in self._written:
                self._lists.append({})
                self._written.clear()
            self._lists[-1].setdefault((source, target), []).extend((source_block, target_block))
            self._written.add((target, target_block))

    def give_up(self, blocks: Iterable[int]) -> None:
        """Copies inside the device into these blocks are not wanted any more."""
        targets = set(blocks)
        pairs = zip(self._inside[::2], self._inside[1::2], strict=True)
        self._inside = [block for pair in pairs if pair[1] not in targets for block in pair]

    def forget_copies_on_write(self) -> None:
        """Nobody wants the copies inside the device any more; what was evicted is still to be kept."""
        self._inside = []

    def clear(self) -> None:
        """The executor has lost everything."""
        self._inside, self._lists = [], []
        self._written.clear()

    def take(self) -> list[BlockCopies]:
        """All of them, in order; none are left."""
        taken = [
            _listed(source, target, lists[source, target])
            for lists in self._lists
            for source, target in sorted(lists, reverse=True)
        ]
        if self._inside:
            taken.append(BlockCopies(DEVICE, DEVICE, pack_int32s(self._inside)))
        self.clear()
        return taken


def _listed(source: int, target: int, pairs: list[int | CachedBlock]) -> BlockCopies:
    nodes = [node for node in pairs[1::2] if isinstance(node, CachedBlock)]
    if not nodes:
        return BlockCopies(source, target, pack_int32s(pairs))  # type: ignore[arg-type]
    indexed = chain.from_iterable(zip(pairs[::2], range(len(nodes)), strict=True))
    return BlockCopies(source, target, pack_int32s(indexed), names=pack_names(map(name_of, nodes)))  # type: ignore[arg-type]
