"""Reports of requests and of KV memory: the scheduler fills them in, gateways and clients turn them into text.

Times are seconds. ``at`` is a time in the life of a request, counted from its arrival.
"""

from msgspec import Struct

from pagewise_shared.protocol import GroupKind


class RequestName(Struct, frozen=True):
    """The id of a request, and the name of its API key."""

    request_id: str
    key: str


class Share(Struct):
    """Tokens of a prompt. ``request`` is None if the reader may not see whose prompt it is."""

    request: RequestName | None
    tokens: int


class LostPrefix(Struct):
    """Tokens of the prompt that were cached once, from ``position`` on.

    Fields:
        reason: "evicted", "corrupt", "executor lost" or "executor reset". time: of the loss, since 1970.
        cached_by: the request that computed them, and cached_at: when it started, since 1970.
        taker: the request whose allocation evicted them, the first of ``num_takers``.
        policy: the eviction policy that chose them. price: their worth to it.
    """

    position: int
    tokens: int
    reason: str
    time: float
    executor_id: str
    tier: str
    cached_by: RequestName | None
    cached_at: float | None
    taker: RequestName | None
    num_takers: int
    policy: str
    price: float | None


class NoSnapshot(Struct):
    """A group of layers whose windows or states are in no tier behind cached tokens. ``kind``: of its blocks.

    ``lost``: the last snapshot of it that is known to have been there, behind the first ``position`` tokens of the
    prompt; its ``tokens`` are 0. ``retaken``: when one was taken there again, since 1970; None: not yet.
    """

    kind: GroupKind
    lost: LostPrefix | None = None
    retaken: float | None = None


class NoWindow(Struct):
    """``tokens`` of the prompt from ``position`` on were cached, the last of them by ``cached_by``, and not used: no
    sequence can begin behind them, because no tier has the windows or states of the groups in ``lacking`` there.

    ``due``: the number of tokens behind which this request takes a snapshot of the cached blocks, 0: nowhere.
    """

    position: int
    tokens: int
    cached_by: RequestName | None
    lacking: list[NoSnapshot] = []
    due: int = 0


class LeftPrefix(Struct):
    """Where the prompt leaves the cached prefix of ``cached_by``: ``position`` is the first token that differs.

    ``beyond`` tokens are cached behind it. ``compared`` of them were compared with the prompt, ``equal`` are the same.
    """

    position: int
    beyond: int
    compared: int
    equal: int
    cached_by: RequestName | None


class OtherCache(Struct):
    """The first ``tokens`` are cached under another ``kind``: "salt", or "adapter" with the name ``adapter``."""

    tokens: int
    kind: str
    adapter: str
    cached_by: RequestName | None


class Event(Struct, omit_defaults=True):
    """A change of the KV memory of one output, ``sequence``.

    Fields:
        kind: "started" and "resumed" (it got KV), "preempted" and "started over" (it lost its blocks: to ``by``, or
            because blocks that were to be loaded had not come).
        seconds: until its KV was there, or until it resumed; None: not yet.
        method: "device", "load", "recompute" or "both". device_tokens: found on the device. found_tokens: found in
            ``sources``, most of them in ``source``. loaded_tokens: loaded from there, the others were computed again.
        peer: an executor among the sources. predicted_seconds: by method.
        reason: of the loss. blocks: released by it, of which ``freed`` were held by no other sequence.
    """

    at: float
    kind: str
    sequence: int
    seconds: float | None = None
    method: str | None = None
    device_tokens: int = 0
    found_tokens: int = 0
    loaded_tokens: int = 0
    source: str | None = None
    sources: list[str] = []
    peer: str | None = None
    predicted_seconds: dict[str, float] = {}
    reason: str | None = None
    blocks: int = 0
    freed: int = 0
    by: RequestName | None = None


class Placement(Struct):
    """An executor that took the request on."""

    executor_id: str
    at: float


class Move(Struct):
    """The request left an executor, and was placed on ``to`` ``seconds`` later.

    ``reason``: "decode" (the prompt was computed), "drain" (the executor was stopped), "rejoined" (it began a new
    session), "lost" (it could not be reached), "stalled" (a step or a copy did not return), "misbehaved" (its messages
    made no sense), "revoked" (its key was) or "failed" (the scheduler failed in its work for it).
    ``next_token_seconds``: from the departure to the next token, None if none has come.
    """

    at: float
    executor_id: str
    reason: str
    to: str | None
    seconds: float | None
    next_token_seconds: float | None = None


class Interruption(Struct):
    """The executor was reset after an error; its first step after that came back ``seconds`` later.

    ``ran``: the request had begun to run there, and did not only wait.
    """

    at: float
    executor_id: str
    seconds: float | None
    ran: bool


class Phase(Struct):
    """A part of a request's life: its own tokens, the steps meanwhile, and the tokens of other prompts in them."""

    seconds: float
    tokens: int
    steps: int
    others_tokens: int


class Chunk(Struct):
    """A step that was planned at this time computed so many tokens of the request, beside its decodes."""

    at: float
    tokens: int


class BlockReport(Struct, omit_defaults=True):
    """A block of a sequence: its index in the block table, its id on the device, and the ids of its copies by tier.

    ``cached``: its content is known, so that others can share it; ``hash`` is its block hash in hex then.
    """

    index: int
    block: int
    references: int
    copies: dict[str, int] = {}
    cached: bool = False
    hash: str = ""


class TableReport(Struct, omit_defaults=True):
    """The blocks of a sequence in a group of layers. ``kind``: of the blocks; ``window``: see ``GroupReport``.

    ``first``: the first token of which it has K and V. ``tokens``: of states, the numbers of tokens behind which it
    keeps snapshots, beside the states that it writes.
    """

    kind: GroupKind
    window: int
    num_blocks: int
    pages: int
    first: int = 0
    tokens: list[int] = []


class SequenceReport(Struct, omit_defaults=True):
    """One output of a request. ``shared``: blocks of its table that other sequences hold too. ``groups``: its tables in
    all groups of layers; empty if there is one group."""

    index: int
    status: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_blocks: int
    shared: int
    preemptions: int
    finish_reason: str | None = None
    blocks: list[BlockReport] = []
    truncated: bool = False
    groups: list[TableReport] = []


class RequestLine(Struct, omit_defaults=True):
    """One request in a few numbers. Tokens and blocks are the sums over its outputs.

    Fields:
        client_request_id: the id that its client gave it, "" if none. executor_id: "" while it is on no executor.
        computed_tokens: tokens whose K and V are there. num_cached_tokens: of the prompt, found when it first ran.
        shared_blocks: blocks at the beginning of its block tables that other sequences hold too.
        queue_seconds, first_token_seconds: from its arrival to its first step and its first token, None until then.
        moved_from: the executor at which it was before.
    """

    request_id: str
    client_request_id: str
    key: str
    executor_id: str
    status: str
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    blocks: int
    shared_blocks: int
    num_cached_tokens: int
    preemptions: int
    arrived_seconds_ago: float
    queue_seconds: float | None
    first_token_seconds: float | None
    finish_reason: str | None = None
    moved_from: str | None = None


class RequestReport(RequestLine, kw_only=True, omit_defaults=True):
    """All facts about a request: the phases of its time, its memory, and the reasons why prefixes were lost.

    Fields:
        arrived: seconds since 1970. total_seconds: from its arrival to its end, or until now.
        ended_seconds_ago: None if it has not ended. state: "waiting", "running" or "ended".
        executors: the last placements. cached_tokens: of the prompt, by the tier in which they were found.
        events: the last changes of its memory. chunks: in which it was prefilled; many are joined.
        truncated: sequences, blocks or events were left out.
        waits: seconds by cause before it ran. ahead: whose prompts were being computed when it came.
        computes_prefix: the request that computed the prefix for which it waited.
        no_window, lost, left, other_cache, not_asked: why a part of its prompt was not cached.
        resumed: when it came from another scheduler.
    """

    priority: int = 0
    arrived: float
    state: str
    total_seconds: float
    ended_seconds_ago: float | None
    executors: list[Placement]
    cached_tokens: dict[str, int]
    sequences: list[SequenceReport]
    events: list[Event] = []
    chunks: list[Chunk] = []
    truncated: bool = False
    waits: dict[str, float] = {}
    ahead: list[Share] = []
    computes_prefix: RequestName | None = None
    prefill: Phase | None = None
    decode: Phase | None = None
    no_window: NoWindow | None = None
    lost: list[LostPrefix] = []
    left: LeftPrefix | None = None
    other_cache: OtherCache | None = None
    not_asked: bool = False
    moves: list[Move] = []
    resets: list[Interruption] = []
    resumed: float | None = None


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
    failure.
    """

    setup: float
    block: float
    wait: float
    error: float
    loading: int
    rests: int


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


class FleetFrame(Struct):
    """All processes. ``time``: seconds since 1970."""

    time: float
    model: str
    scheduler: SchedulerState
    gateways: list[GatewayState]
    executors: list[ExecutorState]


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
            all). Lent and copied blocks are few and soon something else, so a cell with one of them has their index.
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
