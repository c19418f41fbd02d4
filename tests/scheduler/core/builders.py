"""Builders for core tests: a test passes only the options of schedulers and requests that matter to it."""

from collections.abc import Mapping
from itertools import count

from pagewise_scheduler.core.features.registry import FeatureOptions
from pagewise_scheduler.core.memory.block_table import CachedPrefix
from pagewise_scheduler.core.memory.prefix_tree import block_keys
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.arena import ArenaShape
from pagewise_scheduler.core.tiers.cost_model import Costs
from pagewise_scheduler.core.tiers.host import HostTier
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager
from pagewise_scheduler.core.tiers.recovery_plan import Recovery, RecoveryMode
from pagewise_shared.block_hash import ONE_ROPE
from pagewise_shared.config import SpeculativeConfig
from pagewise_shared.config.options import EvictionName
from pagewise_shared.protocol import HOST, TIER_NAMES, AdapterCapacity
from pagewise_shared.sampling import SamplingParams

from tests.core_requests import make_request

FURTHER = len(TIER_NAMES)
"""A tier below all that there are: the core takes any number of them."""

_ids = count()


def create_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    num_host_blocks: int = 0,
    num_further_blocks: int = 0,
    recovery: RecoveryMode = "auto",
    costs: Costs | None = None,
    eviction: EvictionName = "lru",
    hashed: Mapping[int, str] | None = None,
    salted: bool = True,
    speculative: SpeculativeConfig | None = None,
    max_proposed: int = 0,
    max_proposing: int = 0,
    max_adapters: int = 0,
    max_adapter_rank: int = 8,
    short_rope_len: int = ONE_ROPE,
    shape: ArenaShape | None = None,
) -> Scheduler:
    return Scheduler(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        tiers={HOST: num_host_blocks, FURTHER: num_further_blocks, **(hashed or {})},
        recovery=recovery,
        costs=costs,
        eviction=eviction,
        salted=salted,
        features=FeatureOptions(
            AdapterCapacity(max_adapters, max_adapter_rank),
            speculative=speculative,
            max_proposed=max_proposed,
            max_proposing=max_proposing,
        ),
        short_rope_len=short_rope_len,
        shape=shape,
    )


def host_of(scheduler: Scheduler) -> HostTier:
    host = scheduler.kv.cache_tier(HOST)
    assert host is not None
    return host


def recoveries_of(scheduler: Scheduler) -> list[Recovery]:
    """The recoveries that the scheduler emits from now on."""
    recoveries: list[Recovery] = []
    scheduler.recoveries.emit = recoveries.append
    return recoveries


def evict(scheduler: Scheduler, count: int) -> None:
    """Take blocks for a moment, so that cached ones are evicted."""
    kv = scheduler.kv
    blocks, copies = kv.pool.reserve(min(count, kv.pool.num_available))
    scheduler.plan.copy(copies)
    kv.pool.release(blocks)


def create_request(
    prompt: int | list[int] = 5,
    max_tokens: int = 4,
    *,
    n: int = 1,
    priority: int = 0,
    arrival_time: float | None = None,
    stop_token_ids: tuple[int, ...] = (),
    min_tokens: int = 0,
) -> Request:
    number = next(_ids)
    tokens = prompt if isinstance(prompt, list) else [number * 7 + i for i in range(prompt)]
    return make_request(
        f"r{number}",
        tokens,
        max_tokens,
        SamplingParams(temperature=0, stop_token_ids=stop_token_ids, min_tokens=min_tokens),
        n=n,
        priority=priority,
        arrival_time=float(number) if arrival_time is None else arrival_time,
    )


def cached_prefix(kv: KVCacheManager, tokens: bytes, num_tokens: int) -> CachedPrefix:
    """The cached prefix of the first ``num_tokens`` of ``tokens`` (int32 bytes), as admission finds it."""
    tree = kv.pool.tree
    blocks = tree.walk(tree.root_of(None), block_keys(tokens, kv.block_size, num_tokens))
    return kv.begin_with(None, blocks, tokens[4 * len(blocks) * kv.block_size : 4 * num_tokens])
