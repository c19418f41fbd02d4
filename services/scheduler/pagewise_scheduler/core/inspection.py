"""What one scheduler's memory looks like right now, as plain data of bounded size."""

from itertools import islice
from math import isnan

from msgspec import Struct
from msgspec.structs import replace
from pagewise_shared.protocol import HOST

from pagewise_scheduler.core.memory.copy_costs import Link
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, hash_of
from pagewise_scheduler.core.recovery.cost_model import CostModel
from pagewise_scheduler.core.recovery.recovery_plan import Recovery
from pagewise_scheduler.core.requests.request import Preempted, Request, Sequence
from pagewise_scheduler.core.scheduling.scheduler import Scheduler


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


class HostReport(Struct):
    """Blocks of the host. ``storing``, ``loading``: copies under way."""

    num_blocks: int
    used: int
    storing: int
    loading: int


class LinkReport(Struct):
    """What the cost model believes of fetching from ``peer``, an executor's block endpoint; as in ``CostReport``.

    ``loading``: blocks asked for that have not arrived. ``rests``: choices for which it is left alone after a failure.
    """

    peer: str
    setup: float
    block: float
    wait: float
    error: float
    loading: int
    rests: int


class CostReport(Struct):
    """What the cost model believes now, in microseconds; ``error``: its mean relative error, 0 is exact."""

    step: float
    token: float
    attention: float
    context: float
    load_setup: float
    load_block: float
    load_wait: float
    prefill_error: float
    load_error: float
    peers: list[LinkReport]


class BlockReport(Struct, omit_defaults=True):
    """A block of a sequence: its index in the block table, its ids on the device and the host (-1: not there).

    ``hash``: its block hash in hex once it is cached, so that others can share it.
    """

    index: int
    block: int
    references: int
    host: int = -1
    hash: str = ""


class EventReport(Struct, omit_defaults=True):
    """Something that happened to a sequence's memory; ``seconds_ago`` when it was asked for.

    Kinds: "started" and "resumed" (``method`` says how it got its KV, and its tokens by where they were), "preempted"
    (``reason`` says for what; ``blocks`` it let go, ``freed`` of them that nobody else held).
    """

    seconds_ago: float
    kind: str
    method: str | None = None
    reason: str | None = None
    device_tokens: int | None = None
    host_tokens: int | None = None
    peer_tokens: int | None = None
    blocks: int | None = None
    freed: int | None = None
    predicted_seconds: dict[str, float] | None = None
    actual_seconds: float | None = None


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


class RequestReport(Struct):
    """A request's memory. ``cached_tokens`` by where they were found when it first ran.

    ``truncated`` if sequences, blocks or events were left out.
    """

    request_id: str
    priority: int
    cached_tokens: dict[str, int]
    sequences: list[SequenceReport]
    truncated: bool = False


class RunReport(Struct):
    """A run of the prefix tree: blocks that follow one another without a fork, the first at ``depth``.

    ``on_device``, ``on_host``: how many lie there. ``references``: of the first block. ``forks``: runs that follow;
    ``parent``: index of the run before it in the list, -1: it begins with a root.
    """

    parent: int
    depth: int
    num_blocks: int
    on_device: int
    on_host: int
    references: int
    forks: int


class MemoryReport(Struct):
    """Everything about one executor's KV memory; ``truncated`` if a list was cut to the limit asked for.

    ``block_endpoint``: what it is called where others fetch from it; empty: it lends nothing.
    """

    executor_id: str
    block_endpoint: str
    block_size: int
    device: DeviceReport
    host: HostReport
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


class _Room:
    """How much a report may still list: so many sequences, blocks and events each."""

    __slots__ = ("blocks", "cut", "events", "sequences")

    def __init__(self, limit: int) -> None:
        self.sequences = self.blocks = self.events = limit
        self.cut = False


def memory_report(executor_id: str, scheduler: Scheduler, now: float, limit: int) -> MemoryReport:
    """At most ``limit`` requests, sequences, blocks and events of them, runs of the tree, and links."""
    kv, pool, costs = scheduler.kv, scheduler.kv.pool, scheduler.costs
    requests, room = scheduler.requests, _Room(limit)
    tree = _runs(scheduler, limit)
    return MemoryReport(
        executor_id=executor_id,
        block_endpoint=scheduler.recoveries.endpoint,
        block_size=kv.block_size,
        device=DeviceReport(
            pool.num_blocks, pool.num_free, pool.num_cached, pool.num_in_use, kv.num_retiring, pool.num_lent
        ),
        host=_host_report(scheduler),
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        steps_in_flight=scheduler.num_in_flight,
        preemptions=scheduler.num_preemptions,
        counters={name: getattr(pool.counters, name) for name in pool.counters.__slots__},
        costs=_cost_report(costs, limit),
        requests=[_request_report(request, scheduler, now, room) for request in requests[:limit]],
        tree_blocks=pool.tree.num_blocks,
        tree=tree[:limit],
        truncated=room.cut or max(len(requests), len(tree), len(costs.peers)) > limit,
    )


def _host_report(scheduler: Scheduler) -> HostReport:
    host, loading = scheduler.kv.cache_tier(HOST), scheduler.recoveries.num_loading
    if host is None:
        return HostReport(0, 0, 0, loading)
    return HostReport(host.num_blocks, host.num_used, host.num_arriving, loading)


def _cost_report(costs: CostModel, limit: int) -> CostReport:
    step, token, attention, context = (1e6 * constant for constant in costs.prefill.constants)
    load = _link_report("", costs.tiers[HOST].load if HOST in costs.tiers else Link(0.0, 0.0))
    return CostReport(
        step=step,
        token=token,
        attention=attention,
        context=context,
        load_setup=load.setup,
        load_block=load.block,
        load_wait=load.wait,
        prefill_error=costs.prefill.error,
        load_error=load.error,
        peers=[_link_report(peer, link) for peer, link in islice(costs.peers.items(), limit)],
    )


def _link_report(peer: str, link: Link) -> LinkReport:
    setup, block = (1e6 * constant for constant in link.constants)
    return LinkReport(peer, setup, block, 1e6 * link.wait, link.error, link.num_loading, link.rests)


def request_report(request: Request, scheduler: Scheduler, now: float, limit: int) -> RequestReport:
    """At most ``limit`` of a request's sequences, of their blocks, and of what happened to them."""
    return _request_report(request, scheduler, now, _Room(limit))


def later(report: RequestReport, seconds: float) -> RequestReport:
    """A report of something that has ended, asked for so many seconds after it was made."""
    sequences = [
        replace(
            sequence,
            history=[replace(event, seconds_ago=round(event.seconds_ago + seconds, 6)) for event in sequence.history],
        )
        for sequence in report.sequences
    ]
    return replace(report, sequences=sequences)


def _request_report(request: Request, scheduler: Scheduler, now: float, room: _Room) -> RequestReport:
    shown = request.sequences[: room.sequences]
    room.sequences -= len(shown)
    sequences = [_sequence_report(sequence, scheduler, now, room) for sequence in shown]
    cut = len(shown) < len(request.sequences) or any(sequence.truncated for sequence in sequences)
    room.cut |= cut
    return RequestReport(
        request.request_id,
        request.priority,
        {
            "device": request.num_cached_tokens - sum(request.loaded_tokens.values()),
            "host": 0,
            "peer": 0,
        }
        | request.loaded_tokens,
        sequences,
        cut,
    )


def _sequence_report(sequence: Sequence, scheduler: Scheduler, now: float, room: _Room) -> SequenceReport:
    pool, table = scheduler.kv.pool, sequence.table
    blocks = table.blocks[: room.blocks]
    history = list(sequence.history)[max(0, len(sequence.history) - room.events) :]
    room.blocks -= len(blocks)
    room.events -= len(history)
    known = sequence.num_tokens - 1 if sequence.prefilled else sequence.num_computed_tokens
    return SequenceReport(
        index=sequence.index,
        status=sequence.status.name.lower(),
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_output_tokens=len(sequence.output_token_ids),
        num_computed_tokens=known if table.blocks else 0,
        num_blocks=len(table.blocks),
        shared=sum(1 for block in table.blocks if pool.references(block) > 1),
        preemptions=sequence.num_preemptions,
        finish_reason=sequence.finish_reason,
        blocks=[
            BlockReport(
                index,
                block,
                pool.references(block),
                node.block_id(HOST) if (node := pool.node(block)) is not None else -1,
                hash_of(node).hex() if node is not None else "",
            )
            for index, block in enumerate(blocks)
        ],
        truncated=len(blocks) < len(table.blocks) or len(history) < len(sequence.history),
        history=[_event(event, now) for event in history],
    )


def _event(event: object, now: float) -> EventReport:
    if isinstance(event, Preempted):
        seconds = round(now - event.time, 6)
        return EventReport(seconds, "preempted", reason=event.reason, blocks=event.blocks, freed=event.freed)
    assert isinstance(event, Recovery)
    report = EventReport(
        round(now - event.began, 6),
        "resumed" if event.resumed else "started",
        method=event.method,
        device_tokens=event.device_tokens,
        host_tokens=event.loaded_tokens if event.origin == "host" else 0,
        peer_tokens=event.loaded_tokens if event.origin == "peer" else 0,
    )
    if event.estimate is not None:
        estimate = event.estimate
        report.predicted_seconds = {"load": estimate.load, "recompute": estimate.recompute, "both": estimate.both}
        report.actual_seconds = None if isnan(event.ended) else round(event.ended - event.began, 6)
    return report


def _runs(scheduler: Scheduler, limit: int) -> list[RunReport]:
    """Runs in order of depth first, at most one more than ``limit``."""
    pool = scheduler.kv.pool
    runs: list[RunReport] = []
    stack: list[tuple[int, CachedBlock]] = [
        (-1, node) for root in pool.tree.roots for node in islice(root.children.values(), limit + 1)
    ]
    while stack and len(runs) <= limit:
        parent, node = stack.pop()
        references = pool.references(node.block) if node.block >= 0 else 0
        run = RunReport(parent, node.depth, 0, 0, 0, references, 0)
        while True:
            run.num_blocks += 1
            run.on_device += node.block >= 0
            run.on_host += node.block_id(HOST) >= 0
            if len(node.children) != 1:
                break
            node = next(iter(node.children.values()))
        run.forks = len(node.children)
        stack += [(len(runs), child) for child in islice(node.children.values(), limit + 1)]
        runs.append(run)
    return runs
