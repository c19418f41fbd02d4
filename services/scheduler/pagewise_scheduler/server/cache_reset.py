"""Releases the cached blocks of all executors for an operator."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import msgspec
from pagewise_shared.protocol import tier_name
from pagewise_shared.reports import CacheReset, ExecutorReset

from pagewise_scheduler.core.tiers.cache_reset import reset_cache
from pagewise_scheduler.server.executor_handle import ExecutorHandle

log = logging.getLogger(__name__)


def reset_caches(
    salt: str,
    executors: Sequence[ExecutorHandle],
    guard: Callable[[ExecutorHandle], AbstractContextManager[None]],
) -> bytes:
    """Release the blocks of a cache salt (empty: all blocks), and return a ``CacheReset`` as JSON.

    ``guard``: see ``ExecutorRegistry.guarded``.
    """
    report = CacheReset([])
    for executor in executors:
        with guard(executor):
            kv = executor.scheduler.kv
            outcome = reset_cache(kv, salt)
            released = {tier_name(number): count for number, count in outcome.released.items()}
            kept = [tier_name(number) for number in kv.hashed]
            unit = "pages" if kv.windows else "blocks"
            report.executors.append(ExecutorReset(executor.executor_id, unit, released, outcome.num_in_use, kept))
            executor.touch()
    log.info("an operator has reset the cache%s: %s", " of one salt" if salt else "", report.executors)
    return msgspec.json.encode(report)
