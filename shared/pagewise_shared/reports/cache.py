"""Reports of cached prefixes, and of a reset of the cache."""

from msgspec import Struct


class CachedPrefixes(Struct, omit_defaults=True):
    """Cached blocks that begin alike: those behind one first block, under one cache salt.

    Fields:
        salt: as in requests, with the name of the API key or group whose requests alone have it; absent: none.
        key, request_id: of the request that computed the first block, if that is known. adapter: its adapter's name.
        num_tokens: of the longest prefix. tiers: blocks by tier, and bytes: their bytes. in_use: blocks on the device
            that sequences or copies use. snapshots: of windows and states behind the blocks.
        uses: of the block that was used the most, where eviction counts them: 4 means at least four.
        last_used_seconds: since a sequence released one of the blocks on the device, to a quarter of a second; absent:
            none has.
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
    """The cached prefixes of an executor, those with the most blocks first. ``truncated``: there are more."""

    executor_id: str
    block_size: int
    bytes_per_block: int
    prefixes: list[CachedPrefixes]
    truncated: bool


class CacheReport(Struct):
    """The cached prefixes of all executors."""

    executors: list[ExecutorCache]


class ExecutorReset(Struct):
    """What a reset released at an executor.

    Fields:
        released: by tier; in_use: blocks that stay, because sequences or copies use them or blocks behind them.
        unit: of ``released``: "pages" if layers have several groups, else "blocks".
        kept: tiers that a reset does not reach, because processes of other schedulers may share them.
    """

    executor_id: str
    unit: str
    released: dict[str, int]
    in_use: int
    kept: list[str]


class CacheReset(Struct):
    """What a reset released at all executors."""

    executors: list[ExecutorReset]
