"""Reports of the KV memory: the plain data that ``/debug`` shows as JSON."""

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace


class DeviceReport(Struct):
    """Blocks of the device by state. ``retiring``: references that end when a step in flight returns.

    ``lent``: references of other executors, which read the blocks; they are in use meanwhile.
    """

    num_blocks: int
    free: int
    cached: int
    in_use: int
    retiring: int
    lent: int


class TierReport(Struct):
    """Blocks of a tier below the device. ``storing``, ``loading``: blocks whose copies to and from it are under way."""

    num_blocks: int
    used: int
    storing: int
    loading: int


class LinkReport(Struct):
    """What the cost model believes of copies from a lower tier or a peer; as in ``CostReport``.

    ``loading``: blocks asked for that have not arrived. ``rests``: choices for which it is left alone after a failure.
    """

    setup: float
    block: float
    wait: float
    error: float
    loading: int
    rests: int


class CostReport(Struct):
    """What the cost model believes now, in microseconds; ``error``: its mean relative error, 0 is exact.

    ``tiers``: loading from the tiers below the device, by their names. ``peers``: fetching from other executors, by
    their block endpoints.
    """

    step: float
    token: float
    attention: float
    context: float
    prefill_error: float
    tiers: dict[str, LinkReport]
    peers: dict[str, LinkReport]


class BlockReport(Struct, omit_defaults=True):
    """A block of a sequence: its index in the block table, its id on the device, and those of its copies in lower
    tiers, by the names of these.

    ``cached``: its content is known, so that others can share it. ``hash``: its block hash in hex then.
    """

    index: int
    block: int
    references: int
    copies: dict[str, int] = {}
    cached: bool = False
    hash: str = ""


class EventReport(Struct, omit_defaults=True):
    """Something that happened to a sequence's memory; ``seconds_ago`` when it was asked for.

    Kinds: "started" and "resumed" (``method`` says how it got its KV; ``device_tokens`` were on the device;
    ``loaded_tokens`` came from ``sources``, some of ``SOURCES``, which had them also if they were computed, most of
    them from ``source``; ``peer``: the block endpoint of another executor among them, or its name),
    "preempted" (``reason`` says for what; ``blocks`` it let go, ``freed`` of them that no other sequence held; ``by``:
    the id of the request that needed them, ``by_key``: the name of its API key), "started over" (the same for no other
    request: blocks that were to be loaded for it had not come).
    """

    seconds_ago: float
    kind: str
    method: str | None = None
    reason: str | None = None
    device_tokens: int | None = None
    loaded_tokens: int | None = None
    source: str | None = None
    peer: str | None = None
    blocks: int | None = None
    freed: int | None = None
    by: str | None = None
    by_key: str | None = None
    predicted_seconds: dict[str, float] | None = None
    actual_seconds: float | None = None
    sources: list[str] = []


class SequenceReport(Struct, omit_defaults=True):
    """One output of a request. ``shared``: blocks of its table that others hold too."""

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
    history: list[EventReport] = []


class ExecutorReport(Struct):
    """An executor on which a request was placed, and how long ago."""

    executor_id: str
    seconds_ago: float


class ChunkReport(Struct):
    """A step that was planned ``seconds_ago`` computed so many tokens of a request, beside its decodes."""

    seconds_ago: float
    tokens: int


class RequestReport(Struct):
    """A request's memory, and its times.

    Fields:
        client_request_id: the id that its client gave it, "" if none. key: name of its API key.
        arrived_seconds_ago: since it came to its gateway. queue_seconds, first_token_seconds: from then to its first
            step, and to its first token; None until then. They are of this scheduler, if there was one before it.
        executors: where it was placed, the last few, the newest last.
        cached_tokens: by where they were found when it first ran.
        chunks: in which it was prefilled; of more than 32, neighbours are added up.
        ended_seconds_ago: since it ended, None if it has not.
        truncated: sequences, blocks or events were left out.
    """

    request_id: str
    client_request_id: str
    key: str
    priority: int
    arrived_seconds_ago: float
    queue_seconds: float | None
    first_token_seconds: float | None
    executors: list[ExecutorReport]
    cached_tokens: dict[str, int]
    sequences: list[SequenceReport]
    truncated: bool = False
    chunks: list[ChunkReport] = []
    ended_seconds_ago: float | None = None


class RunReport(Struct):
    """A run of the prefix tree: blocks that follow one another without a fork, the first at ``depth``.

    ``tiers``: how many lie in each tier, by its name. ``references``: of the first block. ``forks``: runs that follow;
    ``parent``: index of the run before it in the list, -1: it begins with a root.
    """

    parent: int
    depth: int
    num_blocks: int
    tiers: dict[str, int]
    references: int
    forks: int


class MemoryReport(Struct):
    """Everything about one executor's KV memory; ``truncated`` if a list was cut to the limit asked for.

    ``tiers``: those below the device, by their names. ``block_endpoint``: the address at which others fetch from it;
    empty: it lends nothing.
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
    requests: list[RequestReport]
    tree_blocks: int
    tree: list[RunReport]
    truncated: bool


def later(report: RequestReport, seconds: float) -> RequestReport:
    """A report of something that has ended, asked for so many seconds after it was made."""
    sequences = [
        replace(
            sequence,
            history=[replace(event, seconds_ago=round(event.seconds_ago + seconds, 6)) for event in sequence.history],
        )
        for sequence in report.sequences
    ]
    return replace(
        report,
        arrived_seconds_ago=round(report.arrived_seconds_ago + seconds, 6),
        executors=[replace(one, seconds_ago=round(one.seconds_ago + seconds, 6)) for one in report.executors],
        sequences=sequences,
        chunks=[replace(one, seconds_ago=round(one.seconds_ago + seconds, 6)) for one in report.chunks],
        ended_seconds_ago=round((report.ended_seconds_ago or 0.0) + seconds, 6),
    )


def shown(report: RequestReport, names: Mapping[str, str], key: str) -> RequestReport:
    """A report as the client gets it that asks for this one request.

    ``names``: of executors, by their block endpoints; others are left out. ``key``: the name of the API key that asks,
    "" for an operator's: only operators see block hashes, and the ids of other keys' requests.
    """

    def shown_event(event: EventReport) -> EventReport:
        event = replace(event, peer=names.get(event.peer or ""))
        return replace(event, by=None, by_key=None) if key and event.by_key != key else event

    sequences = [
        replace(
            sequence,
            blocks=[replace(block, hash="") for block in sequence.blocks] if key else sequence.blocks,
            history=[shown_event(event) for event in sequence.history],
        )
        for sequence in report.sequences
    ]
    return replace(report, sequences=sequences)
