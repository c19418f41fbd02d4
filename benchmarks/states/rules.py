"""Rules for where snapshots of states are taken: rules of other servers, fixed grids, and the rule of an oracle.

Each is the product's memory with other places. The product's policy decides the order of eviction.
"""

from collections.abc import Callable, Iterable, Sequence

from pagewise_scheduler.core.memory.block_table import BlockTable, CachedPrefix
from pagewise_scheduler.core.tiers.grouped import GroupedKVCacheManager

from benchmarks.states.models import BLOCK_SIZE, Model
from benchmarks.states.traces import Future

Places = Callable[[int, int, int], Iterable[int]]
"""Where a prompt takes snapshots, in blocks: of the place where it begins, its junction, and its blocks."""


def _aligned(end: int, tokens: int) -> int:
    return end * BLOCK_SIZE // tokens * tokens // BLOCK_SIZE


def fixed(places: Places, *, answers: bool = False) -> type[GroupedKVCacheManager]:
    """The product's memory with snapshots at ``places``; ``answers``: and at the end of each answer."""

    class Fixed(GroupedKVCacheManager):
        def expect_snapshots(
            self, table: BlockTable, prefix: CachedPrefix, num_tokens: int, _places: Sequence[int] = (), _fork: int = 0
        ) -> None:
            begin, end = max(prefix.resume, len(prefix.blocks)), num_tokens // self.block_size
            table.due = sorted(depth for depth in {*places(begin, prefix.junction, end)} if begin < depth <= end)

        def take_snapshots(self, table: BlockTable) -> None:
            if answers:
                super().take_snapshots(table)

    return Fixed


def _grid(step: int) -> Places:
    return lambda begin, junction, end: range(0, end + 1, step)


def rules(model: Model) -> dict[str, type[GroupedKVCacheManager]]:
    """The fixed rules, and the product's own."""
    grids = {f"each {size:,}": fixed(_grid(size // BLOCK_SIZE)) for size in (256, 1024, 4096)}
    return {
        "align": fixed(lambda begin, _, end: [_aligned(end, model.align)]),
        **grids,
        "branch": fixed(lambda begin, junction, end: [_aligned(junction, 64), _aligned(end, 64)], answers=True),
        "ours": GroupedKVCacheManager,
    }


class Known:
    """The knowledge of the oracle: the ``future`` of the trace, at the request ``index``."""

    def __init__(self, future: Future) -> None:
        self.future, self.index = future, 0

    def is_begun(self, depth: int) -> bool:
        """Whether a later request begins behind so many blocks of the present one."""
        return self.future.next_begin(self.future.paths[self.index][depth - 1], self.index) is not None


def oracle(known: Known) -> type[GroupedKVCacheManager]:
    """The product's memory with snapshots where later requests begin, and nowhere else."""

    class Oracle(fixed(lambda begin, _, end: filter(known.is_begun, range(begin + 1, end + 1)))):  # type: ignore[misc]
        def take_snapshots(self, table: BlockTable) -> None:
            depth = table.num_known
            if 0 < depth <= len(known.future.paths[known.index]) and known.is_begun(depth):
                GroupedKVCacheManager.take_snapshots(self, table)

    return Oracle
