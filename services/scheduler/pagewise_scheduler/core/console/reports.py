"""The data of consoles, which becomes JSON as it is. ``docs/console.md`` tells how people read it."""

from msgspec import Struct

from pagewise_scheduler.core.memory_reports import RequestReport, TierReport


class BlockCounts(Struct):
    """Blocks of a tier by state: each block has one of them, so they add up to the tier's.

    ``lent``: read by another executor, and not copied. ``copying``: read or written by copies under way, or by
    those that were asked for a moment ago.
    """

    free: int
    cached: int
    in_use: int
    lent: int
    copying: int


class LinkState(Struct, omit_defaults=True):
    """What copies from a tier or a peer cost, as the cost model believes: microseconds, and its mean relative error.

    One of ``tier`` and ``peer`` says from where. ``loading``: blocks that were asked for and have not arrived.
    """

    setup_us: float
    block_us: float
    error: float
    loading: int
    tier: str | None = None
    peer: str | None = None


class ExecutorState(Struct):
    """An executor. ``rates``: blocks per second, by event. ``prediction_error``: mean relative error of the predicted
    times of prefills. ``saved_blocks``: how many more there would be without sharing. ``hit_rate``: as in
    ``SchedulerState``, of the prompts that it has taken.
    """

    executor_id: str
    state: str
    role: str
    block_size: int
    bytes_per_block: int
    num_blocks: int
    counts: BlockCounts
    tiers: dict[str, TierReport]
    running: int
    waiting: int
    preemptions: int
    tokens_per_second: float
    rates: dict[str, float]
    prediction_error: float
    links: list[LinkState]
    saved_blocks: int
    hit_rate: dict[str, float]


class GatewayState(Struct, omit_defaults=True):
    """A gateway that has joined, or that went a moment ago.

    ``state``: "ready", "silent" (some heartbeats have not come), "left" (it said so) or "lost"; ``reason``: why it is
    not in any more. ``requests``: those of its clients that have not ended, or that ended when it went.
    """

    gateway_id: str
    state: str
    requests: int
    reason: str = ""


class SchedulerState(Struct):
    """The scheduler. ``unplaced``: requests that no executor can take now. ``hit_rate``: share of the prompt tokens of
    the last minute that were found in a cache, by where they lay."""

    uptime_seconds: float
    version: str
    requests_running: int
    requests_waiting: int
    unplaced: int
    tokens_per_second: float
    prompt_tokens_per_second: float
    hit_rate: dict[str, float]


class FleetFrame(Struct):
    """Everything about the processes. ``time``: seconds of the Unix epoch."""

    time: float
    model: str
    scheduler: SchedulerState
    gateways: list[GatewayState]
    executors: list[ExecutorState]


class RequestLine(Struct, omit_defaults=True):
    """One request. Tokens and blocks are those of all its outputs together; times are in seconds.

    ``computed_tokens``: whose K and V are there. ``shared_blocks``: blocks at the beginning of its block tables that
    others hold too. ``moved_from``: the executor at which it was before.
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
    cached_tokens: int
    preemptions: int
    arrived_seconds_ago: float
    queue_seconds: float | None
    first_token_seconds: float | None
    finish_reason: str | None = None
    moved_from: str | None = None


class RequestsFrame(Struct):
    """The requests that run, that wait, and that ended last, the newest first; ``truncated``: there are more of those
    that run or wait."""

    running: list[RequestLine]
    waiting: list[RequestLine]
    ended: list[RequestLine]
    truncated: bool


class EndedReport(Struct):
    """The record of a request that has ended. It says how long ago that was, in seconds."""

    report: RequestReport
    seconds_ago: float
