"""Reports of requests: how each one spends its time, the memory it has, and where its cached prefix was lost."""

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
        reason: "evicted", "corrupt", "executor lost", "executor reset", "cache reset" or "advice" (of its client).
        time: of the loss, since 1970.
        cached_by: the request that computed them, and cached_at: when it started, since 1970.
        taker: the request whose allocation evicted them, the first of ``num_takers``.
        policy: the eviction policy that chose them; "EndedSession": no use was expected. price: their worth to it.
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
        dtypes: of the copies in ``sources`` that hold fewer bits than the device.
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
    dtypes: dict[str, str] = {}
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
