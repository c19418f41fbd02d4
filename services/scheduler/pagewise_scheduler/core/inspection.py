"""Looks into one scheduler's memory, and tells what it is like right now as plain data of bounded size."""

from itertools import islice
from math import isnan

from pagewise_shared.protocol import tier_name

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, hash_of
from pagewise_scheduler.core.memory_reports import (
    BlockReport,
    ChunkReport,
    CostReport,
    DeviceReport,
    EventReport,
    ExecutorReport,
    LinkReport,
    MemoryReport,
    RequestReport,
    RunReport,
    SequenceReport,
    TierReport,
)
from pagewise_scheduler.core.requests.request import Preempted, Request, RequestSequence
from pagewise_scheduler.core.requests.timeline import BLOCKS_CORRUPT, LENDER_GONE
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.cost_model import CostModel, Link
from pagewise_scheduler.core.tiers.device import BlockPool
from pagewise_scheduler.core.tiers.recovery_plan import Recovery


class _Room:
    """How much a report may still list: so many sequences, blocks and events each."""

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
            pool.num_blocks, pool.num_free, pool.num_cached, pool.num_in_use, kv.num_retiring, pool.num_remote_pins
        ),
        tiers=tier_reports(scheduler),
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


def tier_reports(scheduler: Scheduler) -> dict[str, TierReport]:
    """The tiers with ids below the device, by their names."""
    return {
        tier_name(tier.number): TierReport(
            tier.num_blocks, tier.num_used, tier.num_arriving, tier.costs.load.num_loading
        )
        for tier in scheduler.kv.pool.lower
    }


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


def request_report(
    request: Request, scheduler: Scheduler, now: float, limit: int, *, ended: bool = False
) -> RequestReport:
    """At most ``limit`` of a request's sequences, of their blocks, and of what happened to them. ``ended``: it ends at
    ``now``."""
    report = _request_report(request, scheduler, now, _Room(limit))
    report.ended_seconds_ago = 0.0 if ended else None
    return report


def _request_report(request: Request, scheduler: Scheduler, now: float, room: _Room) -> RequestReport:
    shown = request.sequences[: room.sequences]
    room.sequences -= len(shown)
    sequences = [_sequence_report(sequence, scheduler, now, room) for sequence in shown]
    cut = len(shown) < len(request.sequences) or any(sequence.truncated for sequence in sequences)
    room.cut |= cut
    return _report(request, now, sequences, cut)


def unplaced_report(request: Request, now: float) -> RequestReport:
    """A request that no executor can take now: it has no memory."""
    return _report(request, now, [], cut=False)


def _report(request: Request, now: float, sequences: list[SequenceReport], cut: bool) -> RequestReport:
    return RequestReport(
        request.request_id,
        request.params.client_request_id,
        request.params.key,
        request.params.priority,
        round(now - request.arrival_time, 6),
        seconds_between(request.arrival_time, request.scheduled_time),
        seconds_between(request.arrival_time, request.first_token_time),
        [ExecutorReport(executor_id, round(now - then, 6)) for then, executor_id in request.executors],
        request.cached_tokens,
        sequences,
        cut,
        [ChunkReport(round(now - one.time, 6), one.tokens) for one in request.timeline.chunks],
    )


def seconds_between(start: float, end: float) -> float | None:
    """The seconds from one time to another one, None if that is not known."""
    return None if isnan(end) else round(max(0.0, end - start), 6)


def _sequence_report(sequence: RequestSequence, scheduler: Scheduler, now: float, room: _Room) -> SequenceReport:
    pool, table = scheduler.kv.pool, sequence.table
    blocks = table.blocks[: room.blocks]
    history = sequence.history[max(0, len(sequence.history) - room.events) :]
    room.blocks -= len(blocks)
    room.events -= len(history)
    return SequenceReport(
        index=sequence.index,
        status=sequence.status.name.lower(),
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_output_tokens=len(sequence.output_token_ids),
        num_computed_tokens=sequence.num_with_kv if table.blocks else 0,
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
                node is not None,
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
        kind = "started over" if event.reason in (BLOCKS_CORRUPT, LENDER_GONE) else "preempted"
        seconds, by = round(now - event.time, 6), event.by
        return EventReport(
            seconds,
            kind,
            reason=event.reason,
            blocks=event.blocks,
            freed=event.freed,
            by=by.request_id if by is not None else None,
            by_key=by.key if by is not None else None,
        )
    assert isinstance(event, Recovery)
    report = EventReport(
        round(now - event.began, 6),
        "resumed" if event.resumed else "started",
        method=event.method,
        device_tokens=event.device_tokens,
        loaded_tokens=event.loaded_tokens,
        source=event.origin,
        peer=event.plan.peer,
        sources=event.plan.sources,
    )
    if event.estimate is not None:
        report.predicted_seconds = event.estimate.by_method
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
        nodes = [node]
        while len(node.children) == 1:
            (node,) = node.children.values()
            nodes.append(node)
        here = {tier_name(number): sum(one.block_id(number) >= 0 for one in nodes) for number in scheduler.kv.tiers}
        run = RunReport(parent, nodes[0].depth, len(nodes), here, references, len(node.children))
        stack += [(len(runs), child) for child in islice(node.children.values(), limit + 1)]
        runs.append(run)
    return runs
