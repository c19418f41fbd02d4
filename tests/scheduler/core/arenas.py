"""Schedulers of executors with several groups of layers, and the check of their arenas."""

from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.grouped import GroupedKVCacheManager
from pagewise_scheduler.core.tiers.windows import ArenaShape, WindowShape
from pagewise_shared.config.options import EvictionName

from tests.scheduler.core.driving import check_states


def create(
    num_pages: int, pages: int, windows: tuple[WindowShape, ...], *, budget: int = 32, seqs: int = 8,
    block_size: int = 4, eviction: EvictionName = "lru",
) -> Scheduler:  # fmt: skip
    shape = ArenaShape(num_pages, pages, windows, 2 * budget)
    return Scheduler(
        num_blocks=num_pages // pages,
        block_size=block_size,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        shape=shape,
        eviction=eviction,
    )


def check_arena(scheduler: Scheduler) -> None:
    """Pages add up, and without requests everything that is held may be evicted."""
    kv = scheduler.kv
    assert isinstance(kv, GroupedKVCacheManager)
    check_states(kv.pool)
    arena = kv._arena
    used = kv.pool.num_used * kv.pool.pages_per_block  # type: ignore[attr-defined]
    used += sum(group.num_used * group.pages_per_block for group in kv.windows)
    assert 0 <= arena.num_free == arena.num_pages - used
    for group in kv.windows:
        held = [0] * group.num_blocks
        for snapshot in set(group.at.values()):
            for block in snapshot.blocks:
                held[block] += 1
        assert held == group._snapshots
        assert group.num_cached == sum(1 for block in range(group.num_blocks) if held[block] and not group.users(block))
        free = set(group._free)
        assert len(free) == len(group._free)
        assert all((block in free) == (not held[block] and not group.users(block)) for block in range(group.num_blocks))
    mapped = 0
    for member in arena.members:
        mapped += (member.num_blocks - member.num_unmapped) * member.pages_per_block
        assert 0 <= member.num_unmapped <= member.num_blocks - member.num_used
    assert mapped <= arena.num_pages
    if not scheduler.requests and not scheduler.steps_in_flight:
        assert kv.num_available == arena.num_pages
