"""Which storages an executor reads and writes, by its options, and what copies from and to them cost."""

import hashlib
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import xxhash
from pagewise_shared.block_hash import BlockHash, BlockName
from pagewise_shared.config import ExecutorConfig, parse_size
from pagewise_shared.protocol import TIER_NAMES, Found, LookUp, TierInfo

from pagewise_executor.collectives import ALONE, Ranks
from pagewise_executor.kv.block_store import BlockStore
from pagewise_executor.storage.disk import DiskStorage
from pagewise_executor.storage.link import StorageLink
from pagewise_executor.storage.storage import Storage, content_name

log = logging.getLogger(__name__)

_MEASURED_BLOCKS = 8
_REPEATS = 3
_PIECE_BYTES = 2**24


class Storages:
    """All storages of one executor, and its copies from and to them.

    ``links``: by the number of the tier. ``described``: what the scheduler is told of each.
    """

    def __init__(self, links: Iterable[StorageLink] = (), described: Iterable[TierInfo] = ()) -> None:
        self.links = {TIER_NAMES.index(link.storage.name): link for link in links}
        self.described = tuple(described)

    def answer_to(self, answer: Callable[[Found], None]) -> None:
        """Pass what is found to ``answer``, which is called on any thread."""
        for link in self.links.values():
            link.answer = answer

    def look_up(self, message: LookUp) -> None:
        """Find out how much of a prefix is there, beside the steps."""
        if (link := self.links.get(message.tier)) is not None:
            link.look_up(message)

    @property
    def num_errors(self) -> int:
        """The number of reads and writes that have failed."""
        return sum(link.storage.num_errors for link in self.links.values())

    def close(self) -> None:
        """End all copies, and release all resources."""
        for link in self.links.values():
            link.close()


def make_storages(
    config: ExecutorConfig,
    fingerprint: str,
    content: str,
    weight_files: Iterable[Path],
    store: BlockStore,
    block_size: int,
    ranks: Ranks = ALONE,
) -> Storages:
    """The storages that the options ask for.

    ``fingerprint``: of the model, with which block hashes begin. ``content``: what else tells the blocks from those of
    other models and formats; the weights of the model count as well. ``store``: the memory that is copied from and to.
    ``ranks``: of this executor, which all call this.

    Raises:
        ConfigError: one cannot be used.
    """
    if config.disk_cache is None and config.store is None:
        return Storages()
    digest = hashlib.sha256(f"{content} {_digest(weight_files, ranks)}".encode()).hexdigest()[:16]
    storages = _open(config, content_name(fingerprint, digest), store.bytes_per_block)
    described = [_describe(storage, store.bytes_per_block, measure=config.profile) for storage in storages]
    return Storages([StorageLink(storage, store, block_size) for storage in storages], described)


def _digest(files: Iterable[Path], ranks: Ranks) -> str:
    """Return a checksum of all that the weight files hold: the fingerprint of a model takes samples only, and storage
    outlives what an operator does to the files. Of several ranks, the first reads them for all."""
    digest = xxhash.xxh3_128()
    for file in files if ranks.first else ():
        with file.open("rb") as stream:
            while piece := stream.read(_PIECE_BYTES):
                digest.update(piece)
    halves = np.frombuffer(digest.digest(), ">i8").tolist()
    return b"".join(ranks.of_first(half).to_bytes(8, "big", signed=True) for half in halves).hex()


def _open(config: ExecutorConfig, content: str, bytes_per_block: int) -> list[Storage]:
    """Return the storages that the options ask for."""
    storages: list[Storage] = []
    if config.disk_cache is not None:
        folder, most_bytes = Path(config.disk_cache), parse_size(config.disk_memory)
        storages.append(DiskStorage(folder, content, bytes_per_block, most_bytes))
        log.info("disk cache: up to %.2f GiB in %s", most_bytes / 2**30, folder)
    if config.store is not None:
        from pagewise_executor.storage.redis import RedisStorage  # others need not wait for its import

        storages.append(RedisStorage(config.store, content, bytes_per_block, config.store_expire))
        log.info("store: %s", storages[-1].name)
    return storages


def _describe(storage: Storage, bytes_per_block: int, *, measure: bool) -> TierInfo:
    """Return what the scheduler is told of a storage. ``measure``: whether to find out what copies cost."""
    load = store = (0.0, 0.0)
    if measure:
        names = [_scratch(number) for number in range(_MEASURED_BLOCKS)]
        rows = np.zeros((_MEASURED_BLOCKS, bytes_per_block), np.uint8)
        store = _line(lambda count: storage.write(names[:count], rows[:count]))
        load = _line(lambda count: storage.read(names[:count], rows[:count]))
    return TierInfo(TIER_NAMES.index(storage.name), 0, *load, *store, storage.identity)


def _scratch(number: int) -> BlockName:
    """A block that no prefix has; the same in each process, so that there are never more of them."""
    return BlockName(*(BlockHash(hashlib.sha256(f"scratch {number} {part}".encode()).digest()) for part in range(2)))


def _line(copy: Callable[[int], list[bool]]) -> tuple[float, float]:
    """Return the microseconds of a list of copies, and of each block in it; zeros if a copy fails."""
    fastest = {}
    for count in (1, _MEASURED_BLOCKS):
        times = []
        for _ in range(_REPEATS):
            began = time.perf_counter()
            if not all(copy(count)):
                return 0.0, 0.0
            times.append((time.perf_counter() - began) * 1e6)
        fastest[count] = min(times)
    block = max(0.0, fastest[_MEASURED_BLOCKS] - fastest[1]) / (_MEASURED_BLOCKS - 1)
    block = block or fastest[_MEASURED_BLOCKS] / _MEASURED_BLOCKS
    return max(0.0, fastest[1] - block), block
