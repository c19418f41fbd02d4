"""Makes the report of an executor's memory, from which ``/debug/memory``, consoles and ``pagewise vmstat`` are made."""

from collections.abc import Mapping
from itertools import islice

from msgspec.structs import asdict
from pagewise_shared.protocol import tier_name
from pagewise_shared.reports import (
    CostReport,
    DeviceReport,
    ExecutorReport,
    LinkReport,
    MemoryReport,
    TierReport,
)

from pagewise_scheduler.core.console.prefixes import TreeWalk, saved_blocks
from pagewise_scheduler.core.group_report import group_reports
from pagewise_scheduler.core.request_report import Room, request_report
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.cost_model import CostModel, Link

_MOST_PEERS = 1024


def executor_report(executor_id: str, scheduler: Scheduler, names: Mapping[str, str] | None = None) -> ExecutorReport:
    """Return the state of an executor's memory.

    ``names``: of executors, by their block endpoints: peers are called by these, and others are left out.
    """
    kv, pool = scheduler.kv, scheduler.kv.pool
    return ExecutorReport(
        executor_id=executor_id,
        block_endpoint=scheduler.recoveries.planner.endpoint,
        block_size=kv.block_size,
        device=DeviceReport(
            kv.num_total,
            kv.num_free,
            kv.num_total - kv.num_free - kv.num_in_use,
            kv.num_in_use,
            kv.num_retiring,
            pool.num_remote_pins,
            group_reports(kv, pool),
        ),
        tiers={
            tier_name(tier.number): TierReport(
                *tier.memory,
                tier.num_arriving,
                tier.costs.load.num_loading,
                group_reports(kv, tier),
            )
            for tier in pool.lower
        },
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        steps_in_flight=scheduler.num_in_flight,
        preemptions=scheduler.num_preemptions,
        counters=pool.counters.by_name(),
        costs=_cost_report(scheduler.costs, names),
        saved_blocks=saved_blocks(scheduler),
        tree_blocks=pool.tree.num_blocks,
    )


def memory_report(executor_id: str, scheduler: Scheduler, now: float, limit: int) -> MemoryReport:
    """Return the memory of an executor with its requests and its prefix tree.

    At most ``limit`` requests, sequences, blocks and events of them, and runs of the tree are listed.
    """
    requests, room = scheduler.requests, Room(limit)
    walk = TreeWalk(scheduler, limit, scheduler.kv.pool.tree.num_blocks + 1, most_children=limit + 1)
    return MemoryReport(
        **asdict(executor_report(executor_id, scheduler)),
        requests=[request_report(request, scheduler, now, room) for request in requests[:limit]],
        tree=walk.runs(),
        truncated=room.cut or walk.truncated or len(requests) > limit,
    )


def _cost_report(costs: CostModel, names: Mapping[str, str] | None) -> CostReport:
    step, token, attention, context = (1e6 * constant for constant in costs.prefill.constants)
    peers = islice(costs.peers.items(), _MOST_PEERS)
    return CostReport(
        step=step,
        token=token,
        attention=attention,
        context=context,
        prefill_error=costs.prefill.error,
        tiers={tier_name(number): _link_report(tier.load) for number, tier in costs.tiers.items()},
        peers={peer: _link_report(link) for peer, link in peers}
        if names is None
        else {names[peer]: _link_report(link) for peer, link in peers if peer in names},
    )


def _link_report(link: Link) -> LinkReport:
    setup, block = (1e6 * constant for constant in link.constants)
    return LinkReport(setup, block, 1e6 * link.wait, link.error, link.num_loading, link.rests, link.dtype)
