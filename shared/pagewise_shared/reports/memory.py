"""Reports of the memory and the load of processes, and the frames of consoles."""

from msgspec import Struct

from pagewise_shared.protocol import GroupKind
from pagewise_shared.reports.requests import RequestLine, RequestReport


class GroupReport(Struct):
    """Pages of a tier that blocks of a group of layers take, ``pages_per_block`` each. ``kind``: of the blocks.

    ``window``: tokens that a query sees, or of a chunk; 0: all tokens. ``in_use``: pages that sequences and copies
    use; ``cached``: unused pages with content. ``snapshots``: of windows or states, which hold the cached pages.
    """

    kind: GroupKind
    window: int
    pages_per_block: int
    in_use: int
    cached: int
    snapshots: int


class DeviceReport(Struct):
    """Blocks of the device by state. ``retiring``: references that end when a step in flight returns.

    ``lent``: references of other executors, which read the blocks; the blocks are in use meanwhile. If the model has
    several groups of layers, all but ``lent`` counts pages, and ``groups`` has the groups.
    """

    num_blocks: int
    free: int
    cached: int
    in_use: int
    retiring: int
    lent: int
    groups: list[GroupReport] = []


class BlockCounts(Struct):
    """Blocks of a tier as a map shows them: each block has one state, so the counts add up to the tier.

    ``lent``: read by another executor, and not copied. ``copying``: read or written by copies that are under way, or
    that were asked for a moment ago.
    """

    free: int
    cached: int
    in_use: int
    lent: int
    copying: int


class TierReport(Struct):
    """Blocks of a tier below the device. ``storing``, ``loading``: blocks that are copied to and from it now.

    If the model has several groups of layers, ``num_blocks`` and ``used`` count pages of host memory, and ``groups``
    has the groups.
    """

    num_blocks: int
    used: int
    storing: int
    loading: int
    groups: list[GroupReport] = []


class LinkReport(Struct):
    """Estimated costs of copies from a lower tier or a peer, in microseconds. ``error``: mean relative error.

    ``loading``: blocks that were asked for and have not arrived. ``rests``: choices for which it is left alone after a
    failure. ``dtype``: of its copies, if they have fewer bits than the device.
    """

    setup: float
    block: float
    wait: float
    error: float
    loading: int
    rests: int
    dtype: str = ""


class CostReport(Struct):
    """The cost model, in microseconds. ``prefill_error``: mean relative error of predicted prefills, 0 is exact.

    ``tiers``: loading from the tiers below the device, by name. ``peers``: fetching from other executors, by block
    endpoint, or by the executor's name for consoles.
    """

    step: float
    token: float
    attention: float
    context: float
    prefill_error: float
    tiers: dict[str, LinkReport]
    peers: dict[str, LinkReport]


class SnapshotReport(Struct, omit_defaults=True):
    """A snapshot behind the block at ``depth``. ``kind``: of its blocks; ``window``: see ``GroupReport``.

    ``places``: the blocks behind which sequences can begin with it, that one and some before it. ``used``: some
    sequence has begun with it.
    """

    kind: GroupKind
    window: int
    tier: str
    depth: int
    places: int
    used: bool = False


class PrefixRun(Struct, omit_defaults=True):
    """A run of the prefix tree: blocks that follow one another without a fork, the first at ``depth``.

    Fields:
        parent: index of the run before it, -1: it begins a prompt. forks: runs that follow.
        tiers: how many of its blocks lie in each tier. references: sequences that hold its first block now.
        saved_blocks: blocks that sharing it saves now.
        price: the worth of its last block to the eviction policy; absent: it cannot be evicted now.
        next_evicted: its place among the next evictions, from 1 on.
        token_ids: its first tokens, if the reader may see them.
        snapshots: of windows and states behind its blocks.
    """

    id: int
    parent: int
    depth: int
    num_blocks: int
    tiers: dict[str, int]
    references: int
    saved_blocks: int
    forks: int
    price: float | None = None
    next_evicted: int | None = None
    token_ids: list[int] | None = None
    snapshots: list[SnapshotReport] = []


class ExecutorReport(Struct, kw_only=True):
    """The memory and the load of one executor.

    ``block_endpoint``: the address at which others fetch from it, "" if it lends nothing. ``tiers``: the tiers below
    the device, by name. ``counters``: events of blocks since it joined. ``saved_blocks``: how many more blocks there
    would be without sharing. ``tree_blocks``: of its prefix tree.
    """

    executor_id: str
    block_endpoint: str
    block_size: int
    device: DeviceReport
    tiers: dict[str, TierReport]
    running: int
    waiting: int
    steps_in_flight: int
    preemptions: int
    counters: dict[str, int]
    costs: CostReport
    saved_blocks: int
    tree_blocks: int


class MemoryReport(ExecutorReport, kw_only=True):
    """An executor's memory with its requests and its prefix tree; ``truncated``: a list was cut to the limit."""

    requests: list[RequestReport]
    tree: list[PrefixRun]
    truncated: bool


class ExecutorState(ExecutorReport, kw_only=True):
    """An executor as consoles show it. ``rates``: blocks per second, by event. ``hit_rate``: see ``SchedulerState``.
    ``counts``: of its device, in pages if the model has several groups of layers.

    ``tokens_per_second``: None until it has been measured.
    """

    state: str
    role: str
    bytes_per_block: int
    counts: BlockCounts
    tokens_per_second: float | None
    rates: dict[str, float]
    hit_rate: dict[str, float]


class GatewayState(Struct, omit_defaults=True):
    """A gateway that has joined, or that left a moment ago.

    ``state``: "ready", "silent" (some heartbeats have not come), "left" (by its own message) or "lost"; ``reason``: why
    it is not connected any more. ``requests``: requests of its clients that have not ended, or that ended when it left.
    """

    gateway_id: str
    state: str
    requests: int
    reason: str = ""


class SchedulerState(Struct):
    """The scheduler. ``unplaced``: requests that no executor can take now.

    ``tokens_per_second``, ``prompt_tokens_per_second``: of the executors for which they have been measured, None: of no
    executor yet. ``hit_rate``: share of the prompt tokens of the last minute that were found in a cache, by tier.
    """

    uptime_seconds: float
    version: str
    requests_running: int
    requests_waiting: int
    unplaced: int
    tokens_per_second: float | None
    prompt_tokens_per_second: float | None
    hit_rate: dict[str, float]


class KeyMemory(Struct):
    """The cached KV of an API key or group in one tier, and its budget there, in bytes. ``high``: None is no bound."""

    used: int
    min: int
    low: int
    high: int | None


class KeyState(Struct):
    """An API key, or ``group:`` and a group of keys, with a budget of memory or with evicted KV that it missed.

    ``memory``: its memory by tier, if it has a budget. ``spared_by_next_gib``: prompt tokens of the last minute that
    were computed, and that one GiB more at each executor would have spared.
    """

    name: str
    memory: dict[str, KeyMemory]
    spared_by_next_gib: int


class FleetFrame(Struct):
    """All processes, and API keys with budgets of memory. ``time``: seconds since 1970."""

    time: float
    model: str
    scheduler: SchedulerState
    gateways: list[GatewayState]
    executors: list[ExecutorState]
    keys: list[KeyState] = []


class RequestsFrame(Struct):
    """The requests that run, that wait, and that ended last, the newest first.

    ``truncated``: more requests run or wait than are listed.
    """

    running: list[RequestLine]
    waiting: list[RequestLine]
    ended: list[RequestLine]
    truncated: bool


class NextEviction(Struct):
    """A block that is evicted when the next blocks are needed: the block with the lowest ``price`` comes first.

    ``probability``: that it is used again, None if the policy does not estimate it.
    """

    block: int
    depth: int
    price: float
    probability: float | None


class ExecutorPrefixes(Struct):
    """The prefix tree of an executor. ``truncated``: there are more runs, or blocks in them, than were looked at."""

    executor_id: str
    runs: list[PrefixRun]
    tree_blocks: int
    saved_blocks: int
    saved_bytes: int
    next_evictions: list[NextEviction]
    truncated: bool


class PrefixesFrame(Struct):
    """The prefix trees of all executors that were asked for."""

    executors: list[ExecutorPrefixes]


class BlockLocation(Struct):
    """The location of the same content at another executor."""

    executor_id: str
    tier: str
    block: int


class BlockDetails(Struct, omit_defaults=True):
    """A block of a tier.

    Fields:
        state: "free", "cached" or "in use". references: of block tables, and of copies under way.
        requests: ids of the requests whose block tables have it. hash, depth: empty and 0 unless its content is known;
            depth 1 begins a prompt. tokens: how many it holds, 0: not known. token_ids: if the reader may see them.
        copies: its ids in the executor's tiers that have it. elsewhere: at other executors.
        unused_for: blocks that have come into the caches since it was released last, or releases with ``--eviction
            lru``; absent while it is in use. price, probability: as of ``NextEviction``, if it could be evicted.
    """

    executor_id: str
    tier: str
    block: int
    state: str
    references: int
    requests: list[str]
    hash: str = ""
    depth: int = 0
    tokens: int = 0
    token_ids: list[int] | None = None
    copies: dict[str, int] = {}
    elsewhere: list[BlockLocation] = []
    unused_for: int | None = None
    price: float | None = None
    probability: float | None = None


class MapFrame(Struct):
    """The map of one tier of one executor.

    Fields:
        first, count: the blocks that it shows, of ``num_blocks``; ``blocks_per_cell`` in each cell, fewer in the last.
            A map of the colour "group" shows pages in the order of the legend: pages have no numbers here.
        colour: the property that the colours show. legend: index and label of each of its values.
        cells: base64 of two bytes for each cell: the index that most of its blocks have, and their share of it (255 is
            all). Lent and copied blocks are few, and soon have another state, so a cell with one of them has their
            index.
        counts: of the whole tier by state.
    """

    executor_id: str
    tier: str
    first: int
    count: int
    num_blocks: int
    blocks_per_cell: int
    colour: str
    legend: list[tuple[int, str]]
    cells: str
    counts: BlockCounts
