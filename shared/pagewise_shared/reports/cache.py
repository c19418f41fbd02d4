"""Reports of cached prefixes, and of a reset of the cache."""

from msgspec import Struct


class CachedPrefixes(Struct, omit_defaults=True):
    """The cached blocks of all prefixes with the same first block and the same cache salt.

    Fields:
        salt: the cache salt of requests, with the name of the API key or group that has a cache of its own; absent: no
            salt.
        key, request_id, adapter: the names of the API key and the adapter, and the id, of the request that computed the
            first block, if the request is known.
        num_tokens: the length of the longest prefix.
        tiers: the number of blocks by tier; on disks and in stores, as far as the scheduler knows. bytes: the bytes of
            the blocks by tier. in_use: the number of blocks on the device that sequences or copies use. snapshots: the
            number of snapshots of windows and states behind the blocks.
        uses: the number of uses of the block that was used the most, if eviction counts uses: 4 means at least four.
        last_used_seconds: the time since a sequence released one of the blocks on the device, to a quarter of a second;
            absent: no sequence has.
    """

    num_blocks: int
    num_tokens: int
    tiers: dict[str, int]
    bytes: dict[str, int]
    in_use: int = 0
    snapshots: int = 0
    salt: str | None = None
    key: str = ""
    adapter: str = ""
    request_id: str = ""
    uses: int | None = None
    last_used_seconds: float | None = None


class ExecutorCache(Struct):
    """The cached prefixes of an executor, the largest first. ``truncated``: whether prefixes were left out."""

    executor_id: str
    block_size: int
    bytes_per_block: int
    prefixes: list[CachedPrefixes]
    truncated: bool


class CacheReport(Struct):
    """The cached prefixes of all executors."""

    executors: list[ExecutorCache]


class ExecutorReset(Struct):
    """The result of a reset at one executor.

    Fields:
        released: the number of released blocks or pages by tier. in_use: the number of blocks that stay, because
            sequences or copies use them or blocks behind them.
        unit: the unit of ``released``: "pages" if layers have several groups, else "blocks".
        kept: tiers of which no block was deleted, because ``reset_external`` was not given.
        failed: by tier, why not all of its blocks could be deleted.
    """

    executor_id: str
    unit: str
    released: dict[str, int]
    in_use: int
    kept: list[str]
    failed: dict[str, str] = {}


class CacheReset(Struct):
    """The results of a reset at all executors."""

    executors: list[ExecutorReset]
