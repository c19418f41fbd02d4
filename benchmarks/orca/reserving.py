"""KV memory as it was before paging: each sequence gets one contiguous piece for all it may come to need.

The baselines of the vLLM paper (arXiv 2309.06180, section 6.1), which are Orca (OSDI 2022) with three ideas of how much
to reserve, over a buddy allocator. They run under the same scheduler as everything else.
"""

from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

from pagewise_scheduler.core.memory.block_table import BlockTable, CachedPrefix
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.scheduling import scheduler
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager
from pagewise_scheduler.core.tiers.tier import Copies

Reservation = Literal["max", "pow2", "oracle"]


class BuddyAllocator:
    """Pieces of power-of-two size from ``num_slots`` slots; a freed piece joins its buddy when that is free too.

    Source: Knuth, The Art of Computer Programming 1, 2.5. A size that is no power of two is a row of top pieces.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"there has to be at least one slot, not {num_slots}")
        self.num_slots = num_slots
        self._free: dict[int, set[int]] = {}
        self._tops: list[tuple[int, int]] = []
        start = 0
        while start < num_slots:
            order = (num_slots - start).bit_length() - 1
            self._tops.append((start, order))
            self._free.setdefault(order, set()).add(start)
            start += 1 << order

    def fits(self, num_slots: int) -> bool:
        """Whether ``allocate`` would succeed."""
        order = _order(num_slots)
        return any(starts for size, starts in self._free.items() if size >= order)

    def allocate(self, num_slots: int) -> tuple[int, int]:
        """A piece of at least ``num_slots`` slots: (first slot, log2 of its size).

        Raises:
            MemoryError: none is free.
        """
        order = _order(num_slots)
        found = min((size for size, starts in self._free.items() if size >= order and starts), default=None)
        if found is None:
            raise MemoryError(f"no free piece of {num_slots} slots")
        start = min(self._free[found])
        self._free[found].remove(start)
        while found > order:
            found -= 1
            self._free.setdefault(found, set()).add(start + (1 << found))
        return start, order

    def free(self, piece: tuple[int, int]) -> None:
        """Give a piece back."""
        start, order = piece
        top_start, top_order = next(top for top in reversed(self._tops) if top[0] <= start)
        while order < top_order:
            buddy = top_start + ((start - top_start) ^ (1 << order))
            if buddy not in self._free.get(order, ()):
                break
            self._free[order].remove(buddy)
            start = min(start, buddy)
            order += 1
        self._free.setdefault(order, set()).add(start)

    @property
    def num_free(self) -> int:
        """Slots in free pieces, whatever their sizes."""
        return sum(len(starts) << order for order, starts in self._free.items())


@dataclass(slots=True)
class _Reserved(CachedPrefix):
    """No block is ever cached; ``cache_salt`` names the sequence of the reservation."""

    cache_salt: str | None = None


class ReservingKVManager(KVCacheManager):
    """Admits a sequence only if one piece holds all that is reserved for it.

    ``reservations``: slots by the sequence's ``cache_salt``, of which it has one of its own. ``pieces``: the pieces in
    use. The block tables beneath are bookkeeping: there are always blocks enough.
    """

    def __init__(self, num_slots: int, block_size: int, longest: int) -> None:
        super().__init__(num_blocks=2 * (num_slots // block_size + longest), block_size=block_size)
        self.buddy = BuddyAllocator(num_slots)
        self.reservations: dict[str | None, int] = {}
        self.pieces: dict[str | None, tuple[int, int]] = {}

    def begin_with(self, cache_salt: str | None, blocks: list[CachedBlock], rest: bytes) -> CachedPrefix:
        """Nothing is shared."""
        return _Reserved([], -1, 0, 0, cache_salt=cache_salt)

    def num_taken(self, prefix: CachedPrefix, num_tokens: int) -> int:
        """0 if the reservation fits, else more than there is."""
        assert isinstance(prefix, _Reserved)
        return 0 if self.buddy.fits(self.reservations[prefix.cache_salt]) else self.pool.num_blocks + 1

    def without_copy(self, prefix: CachedPrefix) -> CachedPrefix:
        """The same: nothing is copied."""
        return prefix

    def take(self, table: BlockTable, prefix: CachedPrefix) -> Copies:
        """Reserve."""
        self.pieces[table.cache_salt] = self.buddy.allocate(self.reservations[table.cache_salt])
        return ()

    def free(self, table: BlockTable, in_flight_step: int | None, output_tokens: int | None = None) -> None:
        """Give the piece back."""
        self.buddy.free(self.pieces.pop(table.cache_salt))
        super().free(table, in_flight_step, output_tokens)


def scheduler_over(kv: KVCacheManager, **options: Any) -> scheduler.Scheduler:
    """Return a scheduler with ``kv`` in the place of its own memory manager."""
    with patch.object(scheduler, "KVCacheManager", lambda *_, **__: kv):
        return scheduler.Scheduler(num_blocks=kv.pool.num_blocks, block_size=kv.block_size, **options)


def reserved_slots(kind: Reservation, num_prompt_tokens: int, num_output_tokens: int, max_model_len: int) -> int:
    """The slots that Orca reserves: the longest possible, the output rounded up to a power of two, or the exact
    need."""
    if kind == "max":
        return max_model_len
    if kind == "pow2":
        return min(max_model_len, num_prompt_tokens + (1 << (num_output_tokens - 1).bit_length()))
    return num_prompt_tokens + num_output_tokens


def _order(num_slots: int) -> int:
    return max(0, (num_slots - 1).bit_length())
