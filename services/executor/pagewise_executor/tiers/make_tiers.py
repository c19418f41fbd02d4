"""Makes the tiers of an executor below the device, by its options."""

import hashlib
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import xxhash
from pagewise_shared.block_hash import HASH_BYTES
from pagewise_shared.config import ExecutorConfig, parse_size
from pagewise_shared.protocol import DISK, HOST, REDIS

from pagewise_executor.collectives import ALONE, Ranks
from pagewise_executor.kv.issuing import Issuing
from pagewise_executor.kv.kv_pool import KVPool
from pagewise_executor.tiers.block_names import LAYOUT, content_name
from pagewise_executor.tiers.copy_choice import choose_for_storage, for_memory
from pagewise_executor.tiers.disk import DiskTier
from pagewise_executor.tiers.host import STAGING_BYTES, bandwidth_of, make_host_tier
from pagewise_executor.tiers.small_copies import SmallCopies
from pagewise_executor.tiers.tier import Tier

log = logging.getLogger(__name__)

_PIECE_BYTES = 2**24


def make_tiers(
    config: ExecutorConfig, pool: KVPool, fingerprint: str, block_format: str, weight_files: Sequence[Path],
    host_folder: Path | None = None, ranks: Ranks = ALONE, issuing: Issuing | None = None,
    name_bytes: int = HASH_BYTES, small: SmallCopies | None = None,
) -> dict[int, Tier]:  # fmt: skip
    """Return the tiers that the options ask for, by number, the nearest first.

    ``fingerprint``: of the model, with which block hashes begin. It names the blocks together with ``block_format`` and
    ``weight_files``. ``host_folder``: where host memory outlives the process. ``ranks``: all ranks of this executor
    call this. ``issuing``: shared with the thread that issues steps. ``name_bytes``: see ``HostMemory``.
    ``small``: makes the copies in all of them smaller, or only where that takes less time.

    Raises:
        ModelError: there is no room for one.
        ConfigError: one cannot be used.
    """
    content = f"{fingerprint} {block_format} {config.block_size}"
    tiers: dict[int, Tier] = {}
    if config.host_memory is not None:
        # The fingerprint takes samples of the weights only. Blocks that outlive the process must not be used with other
        # weights, so the time when the weights were changed counts too.
        changed = max(file.stat().st_mtime_ns for file in weight_files)
        chosen = for_memory(small, pool.device, bandwidth_of(config, ranks), ranks) if small is not None else None
        tiers[HOST] = make_host_tier(
            config, pool, host_folder, f"{content} {changed}", ranks, issuing, name_bytes, chosen
        )
    if config.disk_cache is None and config.store is None:
        return tiers
    digest = hashlib.sha256(f"{LAYOUT} {content} {_digest(weight_files, ranks)}".encode()).hexdigest()[:16]
    shared, size = content_name(fingerprint, digest), pool.bytes_per_block
    if config.disk_cache is not None:
        folder, most_bytes = Path(config.disk_cache), parse_size(config.disk_memory)
        tiers[DISK] = disk = DiskTier(folder, shared, size, most_bytes, small)
        choose_for_storage(disk, ranks)
        log.info("disk cache: up to %.2f GiB in %s", most_bytes / 2**30, folder)
    if config.store is not None:
        from pagewise_executor.tiers.redis import RedisTier  # executors without a store do not wait for its import

        tiers[REDIS] = store = RedisTier(config.store, shared, size, config.store_expire, small)
        choose_for_storage(store, ranks)
        log.info("store: redis")
    return tiers


def staging_bytes(config: ExecutorConfig) -> int:
    """The bytes of device memory that these tiers take on a GPU."""
    return STAGING_BYTES if config.host_memory is not None else 0


def _digest(files: Iterable[Path], ranks: Ranks) -> str:
    """Return a checksum of the whole weight files. The fingerprint of a model takes samples only, and the blocks of
    these tiers outlive changes of the files. Rank 0 reads the files for all ranks."""
    digest = xxhash.xxh3_128()
    for file in files if ranks.first else ():
        with file.open("rb") as stream:
            while piece := stream.read(_PIECE_BYTES):
                digest.update(piece)
    halves = np.frombuffer(digest.digest(), ">i8").tolist()
    return b"".join(ranks.of_first(half).to_bytes(8, "big", signed=True) for half in halves).hex()
