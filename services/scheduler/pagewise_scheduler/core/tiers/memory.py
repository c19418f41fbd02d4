"""Puts together the memory of one executor: its tiers, what they cost, and how KV comes back from them."""

from collections.abc import Iterable, Mapping

from pagewise_scheduler.core.tiers.cost_model import CostModel, Costs, Eviction, make_policy
from pagewise_scheduler.core.tiers.hashed import Storage
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager, TierSize
from pagewise_scheduler.core.tiers.recovery import Recoveries
from pagewise_scheduler.core.tiers.recovery_plan import RecoveryMode
from pagewise_scheduler.core.tiers.recovery_policy import RecoveryPolicy


def make_memory(
    *,
    num_blocks: int,
    block_size: int,
    chunk: int,
    tiers: Mapping[int, int],
    costs: Costs,
    recovery: RecoveryMode,
    eviction: Eviction,
    model_fingerprint: str,
    kv: KVCacheManager | None = None,
    storages: Iterable[Storage] = (),
) -> tuple[KVCacheManager, Recoveries]:
    """Empty memory of ``num_blocks`` blocks on the device and of ``tiers`` below it (blocks by the tier's number).

    ``chunk``: tokens of one prefill chunk. ``kv``: another memory manager, for comparison.
    ``storages``: that the executor has.
    """
    sizes = {number: size for number, size in tiers.items() if size}
    model = CostModel(costs, block_size, chunk, sizes)
    policy = RecoveryPolicy(model, recovery)
    if kv is None:
        lower = [TierSize(number, size, model.tiers[number]) for number, size in sizes.items()]
        order = make_policy(eviction, model, num_blocks)
        kv = KVCacheManager(num_blocks, block_size, lower, order, policy, model_fingerprint)
    return kv, Recoveries(kv, model, policy, storages)
