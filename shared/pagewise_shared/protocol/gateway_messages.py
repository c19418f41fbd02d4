"""The messages between gateways and the scheduler; ``docs/wire-protocol.md`` tells how they are used.

They follow the rules of ``base.py``: one tagged, frozen, array-like struct per frame, fields are only appended.

A gateway numbers its *streams*: every output of every prompt is one, identified by an int32 that the gateway gives out
in ascending order under one epoch. The outputs of a prompt have consecutive numbers, the prompts of a ``Submit`` follow
each other, so output ``j`` of prompt ``i`` is stream ``submit.stream + i * params.n + j``.
"""

from typing import Annotated, Literal

from msgspec import Meta

from pagewise_shared.protocol.adapter_messages import (
    Adapter,
    AdapterAnswer,
    AdapterList,
    AdapterState,
    RegisterAdapter,
    UnregisterAdapter,
)
from pagewise_shared.protocol.base import Message, Piece
from pagewise_shared.protocol.console_messages import AbortRequest, ConsoleView
from pagewise_shared.protocol.limits import MAX_PROMPTS
from pagewise_shared.protocol.messages import (
    Goodbye,
    Heartbeat,
    HeartbeatAck,
    Refused,
    Rejoin,
)
from pagewise_shared.protocol.step_messages import TokenLogprobs
from pagewise_shared.sampling import BeamParams, SamplingParams
from pagewise_shared.segments import ALL_BEFORE

FinishReason = Literal["stop", "length", "abort", "error"]

# ---- gateway -> scheduler -----------------------------------------------------------------------------


class GatewayHello(Message, frozen=True):
    """A gateway offers itself. Sent again, with growing pauses, until ``GatewayWelcome`` or ``Refused`` arrives.

    Fields:
        gateway_id: a name for people and metrics. model_name: what its clients call the model, as the scheduler does.
        instance: tells this process from all others, also from those that had its name before.
        ready_executors: how many executors took work when the gateway was last told; 0: it does not know. A scheduler
            that has just started waits for them for a moment before it places requests.
        rejoins: how often it had joined a scheduler before, this one or another.
        adapters_version, adapters: the last ``AdapterState`` that it was told; a scheduler that knows none as new as
            this one takes it over.
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
    """What the holders of one API key may do; None: as much as there is room for.

    ``concurrent``: requests at once. ``tokens_per_minute``: of prompts and outputs together.
    """

    concurrent: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class ReuseHints(Piece, frozen=True):
    """What is known of when the prefix of a request is used again; eviction learns how far it can be relied on.

    ``retention``: seconds for which its client wants it kept, 0 if it says nothing. ``tool_call_ids``: tokens with
    which the model calls a tool, whose result then comes behind this prefix and the answer.
    """

    retention: int = 0
    tool_call_ids: tuple[int, ...] = ()


class StreamProgress(Piece, frozen=True, gc=False):
    """What a gateway has already received of an output, when it submits a request to another scheduler.

    ``tokens``: its output tokens so far (int32 bytes). ``finished``: it takes no more tokens.
    """

    tokens: bytes
    finished: bool = False


class PromptSegments(Piece, frozen=True):
    """The segments of a prompt (see ``segments.py``).

    ``ranges``: start and stop of each, int32 bytes. ``root``: how many first tokens of the prompt they attend to.
    ``boundary``: so many first tokens of each are computed in their place, and attend to everything before them.
    """

    ranges: bytes
    root: int = ALL_BEFORE
    boundary: int = 0


class Prompt(Piece, frozen=True):
    """One prompt of a request.

    Fields:
        tokens: int32 bytes, at least one token.
        max_tokens: most output tokens of each output; 0: only the prompt is computed, for its log-probabilities.
        progress: of each of its n outputs, if the request is resumed; else empty.
        segments: of the prompt, if it has any.
    """

    tokens: bytes
    max_tokens: int
    progress: Annotated[tuple[StreamProgress, ...], Meta(max_length=MAX_PROMPTS)] = ()
    segments: PromptSegments | None = None

    @property
    def token_ids(self) -> "memoryview[int]":
        """The tokens, not copied."""
        return memoryview(self.tokens).cast("i")


class RequestParams(Piece, frozen=True):
    """How all prompts of a request are computed, and for whom. The scheduler keeps it with each of them.

    Fields:
        sampling: of output 0; the seed of output i is derived from its seed and i.
        n: outputs of each prompt.
        beam: search for the n likeliest outputs instead of sampling.
        priority: lower runs earlier.
        cache_salt: only requests with the same one share cached KV.
        key: name of the API key it came with, "" without one.
        client_request_id: what its client calls it (X-Request-Id), at most 128 printable characters; "" if nothing.
        reuse: of its prefix, as far as anything is known.
        adapter: with which it is computed; None: with the model alone.
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
        """The most sequences of a prompt that may run at a time."""
        return max(self.n, self.beam.width if self.beam is not None else 0)


class Submit(Message, frozen=True):
    """One request of a client: taken as a whole, or refused as a whole (``RequestRefused``).

    The gateway makes it when it has checked the client's request, and keeps it as long as the request lives. Each time
    it is sent, it gets the epoch, the stream and the progress of that moment.

    A request without prompts only counts against the limits of its key until the gateway aborts it, and is answered by
    ``Started`` or ``RequestRefused``. It stands for work of the gateway itself (tokenizing), or for a request whose
    body the gateway has not read yet; the request that is in that body takes its place (``counted_as``).

    Fields:
        epoch: of the scheduler's welcome, as in every message from here on.
        stream: the first stream number; also names the request in ``Abort``.
        request_id: for people, logs and ``/debug``; unique among live requests.
        params: of all its prompts. limits: what its API key may do.
        age_us: microseconds since the client's request arrived at the gateway.
        resumed: another scheduler has accepted it before. It is accepted again, whatever waits and whatever its key has
            used, and goes on behind the progress of its prompts.
        counted_as: the stream of the request without prompts, of the same key, that this one was counted as. It takes
            over its place, and is not counted again; -1: it was not counted yet.
        traceparent: the gateway's span, as W3C writes it, whose children the scheduler makes; "": it is not traced.
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


class Abort(Message, frozen=True):
    """Nobody reads the request any more whose first stream is ``stream``: end what runs of it."""

    epoch: int
    stream: int


class FinishStream(Message, frozen=True):
    """An output is complete: a stop string was found in its text. Tokens sampled since then are dropped."""

    epoch: int
    stream: int


class MetricSample(Piece, frozen=True):
    """One sample of a metric family: ``name`` with its suffix (``_total``, ``_bucket``, ...), labels, and value."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


class MetricFamily(Piece, frozen=True):
    """A metric family as Prometheus knows it. ``type``: "counter", "gauge" or "histogram"."""

    name: str
    documentation: str
    type: str
    samples: tuple[MetricSample, ...]


class MetricsSnapshot(Message, frozen=True):
    """The gateway's own metrics, absolute values since its process started; sent every second and with a query for
    metrics. The scheduler adds those of all gateways, living and gone."""

    epoch: int
    families: tuple[MetricFamily, ...]


class Query(Message, frozen=True):
    """Ask for a report: answered by ``QueryAnswer`` with the same ``number``.

    ``kind``: "metrics" (Prometheus' text format, of all processes), "memory" (JSON: what the KV memory of every
    executor holds, lists cut to ``limit``), "request" (JSON: what the request called ``argument`` holds, by our id or
    its client's) or "console" (lines of JSON: what ``view`` asks for).

    ``detail``: "explain" asks of a request where its time went and where its cached prefix was lost, instead; a
    scheduler that does not know this answers with what it holds.

    ``key``: name of the API key whose view it is: it sees its own requests, without block hashes, and nothing else.
    Empty: everything.
    """

    epoch: int
    number: int
    kind: Literal["metrics", "memory", "request", "console"]
    argument: str = ""
    limit: int = 0
    key: str = ""
    view: ConsoleView | None = None
    detail: str = ""


FromGateway = (
    GatewayHello
    | Submit
    | Abort
    | FinishStream
    | MetricsSnapshot
    | Query
    | AbortRequest
    | RegisterAdapter
    | UnregisterAdapter
    | Heartbeat
    | Goodbye
)

# ---- scheduler -> gateway -----------------------------------------------------------------------------


class FleetState(Message, frozen=True):
    """What the executors that are ready could hold: the limits that requests are checked against. Sent with the
    welcome and whenever it changes.

    Fields:
        ready_executors: executors that take work now.
        max_model_len: most tokens (prompt and output) one sequence may reach; 0: no executor has joined yet.
        vocab_size: of the model; 0: not known yet.
        no_grammars: why no output can be made to match a grammar; empty: some executor can.
        problems: a sentence for each process of the server that is started again and again, and does not become ready.
    """

    epoch: int
    ready_executors: int = 0
    max_model_len: int = 0
    vocab_size: int = 0
    no_grammars: str = ""
    problems: tuple[str, ...] = ()


class GatewayWelcome(Message, frozen=True):
    """The gateway is in. What it submitted under another epoch is not known here: it submits it again."""

    epoch: int
    heartbeat_ms: int = 1000


class RequestRefused(Piece, frozen=True):
    """A request was not taken, and why.

    Fields:
        stream: the request's first stream.
        kind: "never_fits" (it exceeds what any executor could hold), "overloaded" (a queue or a limit is full),
            "unavailable" (there is no executor).
        message: for the client. retry_after: seconds after which there should be room; 0: nothing is known.
        invalid: it never fits for another reason than its length, so a shorter conversation would not help.
    """

    stream: int
    kind: Literal["never_fits", "overloaded", "unavailable"]
    message: str
    retry_after: int = 0
    invalid: bool = False


class Started(Piece, frozen=True):
    """The first token of a prompt has been computed (told with or before it), or a request without prompts may run.

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
    """An output takes no more tokens. ``stop_token``: the token that ended it, if one did, else -1."""

    stream: int
    reason: FinishReason
    stop_token: int = -1


class PromptFailed(Piece, frozen=True):
    """What was to be generated from a prompt failed after it was accepted.

    ``stream``: the prompt's first stream. ``kind``: "internal", "unavailable" if no executor came that could run it, or
    "invalid" if its grammar makes no sense with the model's tokenizer.
    """

    stream: int
    kind: Literal["internal", "unavailable", "invalid"]
    message: str


class StreamPromptLogprobs(Piece, frozen=True):
    """Log-probabilities of prompt tokens of the prompt whose first stream is ``stream``, in ascending positions."""

    stream: int
    entries: tuple[TokenLogprobs, ...]


class Outputs(Message, frozen=True):
    """Everything that is new for one gateway since the last frame: one frame per gateway and round.

    Applied in the order of the fields. Outputs of beam searches come whole, in the frame that finishes them.

    Fields:
        refused: requests that were not taken.
        started: prompts whose first token is in this frame.
        prompt_logprobs: of prompts, as their chunks are computed.
        streams, tokens: parallel (int32 bytes): a token for each stream that is named, several in order if it is named
            several times.
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
    """The answer to a ``Query``. ``found``: whether there is one; ``body``: as the query's kind says."""

    number: int
    found: bool
    body: bytes = b""


ToGateway = (
    GatewayWelcome | FleetState | AdapterState | AdapterAnswer | Outputs | QueryAnswer | HeartbeatAck | Rejoin | Refused
)
