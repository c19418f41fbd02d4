"""Loads of the next blocks of a cached prefix, for which no sequence waits here.

``Prefetches`` load for requests that run at other executors, ``LoadsAhead`` for predicted uses. Blocks that have come
are cached like any others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from operator import attrgetter
from typing import TYPE_CHECKING

from pagewise_scheduler.core.memory.block_table import BlockTable
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.tiers.tier import Location
from pagewise_scheduler.core.tiers.transfers import Loads

if TYPE_CHECKING:
    from pagewise_scheduler.core.scheduling.scheduler import Scheduler


@dataclass(slots=True, eq=False)
class Piece:
    """Consecutive blocks of a load that one list of copies brings.

    ``blocks``: the device blocks into which they are copied. ``group``: of layers. ``num_good``: how many of the
    blocks, from the first one on, have the right content; negative: they are in flight.
    """

    load: "PrefixLoad"
    blocks: list[int]
    group: int = 0
    num_good: int = -1

    @property
    def is_good(self) -> bool:
        return self.num_good == len(self.blocks)

    @property
    def request(self) -> Request | None:
        return self.load.request

    @property
    def waits(self) -> bool:
        return not self.load.stopped

    def came(self, locations: Sequence[Location], bad: Sequence[Location], seconds: float) -> None:
        self.num_good = sum(1 for _ in takewhile(lambda one: one not in bad, locations))
        if all(one.num_good >= 0 for one in self.load.pieces):
            self.load.arrived()


@dataclass(slots=True, eq=False)
class PrefixLoad:
    """The KV of ``tokens`` (int32 bytes) that comes to the device.

    ``table``: holds the blocks that are here and the blocks in flight. ``request``: for which they come; None: they
    come ahead of any. ``pieces``: the blocks in flight, in order. ``stopped``: nothing waits for them any more.
    """

    table: BlockTable
    tokens: bytes = b""
    request: Request | None = None
    pieces: list[Piece] = field(default_factory=list)
    stopped: bool = False

    def arrived(self) -> None:
        """All pieces have arrived."""
        raise NotImplementedError

    def tokens_between(self, start: int, stop: int) -> bytes:
        """The tokens from ``start`` to ``stop``, as int32 bytes."""
        return self.tokens[4 * start : 4 * stop]

    def hold(self, scheduler: "Scheduler", nodes: Sequence[CachedBlock]) -> None:
        """Hold the blocks of the device with which the prefix begins. That is no use of them."""
        self.table.blocks = [node.block for node in nodes]
        self.table.last_node = nodes[-1] if nodes else None
        scheduler.kv.pool.pin(self.table.blocks)

    def ask(self, scheduler: "Scheduler", step: int, loads: Loads, locations: Sequence[Location]) -> None:
        """Let the plan of ``step`` bring the next blocks, which are held at ``locations`` of one source."""
        table = self.table
        added, evicted = scheduler.kv.grow(table, table.num_slots + len(locations) * table.block_size)
        scheduler.plan.copy(evicted)
        for _, run in groupby(locations, key=attrgetter("tier")):
            some = list(run)
            self.pieces.append(Piece(self, added[: len(some)]))
            scheduler.recoveries.transfers.ask(step, loads, self.pieces[-1], some, added[: len(some)])
            del added[: len(some)]

    def cache(self, scheduler: "Scheduler") -> int:
        """Cache the blocks of full layers that have arrived, up to the first bad one; returns the number of the blocks
        from there on.

        The table still holds all of them.
        """
        kv, table = scheduler.kv, self.table
        pieces = [one for one in self.pieces if not one.group]
        num_good = len(table.blocks) - sum(len(one.blocks) for one in pieces)
        for piece in pieces:
            num_good += piece.num_good
            if not piece.is_good:
                break
        self.pieces.clear()
        replaced = kv.cache_full_blocks(table, num_good * kv.block_size, self.tokens_between)
        kv.drop([own for _, own, _ in replaced], None)
        return len(table.blocks) - num_good
