"""Which tiers an executor has below the device, by its options."""

from pathlib import Path

from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import HOST

from pagewise_executor.block_copies import Tier
from pagewise_executor.collectives import ALONE, Ranks
from pagewise_executor.kv.host_tier import STAGING_BYTES, make_host_tier
from pagewise_executor.kv.issuing import Issuing
from pagewise_executor.kv.kv_pool import KVPool


def make_tiers(
    config: ExecutorConfig,
    pool: KVPool,
    host_folder: Path | None,
    content: str,
    ranks: Ranks = ALONE,
    issuing: Issuing | None = None,
) -> dict[int, Tier]:
    """The tiers that the options ask for, by number, the nearest first.

    ``host_folder``: where host memory outlives the process. ``content``: what tells its blocks from those of other
    models and formats. ``ranks``: of this executor, which all make theirs. ``issuing``: shared with who issues steps.

    Raises:
        ModelError: there is no room for one.
    """
    host = make_host_tier(config, pool, host_folder, content, ranks, issuing)
    return {} if host is None else {HOST: host}


def staging_bytes(config: ExecutorConfig) -> int:
    """The bytes of device memory that these tiers take on a GPU."""
    return STAGING_BYTES if config.host_memory is not None else 0
