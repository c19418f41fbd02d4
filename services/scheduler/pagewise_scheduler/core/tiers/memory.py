"""Puts together the memory of one executor: its tiers, what they cost, and how KV comes back from them."""

from collections.abc import Mapping

from pagewise_scheduler.core.tiers.cost_model import CostModel, Costs, Eviction, make_policy
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager
from pagewise_scheduler.core.tiers.recovery import Recoveries
from pagewise_scheduler.core.tiers.recovery_plan import RecoveryMode
from pagewise_scheduler.core.tiers.recovery_policy import RecoveryPolicy


def make_memory(
    *,
    num_blocks: int,
    block_size: int,
    chunk: int,
    tiers: Mapping[int, int | str],
    costs: Costs,
    recovery: RecoveryMode,
    eviction: Eviction,
    model_fingerprint: str,
    salted: bool = True,
) -> tuple[KVCacheManager, Recoveries]:
    """Empty memory of ``num_blocks`` blocks on the device and of ``tiers`` below it.

    ``chunk``: tokens of one prefill chunk. ``tiers``: by the number of each, how many blocks it has, or its identity if
    they have no ids. ``salted``: see ``HashTier``.
    """
    sizes = {number: size for number, size in tiers.items() if size}
    model = CostModel(costs, block_size, chunk, sizes)
    policy = RecoveryPolicy(model, recovery)
    lower = {number: (size, model.tiers[number]) for number, size in sizes.items()}
    order = make_policy(eviction, model, num_blocks)
    kv = KVCacheManager(num_blocks, block_size, lower, order, policy, model_fingerprint, salted=salted)
    return kv, Recoveries(kv, model, policy)
