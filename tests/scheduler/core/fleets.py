"""Fleets of schedulers, each with an executor that checks every read and write, which fetch each other's blocks."""

from collections import deque
from collections.abc import Hashable, Sequence

from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.arena import ArenaShape, WindowShape
from pagewise_scheduler.core.tiers.cost_model import Costs
from pagewise_scheduler.core.tiers.peer import Peer, PrefixDirectory
from pagewise_scheduler.core.tiers.recovery_plan import RecoveryMode
from pagewise_shared.protocol import StepResult

from tests.scheduler.core.builders import create_scheduler
from tests.scheduler.core.driving import executor_for


class Node:
    """A scheduler, its executor, and the results that are on their way."""

    def __init__(
        self, name: str, directory: PrefixDirectory, scheduler: Scheduler, block_format: Hashable = ""
    ) -> None:
        self.name, self.scheduler = name, scheduler
        self.executor = executor_for(scheduler)
        self.results: deque[StepResult] = deque()
        scheduler.recoveries.planner.join(directory, Peer(name, block_format, scheduler, lambda: None))

    def deliver(self, count: int = 1_000_000) -> None:
        for message in self.executor.finish_copies(count):
            self.scheduler.copied(message)


def fleet(count: int, recovery: RecoveryMode = "swap", **options: object) -> list[Node]:
    directory = PrefixDirectory()
    nodes = [
        Node(f"node {number}", directory, create_scheduler(recovery=recovery, **options))  # type: ignore[arg-type]
        for number in range(count)
    ]
    for node in nodes:
        node.executor.peers = {other.name: other.executor for other in nodes}
    return nodes


def mixed_fleet(
    sizes: Sequence[int],
    recovery: RecoveryMode,
    num_tokens: int,
    num_host_tokens: int,
    costs: Costs,
    windows: tuple[WindowShape, ...] = (),
) -> list[Node]:
    """Executors with blocks of these sizes, and pools for as many tokens. The size identifies their kind of blocks.

    ``windows``: groups of windowed layers, which share the pools.
    """
    directory = PrefixDirectory()
    pages = 1 + sum(one.pages_per_block for one in windows)
    nodes = [
        Node(
            f"node {number}",
            directory,
            create_scheduler(
                recovery=recovery,
                block_size=size,
                num_blocks=-(-num_tokens // size),
                num_host_blocks=-(-num_host_tokens // size) * pages,
                costs=costs,
                shape=ArenaShape(-(-num_tokens // size) * pages, 1, windows, 64) if windows else None,
            ),
            block_format=size,
        )
        for number, size in enumerate(sizes)
    ]
    for node in nodes:
        node.executor.peers = {other.name: other.executor for other in nodes}
    return nodes
