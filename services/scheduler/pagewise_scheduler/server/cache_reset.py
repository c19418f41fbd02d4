"""Releases the cached blocks of all executors for an operator."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import count

import msgspec
from pagewise_shared.logs import printable
from pagewise_shared.protocol import ResetCache, StoredDropped, tier_name
from pagewise_shared.reports import CacheReset, ExecutorReset

from pagewise_scheduler.core.tiers.cache_reset import reset_cache
from pagewise_scheduler.core.tiers.hashed import HashedTier
from pagewise_scheduler.server.executor_handle import ExecutorHandle

log = logging.getLogger(__name__)

_MOST_TEXT = 200


@dataclass(slots=True, eq=False)
class _Reset:
    """A reset. ``num_missing``: answers about tiers without ids that have not come."""

    salt: str
    answer: Callable[[bytes], None]
    report: CacheReset = field(default_factory=lambda: CacheReset([]))
    num_missing: int = 0

    def came(self) -> None:
        """Count an answer, and answer the operator after the last one."""
        self.num_missing -= 1
        if self.num_missing:
            return
        log.info("an operator has reset the cache%s: %s", " of one salt" if self.salt else "", self.report.executors)
        self.answer(msgspec.json.encode(self.report))


@dataclass(slots=True, eq=False)
class _Drop:
    """The blocks of one tier that an executor deletes. ``result``: receives the outcome."""

    reset: _Reset
    executor: ExecutorHandle
    tier: HashedTier
    result: ExecutorReset


class CacheResets:
    """The resets of operators. A reset that deletes blocks in tiers without ids is answered when all executors have.

    Each executor deletes blocks, although several may share a tier: only it knows when its own copies to the tier are
    made. ``guard``: see ``ExecutorRegistry.guarded``.
    """

    def __init__(self, guard: Callable[[ExecutorHandle], AbstractContextManager[None]]) -> None:
        self._guard = guard
        self._numbers = count(1)
        self._drops: dict[int, _Drop] = {}

    def begin(self, message: ResetCache, executors: Sequence[ExecutorHandle], answer: Callable[[bytes], None]) -> None:
        """Release the blocks of a cache salt (empty: all blocks). ``answer``: called with a ``CacheReset`` as JSON, now
        or later."""
        reset = _Reset(message.salt, answer)
        reset.num_missing = 1  # an executor may be lost here
        for executor in executors:
            with self._guard(executor):
                self._reset(executor, reset, external=message.external)
        reset.came()

    def _reset(self, executor: ExecutorHandle, reset: _Reset, *, external: bool) -> None:
        kv = executor.scheduler.kv
        for feature in executor.scheduler.features.in_use:
            feature.cache_reset(reset.salt)
        kept = [] if external else [tier_name(number) for number in kv.hashed]
        result = ExecutorReset(executor.executor_id, "pages" if kv.windows else "blocks", {}, 0, kept)
        reset.report.executors.append(result)
        for tier in kv.hashed.values() if external else ():
            number = next(self._numbers)
            self._drops[number] = _Drop(reset, executor, tier, result)
            reset.num_missing += 1
            executor.drop_salt(number, tier, reset.salt)
        outcome = reset_cache(kv, reset.salt)
        result.released |= {tier_name(number): num_released for number, num_released in outcome.released.items()}
        result.in_use = outcome.num_in_use
        executor.touch()

    def dropped(self, executor: ExecutorHandle, message: StoredDropped) -> None:
        """Take the answer of an executor; answers to no question of a reset are ignored."""
        drop = self._drops.get(message.number)
        if drop is not None and drop.executor is executor:
            self._take(message.number, max(0, message.num_blocks), printable(message.error, _MOST_TEXT))

    def lost(self, executor: ExecutorHandle) -> None:
        """Give up the answers of an executor that is gone."""
        for number in [number for number, drop in self._drops.items() if drop.executor is executor]:
            self._take(number, 0, "the executor is gone, and may have deleted a part")

    def _take(self, number: int, num_blocks: int, error: str) -> None:
        drop = self._drops.pop(number)
        drop.result.released[drop.tier.name] = num_blocks
        if error:
            drop.result.failed[drop.tier.name] = error
        drop.reset.came()
