"""Invented executors, in the Structs that the real scheduler sends to consoles: so the page cannot be tested with data
of another shape."""

import random
from collections import Counter
from collections.abc import Callable
from itertools import accumulate

from pagewise_scheduler.core.console.block_map import COPYING, LENT, STATES, cell_size, packed
from pagewise_scheduler.core.tiers.pool import CACHED, FREE, IN_USE
from pagewise_shared.protocol import SOURCES, ConsoleView
from pagewise_shared.reports import (
    BlockCounts,
    BlockDetails,
    BlockLocation,
    CostReport,
    DeviceReport,
    ExecutorPrefixes,
    ExecutorState,
    GroupReport,
    LinkReport,
    MapFrame,
    NextEviction,
    PrefixRun,
    RequestLine,
    SnapshotReport,
    TierReport,
)

BLOCK_SIZE, BYTES_PER_BLOCK = 16, 32768
TRUNK = 16
"""The first blocks are the prefix that all requests share, while there are any. As many that follow are cached."""
WHY = (
    "it is used again with a probability of 12%, and keeping it saves 41 microseconds of recovery for each block that "
    "comes in: less than keeping another one"
)
_EVENTS = ("evicted", "demoted", "dropped", "stored", "loaded", "fetched", "copied", "recalled", "written")


class FakeExecutor:
    """A pool of blocks that changes at every ``step``. ``requests``: ids of the requests that run here.

    ``groups``: of layers, if there are several.
    """

    def __init__(self, name: str, num_blocks: int, host_blocks: int) -> None:
        self.name, self.num_blocks, self.host_blocks = name, num_blocks, host_blocks
        self.states = bytearray(num_blocks)
        self.host_used = 0
        self.requests: list[str] = []
        self.groups: list[GroupReport] = []
        self.demoting = False
        self.rates = dict.fromkeys(_EVENTS, 0.0)
        self.counters = dict.fromkeys(_EVENTS, 0)
        self._random = random.Random(name)

    def serve(self, requests: list[str]) -> None:
        """So many requests run here from now on."""
        self.requests = requests
        if requests:
            self.states[:TRUNK] = bytes([IN_USE]) * TRUNK
            self.states[TRUNK : 2 * TRUNK] = bytes([CACHED]) * TRUNK

    def step(self) -> None:
        """Change some blocks behind the blocks that stay."""
        pick = self._random.sample(range(2 * TRUNK, self.num_blocks), max(1, self.num_blocks // 40))
        for block in pick if self.requests else []:
            here = self.states[block]
            self.states[block] = self._random.choice([CACHED, IN_USE, IN_USE, LENT if here == IN_USE else IN_USE])
        self.rates = dict.fromkeys(_EVENTS, 0.0)
        if self.requests:
            self.rates |= {"copied": 3.0, "fetched": 6.0}
        if self.demoting:
            for block in pick:
                self.states[block] = self._random.choice([COPYING, FREE, IN_USE])
            self.host_used = min(self.host_blocks, self.host_used + len(pick))
            self.rates |= {"demoted": 2.0 * len(pick), "evicted": 2.0 * len(pick), "loaded": 9.0}
        self.counters = {name: count + round(self.rates[name]) for name, count in self.counters.items()}

    def _counts(self, tier: str) -> BlockCounts:
        if tier == "host":
            return BlockCounts(self.host_blocks - self.host_used, self.host_used, 0, 0, 0)
        return BlockCounts(*(self.states.count(state) for state in range(len(STATES))))

    def state(self, peers: list[str]) -> ExecutorState:
        """The executor's part of the fleet's frame; it fetches from ``peers``."""
        running = len(self.requests)
        rates = dict.fromkeys(SOURCES, 0.0) | ({"device": 0.5, "host": 0.125} if running else {})
        return ExecutorState(
            executor_id=self.name,
            state="ready",
            role="both",
            block_size=BLOCK_SIZE,
            bytes_per_block=BYTES_PER_BLOCK,
            block_endpoint="",
            device=DeviceReport(self.num_blocks, 0, 0, self.num_blocks, 0, 0, self.groups),
            counts=self._counts("device"),
            steps_in_flight=0,
            counters=self.counters,
            tree_blocks=0,
            tiers={"host": TierReport(self.host_blocks, self.host_used, 0, 0)},
            running=running,
            waiting=0,
            preemptions=0,
            tokens_per_second=90.0 * running,
            rates=self.rates,
            costs=CostReport(
                *(0.0, 0.0, 0.0, 0.0, 0.12),
                tiers={"host": LinkReport(226.0, 9.3, 0.0, 0.1, 0, 0)},
                peers={peer: LinkReport(1400.0, 52.0, 0.0, 0.25, 3, 0) for peer in peers},
            ),
            saved_blocks=9 * running,
            hit_rate=rates,
        )

    # ---- memory --------------------------------------------------------------------------------------

    def map(self, view: ConsoleView) -> MapFrame:
        """The map that a view asks for."""
        total = self.num_blocks if view.tier == "device" else self.host_blocks
        first = min(view.first, total - 1)
        count = min(view.count or total, total - first)
        size = cell_size(count, view.cells)
        label, legend = self._label(view), {name: index for index, name in enumerate(STATES)}
        if view.colour != "state":
            legend = {}
        cells = bytearray()
        for begin in range(first, first + count, size):
            seen = [label(block) for block in range(begin, min(begin + size, first + count))]
            name, number = Counter(seen).most_common(1)[0]
            cells += bytes([legend.setdefault(name, len(legend)), 255 * number // len(seen)])
        shown = [(index, name) for name, index in legend.items()]
        counts = self._counts(view.tier)
        return MapFrame(self.name, view.tier, first, count, total, size, view.colour, shown, packed(cells), counts)

    def _state(self, tier: str, block: int) -> str:
        if tier == "host":
            return "cached" if block < self.host_used else "free"
        return STATES[self.states[block]]

    def _label(self, view: ConsoleView) -> Callable[[int], str]:
        """How the real legends call a block: see ``core/console/block_map.py``."""

        def label(block: int) -> str:
            state = self._state(view.tier, block)
            if view.colour == "state":
                return state
            state = "in use" if state in ("lent", "copying") else state
            if view.colour == "request" and state == "in use" and view.tier == "device":
                return "shared" if block < TRUNK else self.requests[block % len(self.requests)]
            if view.colour == "prefix" and state != "free":
                return str(0 if block < TRUNK else 7 * (block % 3))
            if view.colour == "age" and state == "cached":
                return str(0 if block % 5 == 4 else 2 << 2 * (4 - block % 5))
            if view.colour == "group":
                parts = [
                    (f"{one.kind}{f' {one.window}' * (one.kind == 'window')} {word}", pages)
                    for one in self.groups
                    for word, pages in (("in use", one.in_use), ("cached", one.cached))
                ]
                ends = accumulate(pages for _, pages in parts)
                return next((name for (name, _), end in zip(parts, ends, strict=True) if block < end), "free")
            if view.colour == "tier" and state != "free":
                return "device,host" if block % 2 else view.tier
            return state

        return label

    def prefixes(self) -> ExecutorPrefixes:
        """A trunk that half of the requests hold, and its branches, of which two go next."""
        held = len(self.requests) // 2
        trunk = PrefixRun(0, -1, 1, TRUNK, {"device": TRUNK}, held, max(0, TRUNK * (held - 1)), 8)
        if self.groups:
            trunk.snapshots = [
                SnapshotReport("state", 2, "device", 7, 1),
                SnapshotReport("state", 2, "device", TRUNK, 1, used=True),
                SnapshotReport("state", 2, "host", TRUNK, 1),
            ]
        ends = [
            PrefixRun(
                id=number,
                parent=0,
                depth=TRUNK + 1,
                num_blocks=number,
                tiers={"host": number} if number == 6 else {"device": number},
                references=0 if number == 6 else number % 3,
                saved_blocks=number if number % 3 == 2 else 0,
                forks=0,
                price=None if number % 3 else 0.000041 * number,
                next_evicted={3: 1, 9: 2}.get(number),
            )
            for number in range(1, 10)
        ]
        saved = 9 * len(self.requests)
        return ExecutorPrefixes(
            executor_id=self.name,
            runs=[trunk, *ends] if self.requests else [],
            tree_blocks=TRUNK + sum(run.num_blocks for run in ends) if self.requests else 0,
            saved_blocks=saved,
            saved_bytes=saved * BYTES_PER_BLOCK,
            next_evictions=[NextEviction(18, 19, 0.000041, 0.12), NextEviction(25, 25, 0.000041, 0.12)]
            if self.requests
            else [],
            truncated=False,
        )

    def block(self, tier: str, block: int) -> BlockDetails:
        """Everything about one block."""
        state = self._state(tier, block)
        state = "in use" if state in ("lent", "copying") else state
        details = BlockDetails(self.name, tier, block, state, 0, [])
        if state == "free":
            return details
        if state == "in use":
            details.requests = self.requests[: 8 if block < TRUNK else 1]
            details.references = len(details.requests)
        else:
            details.unused_for, details.price, details.probability = 40 + block, 0.000041, 0.12
        details.hash, details.depth, details.tokens = f"{block:064x}", block + 1, BLOCK_SIZE
        details.copies = {"device": block, "host": 7} if tier == "device" else {tier: block}
        details.elsewhere = [BlockLocation("executor-9", "host", 12)]
        return details


def line(request_id: str, executor_id: str, age: float, *, moved_from: str | None = None) -> RequestLine:
    """A request that runs."""
    return RequestLine(
        request_id=request_id,
        client_request_id="",
        key="",
        executor_id=executor_id,
        status="decode",
        prompt_tokens=284,
        output_tokens=12,
        computed_tokens=295,
        blocks=19,
        shared_blocks=17,
        num_cached_tokens=272,
        preemptions=1,
        arrived_seconds_ago=age,
        queue_seconds=0.1,
        first_token_seconds=0.3,
        moved_from=moved_from,
    )
