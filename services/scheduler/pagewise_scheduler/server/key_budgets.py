"""The budgets of memory of API keys, as their gateways report them, in the memory of every executor."""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from weakref import WeakKeyDictionary

from pagewise_shared.block_hash import client_salt, salt_tag
from pagewise_shared.logs import printable
from pagewise_shared.protocol import HASH_TIERS, Hello, MemoryBudget, MemorySize, StoredBudget, tier_name

from pagewise_scheduler.core.memory.budgets import Budget
from pagewise_scheduler.core.tiers.memory_budgets import MemoryBudgets
from pagewise_scheduler.key_gauges import KeyMemory
from pagewise_scheduler.server.executor_handle import ExecutorHandle

log = logging.getLogger(__name__)


_MOST_OWNERS = 10_000
"""Maximum number of owners with budgets. Budgets of further owners are ignored."""
_MOST_REPORTS = 256
"""Gateways whose last budgets of an owner are remembered."""


def owner_of(cache_salt: str | None) -> str:
    """Return the owner of a cache salt: its first part, which the gateway has put there; "" without a salt."""
    return (client_salt(cache_salt) or "").partition("/")[0]


class KeyBudgets:
    """Sets the newest budgets of all owners at all executors. An executor adopts them as soon as it has no promised
    blocks to take back.

    Gateways that report different budgets of an owner have different files. The file that changed last counts, not the
    last request, and a warning names the gateways. A gateway that has never reported budgets of the owner changes none.

    ``executors``: returns the executors that take requests. ``gateways``: returns the names of the gateways that have
    joined.
    """

    def __init__(self, executors: Callable[[], list[ExecutorHandle]], gateways: Callable[[], Collection[str]]) -> None:
        self._executors, self._gateways = executors, gateways
        self._budgets: dict[str, tuple[MemoryBudget, ...]] = {}
        self._reported: dict[str, dict[str, tuple[MemoryBudget, ...]]] = {}  # by owner and gateway, the last one last
        self._version = 0
        self._memories: WeakKeyDictionary[ExecutorHandle, MemoryBudgets] = WeakKeyDictionary()
        self._versions: WeakKeyDictionary[ExecutorHandle, int] = WeakKeyDictionary()
        self._stored_versions: WeakKeyDictionary[ExecutorHandle, int] = WeakKeyDictionary()

    def set(self, gateway: str, cache_salt: str | None, budgets: tuple[MemoryBudget, ...]) -> None:
        """Give the owner of a cache salt these budgets, if the gateway of this name did not report them before."""
        owner = owner_of(cache_salt)
        reported = self._reported.get(owner, {})
        if not owner or budgets == reported.get(gateway, ()):
            return
        if reported or len(self._reported) < _MOST_OWNERS:
            reported = self._reported.setdefault(owner, reported)
            reported.pop(gateway, None)
            reported[gateway] = budgets
            self._warn(owner, gateway)
            if len(reported) > _MOST_REPORTS:
                del reported[next(iter(reported))]
            if budgets != self._budgets.get(owner, ()):
                self._budgets[owner] = budgets
                self._version += 1
                self.apply()

    def _warn(self, owner: str, gateway: str) -> None:
        """Warn if other gateways report other budgets than this one, which has just changed its own."""
        reported, joined = self._reported[owner], self._gateways()
        if others := [one for one in reported if one in joined and reported[one] != reported[gateway]]:
            log.warning(
                "gateways have different budgets of memory for %s in their files of API keys: those of %s count, which "
                "changed last, and not those of %s",
                printable(owner),
                gateway,
                ", ".join(others),
            )

    def apply(self) -> None:
        """Set the newest budgets at the executors that do not have them, where that is possible now."""
        for executor in self._executors():
            if self._stored_versions.get(executor) != self._version:
                self._stored_versions[executor] = self._version
                self._set_stored(executor)
            if self._versions.get(executor) != self._version and self._try_set(executor):
                self._versions[executor] = self._version

    def _set_stored(self, executor: ExecutorHandle) -> None:
        """Send an executor the budgets of its tiers without ids."""
        for tier in executor.scheduler.kv.hashed:
            budgets = [
                StoredBudget(salt_tag(owner), one)
                for owner, each in self._budgets.items()
                for one in each
                if one.tier == tier
            ]
            executor.set_stored_budgets(tier, tuple(budgets))

    def _try_set(self, executor: ExecutorHandle) -> bool:
        scheduler, kv = executor.scheduler, executor.scheduler.kv
        if all(one.tier in HASH_TIERS for each in self._budgets.values() for one in each) and not self._memories:
            return True
        if kv.windows:
            if executor not in self._versions:
                log.warning(
                    "%s: API keys have budgets of memory, and this model has none: its layers have several groups",
                    executor.executor_id,
                )
            return True
        memory = self._memories.get(executor)
        if memory is None:
            longest = min(scheduler.max_model_len, kv.capacity_tokens)
            memory = self._memories[executor] = MemoryBudgets(kv, owner_of, longest)
        budgets = {owner: self._in_blocks(executor, each) for owner, each in self._budgets.items()}
        before, kv.capacity_tokens = kv.capacity_tokens, memory.capacity_of(budgets)
        fits = all(
            scheduler.fits(len(request.prompt_token_ids), request.max_tokens, request.segments)
            for request in scheduler.requests
        )
        owed, scaled = scheduler.prefilling.blocks_owed() + scheduler.num_running, memory.scaled
        if not fits or not memory.try_set(budgets, owed):
            kv.capacity_tokens = before
            return False
        if memory.scaled and memory.scaled != scaled:
            log.warning(
                "%s: the minima of API keys take more than half of a tier (%s), or leave no room for the longest "
                "request (--max-model-len): all are made smaller by the same factor, see pagewise_key_memory_min_bytes",
                executor.executor_id,
                ", ".join(tier_name(number) for number in sorted(memory.scaled)),
            )
        return True

    def _in_blocks(self, executor: ExecutorHandle, budgets: tuple[MemoryBudget, ...]) -> dict[int, Budget]:
        tiers = executor.scheduler.kv.tiers

        def blocks(tier: int, size: MemorySize) -> int:
            each = _block_bytes(executor.hello, tier)
            return (size.bytes // each if each else 0) + int(size.share * tiers[tier].num_blocks)

        return {
            one.tier: Budget(
                blocks(one.tier, one.min),
                blocks(one.tier, one.low),
                None if one.high is None else blocks(one.tier, one.high),
            )
            for one in budgets
            if one.tier in tiers
        }

    def uses(self) -> Iterator[KeyMemory]:
        """Yield the memory of every owner in each tier where it has a budget or blocks."""
        found: defaultdict[tuple[str, int], list[tuple[int, int, int, int | None]]] = defaultdict(list)
        for executor in self._executors():
            if (memory := self._memories.get(executor)) is None:
                continue
            for owner, tier, use in memory.uses():
                each = _block_bytes(executor.hello, tier)
                least, low, high = use.budget
                found[owner, tier].append(
                    (use.used * each, least * each, low * each, None if high is None else high * each)
                )
        for (owner, tier), values in found.items():
            used, minima, lows, highs = zip(*values, strict=True)
            high = None if None in highs else sum(highs)
            yield KeyMemory(owner.removeprefix("key:"), tier_name(tier), sum(used), sum(minima), sum(lows), high)


def _block_bytes(hello: Hello, tier: int) -> int:
    """Return the bytes that a block takes in a tier, which may have fewer bits than on the device."""
    held = (one.block_bytes for one in hello.tiers if one.number == tier)
    return next(held, 0) or hello.bytes_per_block
