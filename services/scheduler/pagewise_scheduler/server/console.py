"""Answers the views of consoles, in bounded time."""

import heapq
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from math import inf
from time import monotonic as clock
from typing import TYPE_CHECKING

import msgspec
from pagewise_shared.protocol import SOURCES, ConsoleView, tier_name
from pagewise_shared.protocol.gateway_messages import UPDATE_SECONDS
from pagewise_shared.reports import (
    ExecutorState,
    FleetFrame,
    GatewayState,
    KeyMemory,
    KeyState,
    MapFrame,
    PrefixesFrame,
    RequestLine,
    RequestReport,
    RequestsFrame,
    SchedulerState,
)
from pagewise_shared.version import package_version

from pagewise_scheduler.core.console.block_details import block_details
from pagewise_scheduler.core.console.block_map import (
    STATES,
    MarkedBlocks,
    StateCells,
    cell_size,
    coloured_cells,
    group_cells,
    packed,
)
from pagewise_scheduler.core.console.prefixes import executor_prefixes
from pagewise_scheduler.core.group_report import num_pages
from pagewise_scheduler.core.memory_report import executor_report
from pagewise_scheduler.core.request_report import is_waiting, request_line
from pagewise_scheduler.core.tiers.pool import Pool
from pagewise_scheduler.server.executor_handle import ExecutorHandle, Life
from pagewise_scheduler.server.executor_registry import ExecutorRegistry
from pagewise_scheduler.server.executor_stats import Rates
from pagewise_scheduler.server.gateways import Gateways
from pagewise_scheduler.server.router import Router
from pagewise_scheduler.server.sessions import SILENT_SECONDS, Loss

if TYPE_CHECKING:
    from pagewise_scheduler.server.key_budgets import KeyBudgets

_SHARED = 0.8
"""An answer serves all who ask again within this share of the time between two updates."""
_MOST_OF_CORE = 0.003
"""The share of a core that answers may take. Beyond it, the views that take the most are made less often."""
_LONGEST_PAUSE = 10.0
_GONE_SECONDS = 60.0
"""For how many seconds a gateway that went is shown."""
_FORGOTTEN_SECONDS = 5.0
"""A gateway asks for the views of an open console at least every two seconds."""
_MOST_VIEWS = 256
_SEEN_SECONDS = 0.6
"""A copy is shown for so long after it was asked for: most take less than the time between two updates."""
_MOST_CELLS_EACH, _MOST_TREE_BLOCKS = 512, 4096
_MOST_REQUESTS, _MOST_ENDED, _MOST_KEYS = 100, 50, 100

_STATES = {
    Life.SERVING: "ready",
    Life.DRAINING: "draining",
    Life.STOPPING: "draining",
    Life.DRAINED: "draining",
    Life.LOST: "gone",
}

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class _Answer:
    """An answer, when it was made and last asked for, and how many seconds it and the answer before it took to make.

    The shorter of the two times counts, because a garbage collection may have been part of the longer one.
    """

    body: bytes | None
    time: float
    asked: float
    took: float
    took_before: float = inf

    @property
    def seconds(self) -> float:
        return min(self.took, self.took_before)


def _load(view: ConsoleView, answer: _Answer) -> float:
    """The share of a core that a view would take if it were made as often as gateways ask for it."""
    return answer.seconds / UPDATE_SECONDS[view.part]


def fair_share(loads: Iterable[float], most: float) -> float:
    """Return the most that each load may be so that their sum is at most ``most``, by max-min fairness."""
    ordered, left = sorted(loads), most
    for position, load in enumerate(ordered):
        share = left / (len(ordered) - position)
        if load > share:
            return share
        left -= load
    return inf


class Console:
    """Answers the views that gateways ask for.

    Gateways ask a few times a second. Gateways that ask for the same view within a time get the same answer. If all
    answers together would take more than ``_MOST_OF_CORE`` of a core, the views that take the most share the rest of it
    equally, and are made less often, but at least every ten seconds. The others are made as before. The first answer
    for a view is made at once.
    """

    def __init__(
        self,
        model_name: str,
        executor_registry: ExecutorRegistry,
        router: Router,
        gateways: Gateways,
        *,
        shows_text: bool,
    ) -> None:
        """``shows_text``: gateways get the tokens of cached blocks, which come from the prompts of all clients."""
        self._model_name, self._shows_text = model_name, shows_text
        self._executor_registry = executor_registry
        self._router = router
        self._gateways = gateways
        self._started = clock()
        self._answers: dict[ConsoleView, _Answer] = {}
        self._share = inf
        self._cells: dict[ConsoleView, dict[ExecutorHandle, StateCells]] = {}
        self._ended: dict[tuple[str, float], RequestLine] = {}

    def answer(self, view: ConsoleView) -> bytes | None:
        """Return the content of a view as lines of JSON, None if there is no such executor, tier or block."""
        now = clock()
        self._forget(now)
        known = self._answers.pop(view, None)
        if known is not None and now < known.time + self._pause(view, known):
            known.asked = now
            self._answers[view] = known  # in the order in which they were asked for
            return known.body
        began = time.thread_time()
        body = self._make(view, now, known)
        took = time.thread_time() - began
        self._answers[view] = _Answer(body, now, now, took, known.took if known is not None else inf)
        self._divide()
        return body

    def _divide(self) -> None:
        self._share = fair_share([_load(one, made) for one, made in self._answers.items()], _MOST_OF_CORE)

    def _pause(self, view: ConsoleView, answer: _Answer | None) -> float:
        """Seconds for which the answer for a view serves."""
        shared = _SHARED * UPDATE_SECONDS[view.part]
        if answer is None or _load(view, answer) <= self._share:
            return shared
        return min(max(shared, answer.seconds / self._share), _LONGEST_PAUSE)

    def _forget(self, now: float) -> None:
        """Forget answers that no gateway has asked for lately."""
        number = len(self._answers)
        while self._answers:
            oldest = next(iter(self._answers))
            if len(self._answers) < _MOST_VIEWS and now - self._answers[oldest].asked < _FORGOTTEN_SECONDS:
                break
            del self._answers[oldest]
            self._cells.pop(oldest, None)
        if len(self._answers) < number:
            self._divide()

    def _make(self, view: ConsoleView, now: float, known: _Answer | None) -> bytes | None:
        match view.part:
            case "fleet":
                return _encode(self._fleet_frame(now))
            case "requests":
                return _encode(self._requests_frame(now))
            case "map":
                # Copies are shown for as long as this answer may serve.
                return self._maps(view, now - max(_SEEN_SECONDS, self._pause(view, known)))
            case "prefixes":
                return self._prefixes(view)
            case "block":
                return self._block(view)

    def _shown(self, view: ConsoleView) -> list[ExecutorHandle]:
        """The executors that a view shows, by their names."""
        executors = sorted(self._executor_registry.executors, key=lambda executor: executor.executor_id)
        return [executor for executor in executors if view.executor_id in ("", executor.executor_id)]

    # ---- memory --------------------------------------------------------------------------------------

    def _maps(self, view: ConsoleView, since: float) -> bytes | None:
        """A line for each executor that is shown and has the tier. ``since``: copies that were asked for later are
        marked."""
        tiers = [(executor, tier) for executor in self._shown(view) if (tier := _tier(executor, view.tier)) is not None]
        kept = self._cells.setdefault(view, {})
        self._cells[view] = {executor: kept.get(executor) or StateCells() for executor, _ in tiers}
        cells = max(1, min(view.cells // max(1, len(tiers)), view.cells if view.executor_id else _MOST_CELLS_EACH))
        if not tiers and view.executor_id:
            return None
        return b"\n".join(_encode(self._map(view, executor, tier, cells, since)) for executor, tier in tiers)

    def _map(self, view: ConsoleView, executor: ExecutorHandle, tier: Pool, most_cells: int, since: float) -> MapFrame:
        total = num_pages(tier) if view.colour == "group" else tier.num_blocks
        first = min(view.first, total - 1)
        count = min(view.count or total, total - first)
        size = cell_size(count, most_cells)
        marked = MarkedBlocks(executor.scheduler, tier, since)
        legend = list(enumerate(STATES))
        if view.colour == "state":
            cells = self._cells[view][executor].update(tier, first, count, size, marked)
        elif view.colour == "group":
            cells, legend = group_cells(executor.scheduler.kv, tier, first, count, size)
        else:
            cells, legend = coloured_cells(executor.scheduler, tier, view.colour, first, count, size)
        return MapFrame(
            executor.executor_id,
            view.tier,
            first,
            count,
            total,
            size,
            view.colour,
            legend,
            packed(cells),
            marked.counts(tier),
        )

    def _prefixes(self, view: ConsoleView) -> bytes | None:
        executors = self._shown(view)
        if not executors and view.executor_id:
            return None
        room = _MOST_TREE_BLOCKS // max(1, len(executors))
        trees = [
            executor_prefixes(
                executor.executor_id,
                executor.scheduler,
                executor.hello.bytes_per_block,
                room,
                tokens=view.tokens and self._shows_text,
            )
            for executor in executors
        ]
        return _encode(PrefixesFrame(trees))

    def _block(self, view: ConsoleView) -> bytes | None:
        for executor in self._shown(view):
            tier = _tier(executor, view.tier)
            if tier is None or view.block >= tier.num_blocks or not view.executor_id:
                return None
            others = [
                (one.executor_id, one.scheduler) for one in self._executor_registry.executors if one is not executor
            ]
            return _encode(
                block_details(
                    executor.executor_id,
                    executor.scheduler,
                    tier,
                    view.block,
                    others,
                    tokens=view.tokens and self._shows_text,
                )
            )
        return None

    # ---- processes -----------------------------------------------------------------------------------

    def _fleet_frame(self, now: float) -> FleetFrame:
        executors = self._shown(ConsoleView("fleet"))
        names = {executor.scheduler.recoveries.planner.endpoint: executor.executor_id for executor in executors}
        rates = {executor: executor.stats.rates(executor.scheduler, now) for executor in executors}
        return FleetFrame(
            round(time.time(), 3),
            self._model_name,
            self._scheduler_state(now, rates.values()),
            self._gateway_states(now),
            [_executor_state(executor, rates[executor], names, now) for executor in executors],
            key_states(self._router.budgets, rates.values()),
        )

    def _gateway_states(self, now: float) -> list[GatewayState]:
        """Gateways that are connected, or that left a moment ago and have not come back under their name."""
        states = [
            GatewayState(
                one.name,
                "silent" if one.detector.silence(now) > SILENT_SECONDS else "ready",
                len(one.peer.submissions),
            )
            for one in self._gateways
        ]
        here = {one.gateway_id for one in states}
        gone = {
            one.name: GatewayState(one.name, "left" if one.loss is Loss.LEFT else "lost", one.requests, one.reason)
            for one in self._gateways.gone
            if one.name not in here and now - one.time < _GONE_SECONDS
        }
        return [*states, *gone.values()]

    def _scheduler_state(self, now: float, rates: Iterable[Rates]) -> SchedulerState:
        rates = list(rates)
        return SchedulerState(
            round(now - self._started, 1),
            package_version(),
            sum(executor.scheduler.num_running for executor in self._executor_registry.executors),
            self._router.waiting.sequences,
            len(self._router.unplaced),
            _sum_of_known(one.tokens for one in rates),
            _sum_of_known(one.prompt_tokens for one in rates),
            _hit_rate(rates),
        )

    # ---- requests ------------------------------------------------------------------------------------

    def _requests_frame(self, now: float) -> RequestsFrame:
        """At most ``_MOST_REQUESTS`` that run and as many that wait are looked at, executor by executor."""
        running: list[RequestLine] = []
        waiting = [request_line(live, "", None, now) for live in islice(self._router.unplaced, _MOST_REQUESTS)]
        number = len(self._router.unplaced)
        for executor in self._executor_registry.executors:
            pool, requests = executor.scheduler.kv.pool, executor.scheduler.requests
            number += len(requests)
            for request in requests:
                lines = waiting if is_waiting(request) else running
                if len(lines) < _MOST_REQUESTS:
                    lines.append(request_line(request, executor.executor_id, pool, now))
                elif min(len(running), len(waiting)) >= _MOST_REQUESTS:
                    break
        return RequestsFrame(running, waiting, self._ended_lines(now), len(running) + len(waiting) < number)

    def _ended_lines(self, now: float) -> list[RequestLine]:
        """The requests that ended last. A line is kept until the next time: only its age changes."""
        latest = heapq.nlargest(_MOST_ENDED, self._gateways.ended.latest(_MOST_ENDED), key=lambda ended: ended.time)
        known, self._ended = self._ended, {}
        for ended in latest:
            key = ended.request_id, ended.time
            self._ended[key] = known.get(key) or _line_of(ended.report)
        return [
            msgspec.structs.replace(line, arrived_seconds_ago=round(line.arrived_seconds_ago + now - time, 3))
            for (_, time), line in self._ended.items()
        ]


def key_states(budgets: "KeyBudgets | None", rates: Iterable[Rates]) -> list[KeyState]:
    """Return the keys with budgets, or with evicted KV that they missed in the last minute, most missed KV first."""
    spared = sum((Counter(one.spared) for one in rates), Counter[str]())
    states = {key: KeyState(key, {}, tokens) for key, tokens in spared.items()}
    for use in budgets.uses() if budgets is not None else ():
        state = states.setdefault(use.owner, KeyState(use.owner, {}, 0))
        state.memory[use.tier] = KeyMemory(use.used, use.min, use.low, use.high)
    return heapq.nsmallest(_MOST_KEYS, states.values(), key=lambda state: (-state.spared_by_next_gib, state.name))


def _line_of(report: RequestReport) -> RequestLine:
    return RequestLine(*(getattr(report, name) for name in RequestLine.__struct_fields__))


def _tier(executor: ExecutorHandle, name: str) -> Pool | None:
    tiers = executor.scheduler.kv.tiers
    return next((tier for number, tier in tiers.items() if tier_name(number) == name), None)


def _sum_of_known(rates: Iterable[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return round(sum(known), 1) if known else None


def _hit_rate(rates: list[Rates]) -> dict[str, float]:
    """The share of the prompt tokens of the last minute that was found in a cache, by where."""
    prompt = sum(one.prompt_of_last_minute for one in rates)
    hits = {source: sum(one.hits[source] for one in rates) for source in SOURCES}
    return {source: round(min(1.0, count / prompt), 4) if prompt else 0.0 for source, count in hits.items()}


def _executor_state(executor: ExecutorHandle, rates: Rates, names: dict[str, str], now: float) -> ExecutorState:
    scheduler, pool = executor.scheduler, executor.scheduler.kv.pool
    return ExecutorState(
        **msgspec.structs.asdict(executor_report(executor.executor_id, scheduler, names)),
        state=_STATES[executor.life],
        role=executor.hello.role,
        bytes_per_block=executor.hello.bytes_per_block,
        counts=MarkedBlocks(scheduler, pool, now - _SEEN_SECONDS).device_counts(scheduler.kv),
        tokens_per_second=rates.tokens,
        rates=rates.events,
        hit_rate=_hit_rate([rates]),
    )
