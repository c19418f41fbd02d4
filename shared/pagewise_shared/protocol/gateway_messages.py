"""The messages between gateways and the scheduler; docs/wire-protocol.md describes their use.

A gateway numbers its *streams*: every output of every prompt is a stream, with an int32 number that the gateway assigns
in ascending order under one epoch. Output ``j`` of prompt ``i`` of a ``Submit`` is stream ``submit.stream + i *
params.n + j``.
"""

from typing import Annotated, Literal

from msgspec import Meta

from pagewise_shared.protocol.base import Message, Piece
from pagewise_shared.protocol.limits import MAX_ADAPTERS, MAX_BUDGETS, MAX_PROMPTS
from pagewise_shared.protocol.memory import MemoryBudget
from pagewise_shared.protocol.messages import Adapter, Goodbye, Heartbeat, HeartbeatAck, Refused, Rejoin
from pagewise_shared.protocol.steps import TokenLogprobs
from pagewise_shared.sampling import BeamParams, SamplingParams
from pagewise_shared.segments import ALL_BEFORE

FinishReason = Literal["stop", "length", "abort", "error"]

AdapterList = Annotated[tuple[Adapter, ...], Meta(max_length=MAX_ADAPTERS)]

MAX_CELLS = 4096
"""Maximum cells of all memory maps in one answer."""

ConsolePart = Literal["fleet", "requests", "map", "prefixes", "block"]
"""The parts of the console. All but "block" change all the time, so consoles poll them."""

UPDATE_SECONDS: dict[str, float] = {"fleet": 0.5, "map": 0.5, "requests": 1.0, "prefixes": 2.0, "block": 1.0}
"""Seconds between two queries of a gateway for a part while a console shows it; "block" while the pointer is on a
block."""

Colour = Literal["state", "request", "prefix", "age", "tier", "group"]
"""The property of a block that the colours of a memory map show. A map of groups has pages instead of blocks."""

# ---- gateway -> scheduler -----------------------------------------------------------------------------


class GatewayHello(Message, frozen=True):
    """A gateway asks to join. It repeats this, with growing pauses, until ``GatewayWelcome`` or ``Refused`` arrives.

    Fields:
        gateway_id: a name for people and metrics. model_name: the name that clients use, equal to the scheduler's.
        instance: identifies this process among all others, including earlier ones with the same name.
        ready_executors: executors that took work in the last ``FleetState``; 0: unknown. A scheduler that has just
            started waits for them for a moment before it places requests.
        rejoins: how often the gateway had joined a scheduler before, this one or another.
        adapters_version, adapters: the last ``AdapterState`` that the gateway received; a scheduler without a newer one
            adopts it.
    """

    protocol_major: int
    protocol_minor: int
    gateway_id: str
    model_name: str
    instance: str
    ready_executors: int = 0
    rejoins: int = 0
    adapters_version: int = 0
    adapters: AdapterList = ()


class KeyLimits(Piece, frozen=True):
    """The limits of one API key; None: no limit.

    ``concurrent``: requests at a time. ``tokens_per_minute``: of prompts and outputs together.
    """

    concurrent: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class ReuseHints(Piece, frozen=True):
    """Hints on when the prefix of a request will be used again; eviction learns how reliable they are.

    Fields:
        retention: seconds for which the client wants the prefix kept, 0 if not given.
        tool_call_ids: tokens with which the model calls a tool, whose result then follows this prefix and the answer.
        cache_key: the client's ``prompt_cache_key``; the prompts of requests with the same one are expected to share a
            beginning.
        session: the name of the conversation that the request is a turn of; the end of a turn is the likely beginning
            of the next. Names are of one API key. Empty: not given.
        parent: the session whose prompt this one begins with; empty: not given.
        returns_in: seconds until the next turn is expected; -1: not given.
        ends: there is no next turn.
    """

    retention: int = 0
    tool_call_ids: tuple[int, ...] = ()
    cache_key: str = ""
    session: str = ""
    parent: str = ""
    returns_in: float = -1.0
    ends: bool = False


class StreamProgress(Piece, frozen=True, gc=False):
    """The tokens of an output that a gateway has received before it submits the request to another scheduler.

    ``tokens``: its output tokens so far (int32 bytes). ``finished``: it takes no more tokens.
    """

    tokens: bytes
    finished: bool = False


class PromptSegments(Piece, frozen=True):
    """The segments of a prompt (``segments.py``).

    ``ranges``: start and stop of each, int32 bytes. ``root``: the number of first tokens of the prompt that segments
    attend to. ``boundary``: the first tokens of each segment that are computed in place, and attend to everything
    before them.
    """

    ranges: bytes
    root: int = ALL_BEFORE
    boundary: int = 0


class Prompt(Piece, frozen=True):
    """One prompt of a request.

    Fields:
        tokens: int32 bytes, at least one token.
        max_tokens: maximum output tokens of each output; 0: only the prompt is computed, for its log-probabilities.
        progress: of each of its n outputs, if the request is resumed; else empty.
        segments: of the prompt, if it has any.
        places: the places behind which other prompts are expected to go on differently, each as the number of tokens
            before it; int32 bytes, at most ``MAX_PLACES``.
    """

    tokens: bytes
    max_tokens: int
    progress: Annotated[tuple[StreamProgress, ...], Meta(max_length=MAX_PROMPTS)] = ()
    segments: PromptSegments | None = None
    places: bytes = b""

    @property
    def token_ids(self) -> "memoryview[int]":
        """The tokens, not copied."""
        return memoryview(self.tokens).cast("i")


class RequestParams(Piece, frozen=True):
    """Parameters that all prompts of a request share. The scheduler keeps them with each prompt.

    Fields:
        sampling: of output 0; the seed of output i is derived from its seed and i.
        n: outputs of each prompt.
        beam: search for the n likeliest outputs instead of sampling.
        priority: lower runs earlier.
        cache_salt: only requests with the same salt share cached KV.
        key: name of the request's API key, "" without one.
        client_request_id: the client's X-Request-Id, at most 128 printable characters; "" if there is none.
        reuse: hints on the reuse of its prefix.
        adapter: computes the request together with the model; None: the model alone.
    """

    sampling: SamplingParams
    n: int = 1
    beam: BeamParams | None = None
    priority: int = 0
    cache_salt: str | None = None
    key: str = ""
    client_request_id: str = ""
    reuse: ReuseHints = ReuseHints()
    adapter: Adapter | None = None

    @property
    def num_sequences(self) -> int:
        """The maximum sequences of a prompt that run at a time."""
        return max(self.n, self.beam.width if self.beam is not None else 0)


class Submit(Message, frozen=True):
    """One request of a client: accepted as a whole, or refused as a whole (``RequestRefused``).

    The gateway makes it after checking the client's request, and keeps it as long as the request lives. Each time it is
    sent, it gets the current epoch, stream and progress.

    A request without prompts only counts against the limits of its key until the gateway aborts it; ``Started`` or
    ``RequestRefused`` answers. It represents work of the gateway itself (tokenizing), or a request whose body the
    gateway has not read yet; the request in that body replaces it (``counted_as``).

    Fields:
        epoch: of the scheduler's welcome, as in every message from here on.
        stream: the first stream number; it also identifies the request in ``Abort``.
        request_id: for people, logs and ``/debug``; unique among live requests.
        params: of all its prompts. limits: of its API key. memory: budgets of the owner of its cache salt (the part
            before the first slash), one for each tier that has one.
        age_us: microseconds since the client's request arrived at the gateway.
        resumed: another scheduler has accepted it before. It is accepted again regardless of queues and limits, and
            continues behind the progress of its prompts.
        counted_as: the stream of the request without prompts, of the same key, that this request replaces without being
            counted again; -1: it was not counted yet.
        traceparent: the gateway's span (W3C), the parent of the scheduler's spans; "": it is not traced.
    """

    epoch: int
    stream: int
    request_id: str
    prompts: Annotated[tuple[Prompt, ...], Meta(max_length=MAX_PROMPTS)]
    params: RequestParams
    limits: KeyLimits = KeyLimits()
    age_us: int = 0
    resumed: bool = False
    counted_as: int = -1
    traceparent: str = ""
    memory: Annotated[tuple[MemoryBudget, ...], Meta(max_length=MAX_BUDGETS)] = ()


class Abort(Message, frozen=True):
    """The client of the request whose first stream is ``stream`` is gone: abort its outputs."""

    epoch: int
    stream: int


class FinishStream(Message, frozen=True):
    """An output is complete: its text contains a stop string. The scheduler drops tokens sampled since then."""

    epoch: int
    stream: int


class MetricSample(Piece, frozen=True):
    """One sample of a metric family: ``name`` with its suffix (``_total``, ``_bucket``, ...), labels, and value."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


class MetricFamily(Piece, frozen=True):
    """A metric family of Prometheus. ``type``: "counter", "gauge" or "histogram"."""

    name: str
    documentation: str
    type: str
    samples: tuple[MetricSample, ...]


class MetricsSnapshot(Message, frozen=True):
    """The gateway's own metrics, absolute values since its process started; sent every second and with a query for
    metrics. The scheduler adds up all gateways, past ones too."""

    epoch: int
    families: tuple[MetricFamily, ...]


class ConsoleView(Piece, frozen=True):
    """The subject of a ``Query`` of the kind "console". Equal views have the same answer for every client.

    Fields:
        part: of the console.
        executor_id: the executor to show; empty: all, each with a share of the cells.
        tier, first, count: the range of blocks to map; a count of 0: all from the first one on.
        colour: the property that the colours of the map show. cells: maximum cells of all maps together.
        block: the block to describe, if ``part`` is "block".
        tokens: add token ids to blocks and prefixes, because the gateway shows their text.
    """

    part: ConsolePart
    executor_id: Annotated[str, Meta(max_length=256)] = ""
    tier: Annotated[str, Meta(max_length=16)] = "device"
    first: Annotated[int, Meta(ge=0)] = 0
    count: Annotated[int, Meta(ge=0)] = 0
    colour: Colour = "state"
    cells: Annotated[int, Meta(ge=1, le=MAX_CELLS)] = 2048
    block: Annotated[int, Meta(ge=0)] = 0
    tokens: bool = False


class Query(Message, frozen=True):
    """Ask for a report: ``QueryAnswer`` with the same ``number`` answers.

    ``kind``: "metrics" (Prometheus' text format, of all processes), "memory" (JSON: the content of every executor's KV
    memory, lists cut to ``limit``), "request" (JSON: the ``RequestReport`` of the request ``argument``, by our id or
    its client's), "cache" (JSON: the cached prefixes of every executor under the cache salt ``argument``, and under
    salts that begin with it and a slash) or "console" (lines of JSON: the ``view``).

    ``key``: restricts the report to this API key's own requests, without block hashes. Empty: everything.
    """

    epoch: int
    number: int
    kind: Literal["metrics", "memory", "request", "cache", "console"]
    argument: str = ""
    limit: int = 0
    key: str = ""
    view: ConsoleView | None = None


class AbortRequest(Message, frozen=True):
    """An operator aborts the request ``request_id``, by our id or its client's, from any gateway.

    Its client receives the finish reason "abort". ``QueryAnswer`` with the same ``number`` answers; it is found if
    there was such a request.
    """

    epoch: int
    number: int
    request_id: str


class ResetCache(Message, frozen=True):
    """An operator releases cached blocks of all executors, as far as they are not in use.

    ``QueryAnswer`` with the same ``number`` answers, with the JSON of a ``CacheReset``.

    ``salt``: the cache salt whose blocks are released, with all salts that begin with it and a slash. Empty: all salts.
    ``external``: the blocks of this model in ``HASH_TIERS`` are deleted too.
    """

    epoch: int
    number: int
    salt: str = ""
    external: bool = False


AdviceKind = Literal["willneed", "cold", "dontneed", "pin", "unpin", "fork", "end", "called"]


class Advise(Message, frozen=True):
    """A client's advice on cached KV: ``Advised`` with the same ``number`` answers.

    Fields:
        kind: "willneed" (it is used within the time), "cold" (move it from the device to a slower tier), "dontneed"
            (release it), "pin" (keep it for the time), "unpin", "fork" (it begins as the parent does), "end" (of the
            session), or "called": the gateway says which tools the answer of a request has called.
        key: name of the client's API key, on whose KV alone it advises. cache_salt: of the requests;
            with tokens, an adapter extends it (``adapter_salt``).
        session, request_id, tokens: the subject. The request by our id, if it is the last turn of its session; tokens
            are a prompt (int32 bytes). For "called", the request and its session.
        seconds: the time; -1: not given.
        parent: of "fork", a session. tools: of "called", their names.
    """

    epoch: int
    number: int
    kind: AdviceKind
    key: str = ""
    cache_salt: str | None = None
    session: str = ""
    request_id: str = ""
    tokens: bytes = b""
    seconds: float = -1.0
    parent: str = ""
    tools: tuple[str, ...] = ()


class RegisterAdapter(Message, frozen=True):
    """Serve an adapter from now on: ``AdapterAnswer`` comes once executors have loaded it, or failed to.

    ``replace``: replace an adapter of this name; running requests keep theirs. ``waits``: without an executor, load and
    list the adapter when one joins, and answer then.
    """

    epoch: int
    number: int
    adapter: Adapter
    replace: bool = False
    waits: bool = False


class UnregisterAdapter(Message, frozen=True):
    """Stop serving the adapter of this name: ``AdapterAnswer`` answers. Running requests keep it."""

    epoch: int
    number: int
    name: str


FromGateway = (
    GatewayHello
    | Submit
    | Abort
    | FinishStream
    | MetricsSnapshot
    | Query
    | AbortRequest
    | ResetCache
    | Advise
    | RegisterAdapter
    | UnregisterAdapter
    | Heartbeat
    | Goodbye
)

# ---- scheduler -> gateway -----------------------------------------------------------------------------


class FleetState(Message, frozen=True):
    """The capacity of the executors that are ready: the limits that requests are checked against. Sent with the welcome
    and whenever it changes.

    Fields:
        ready_executors: executors that take work now.
        max_model_len: maximum tokens (prompt and output) of a sequence; 0: no executor has joined yet.
        vocab_size: of the model; 0: not known yet.
        no_grammars: why no output can be constrained by a grammar; empty: some executor can do it.
        problems: a sentence for each process of the server that keeps restarting and does not become ready.
        snapshots: prompts begin at snapshots of windows or states alone, so ``Prompt.places`` have an effect.
    """

    epoch: int
    ready_executors: int = 0
    max_model_len: int = 0
    vocab_size: int = 0
    no_grammars: str = ""
    problems: tuple[str, ...] = ()
    snapshots: bool = False


class GatewayWelcome(Message, frozen=True):
    """The gateway has joined. The scheduler has no requests of it from another epoch: it submits them again."""

    epoch: int
    heartbeat_ms: int = 1000


class RequestRefused(Piece, frozen=True):
    """A request was not accepted.

    Fields:
        stream: the request's first stream.
        kind: "never_fits" (it exceeds the capacity of any executor), "overloaded" (a queue or a limit is full),
            "unavailable" (there is no executor).
        message: for the client. retry_after: seconds after which there should be room; 0: unknown.
        invalid: the reason of "never_fits" is not the length, so a shorter conversation would not help.
    """

    stream: int
    kind: Literal["never_fits", "overloaded", "unavailable"]
    message: str
    retry_after: int = 0
    invalid: bool = False


class Started(Piece, frozen=True):
    """The first token of a prompt has been computed (sent with or before it), or a request without prompts may run.

    Fields:
        stream: the first stream of the prompt (of the request, if it has no prompts).
        cached_tokens: tokens of the prompt that were found in a cache.
        queue_us, prefill_us: from its arrival at the scheduler to its first step, and from there to the first token.
    """

    stream: int
    cached_tokens: int = 0
    queue_us: int = 0
    prefill_us: int = 0


class StreamFinished(Piece, frozen=True):
    """An output takes no more tokens. ``stop_token``: the token that ended it, or -1."""

    stream: int
    reason: FinishReason
    stop_token: int = -1


class PromptFailed(Piece, frozen=True):
    """A prompt failed after it was accepted.

    ``stream``: the prompt's first stream. ``kind``: "internal", "unavailable" if no executor came that could run it, or
    "invalid" if its grammar cannot be used with the model's tokenizer.
    """

    stream: int
    kind: Literal["internal", "unavailable", "invalid"]
    message: str


class StreamPromptLogprobs(Piece, frozen=True):
    """Log-probabilities of prompt tokens of the prompt whose first stream is ``stream``, in ascending positions."""

    stream: int
    entries: tuple[TokenLogprobs, ...]


class Outputs(Message, frozen=True):
    """All news for one gateway since the last frame: at most one frame per gateway and round.

    Applied in the order of the fields. All tokens of a beam search are in the frame that finishes its outputs.

    Fields:
        refused: requests that were not accepted.
        started: prompts whose first token is in this frame.
        prompt_logprobs: of prompts, as their chunks are computed.
        streams, tokens: parallel (int32 bytes): the stream of each token; tokens of a stream are in order.
        logprobs: for tokens of this frame; ``TokenLogprobs.index`` is the index in ``tokens``, ascending.
        finished: outputs that have ended. failed: prompts that have failed.
    """

    epoch: int
    refused: tuple[RequestRefused, ...] = ()
    started: tuple[Started, ...] = ()
    prompt_logprobs: tuple[StreamPromptLogprobs, ...] = ()
    streams: bytes = b""
    tokens: bytes = b""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finished: tuple[StreamFinished, ...] = ()
    failed: tuple[PromptFailed, ...] = ()


class QueryAnswer(Message, frozen=True):
    """The answer to a ``Query``. ``found``: whether there is one; ``body``: in the format of the query's kind."""

    number: int
    found: bool
    body: bytes = b""


class Advised(Message, frozen=True):
    """The answer to an ``Advise``.

    ``outcome``: "clipped": it is followed in part. ``reason``: of what is clipped or refused. ``blocks``, ``tokens``:
    of the KV that it is about. ``seconds``: for which it holds; 0: it has no time.
    """

    number: int
    outcome: Literal["accepted", "clipped", "refused"]
    reason: str = ""
    blocks: int = 0
    tokens: int = 0
    seconds: float = 0.0


class AdapterAnswer(Message, frozen=True):
    """The result of a ``RegisterAdapter`` or ``UnregisterAdapter``.

    ``kind``: "" on success, else "refused" (``message`` has the reason), "unknown" (no adapter has that name) or
    "unavailable" (no executor could try).
    """

    number: int
    kind: str = ""
    message: str = ""


class AdapterState(Message, frozen=True):
    """The adapters that are served. Sent after the welcome and whenever they change.

    ``version``: greater than that of any state before, across restarts of the scheduler too.
    """

    epoch: int
    version: int = 0
    adapters: AdapterList = ()


ToGateway = (
    GatewayWelcome
    | FleetState
    | AdapterState
    | AdapterAnswer
    | Advised
    | Outputs
    | QueryAnswer
    | HeartbeatAck
    | Rejoin
    | Refused
)
