"""What one scheduler's memory looks like right now, as plain data of bounded size."""

from itertools import islice
from math import isnan

from msgspec import Struct
from msgspec.structs import replace
from pagewise_shared.protocol import DEVICE, TIER_NAMES, tier_name

from pagewise_scheduler.core.memory.block_pool import BlockPool
from pagewise_scheduler.core.memory.cache_tier import CacheTier
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

    ``hash``: its block hash in hex once it is cached, so that others can share it.
    """

    index: int
    block: int
    references: int
    copies: dict[str, int] = {}
    hash: str = ""


class EventReport(Struct, omit_defaults=True):
    """Something that happened to a sequence's memory; ``seconds_ago`` when it was asked for.

    Kinds: "started" and "resumed" (``method`` says how it got its KV; ``device_tokens`` were on the device;
    ``loaded_tokens`` came from ``source``, a tier by its name or "peer", which had them also if they were computed),
    "preempted" (``reason`` says for what; ``blocks`` it let go, ``freed`` of them that nobody else held).
    """

    seconds_ago: float
    kind: str
    method: str | None = None
    reason: str | None = None
    device_tokens: int | None = None
    loaded_tokens: int | None = None
    source: str | None = None
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

    ``tiers``: those below the device, by their names. ``block_endpoint``: what it is called where others fetch from it;
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
        tiers={tier_name(tier.number): _tier_report(tier) for tier in pool.lower},
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        steps_in_flight=scheduler.num_in_flight,
        preemptions=scheduler.num_preemptions,
        counters=pool.counters.by_name(),
        costs=_cost_report(costs, limit),
        requests=[_request_report(request, scheduler, now, room) for request in requests[:limit]],
        tree_blocks=pool.tree.num_blocks,
        tree=tree[:limit],
        truncated=room.cut or max(len(requests), len(tree), len(costs.peers)) > limit,
    )


def _tier_report(tier: CacheTier) -> TierReport:
    return TierReport(tier.num_blocks, tier.num_used, tier.num_arriving, tier.costs.load.num_loading)


def _cost_report(costs: CostModel, limit: int) -> CostReport:
    step, token, attention, context = (1e6 * constant for constant in costs.prefill.constants)
    return CostReport(
        step=step,
        token=token,
        attention=attention,
        context=context,
        prefill_error=costs.prefill.error,
        tiers={tier_name(number): _link_report(tier.load) for number, tier in costs.tiers.items()},
        peers={peer: _link_report(link) for peer, link in islice(costs.peers.items(), limit)},
    )


def _link_report(link: Link) -> LinkReport:
    setup, block = (1e6 * constant for constant in link.constants)
    return LinkReport(setup, block, 1e6 * link.wait, link.error, link.num_loading, link.rests)


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
        dict.fromkeys((*TIER_NAMES, "peer"), 0)
        | {tier_name(DEVICE): request.num_cached_tokens - sum(request.loaded_tokens.values())}
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
                _copies(node, pool) if (node := pool.node(block)) is not None else {},
                hash_of(node).hex() if node is not None else "",
            )
            for index, block in enumerate(blocks)
        ],
        truncated=len(blocks) < len(table.blocks) or len(history) < len(sequence.history),
        history=[_event(event, now) for event in history],
    )


def _copies(node: CachedBlock, pool: BlockPool) -> dict[str, int]:
    return {tier_name(tier.number): block for tier in pool.lower if (block := node.block_id(tier.number)) >= 0}


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
        loaded_tokens=event.loaded_tokens,
        source=event.origin,
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
        run = RunReport(parent, node.depth, 0, {}, references, 0)
        here = dict.fromkeys(scheduler.kv.tiers, 0)
        while True:
            run.num_blocks += 1
            for number in here:
                here[number] += node.block_id(number) >= 0
            if len(node.children) != 1:
                break
            node = next(iter(node.children.values()))
        run.tiers = {tier_name(number): count for number, count in here.items()}
        run.forks = len(node.children)
        stack += [(len(runs), child) for child in islice(node.children.values(), limit + 1)]
        runs.append(run)
    return runs
