"""What announcements of next turns are worth: time to the first token, and tokens that are computed again.

The sessions of the agentic trace, several times, begin by a Poisson process and keep their think times, under the
virtual clock of ``pagewise replay``. *Sessions* are named, and nothing is said of their next turns. *Hints* says after
each turn in how many seconds the next one comes, or that none does. *Ends* says only the latter. *Liars*: half of the
API keys, of which each has every second session, says after each turn that the next one comes in a second. *Oracle*:
Belady's rule, which evicts the block whose next use is the latest, with the times of all future uses of each block.
"""

import argparse
import random
from array import array
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from statistics import quantiles
from typing import Any, Literal, NamedTuple

from pagewise_scheduler.core.memory.eviction import Evictable, LeastRecentlyUsed
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.replay.costs import llama_3_8b
from pagewise_scheduler.replay.simulation import Served, Simulation
from pagewise_scheduler.replay.traces import TraceRequest, read_trace
from pagewise_shared.protocol import ReuseHints

from benchmarks.record import record_file, write_record

TRACE = "cc_agentic_max64k_min10req.rle.jsonl.gz"
Mode = Literal["lru", "today", "sessions", "ends", "hints", "liars", "oracle"]
MODES: tuple[Mode, ...] = ("lru", "today", "sessions", "ends", "hints", "liars", "oracle")
BLOCK_SIZE, NUM_KEYS = 16, 8
_LONGEST_THINKING = 3600.0
_FUTURE = 12
_LATEST = 1e12
"""Requests of a session that the oracle looks at."""


class Case(NamedTuple):
    """One replay, with a cache of so many million tokens."""

    millions: float
    mode: Mode


class Workload(NamedTuple):
    """``sessions``: the number of the session of each request."""

    requests: list[TraceRequest]
    sessions: list[int]


def workload(copies: int, gap: float) -> Workload:
    """Return the trace's sessions ``copies`` times, of which one begins every ``gap`` seconds on average."""
    trace = read_trace(Path(__file__).parents[1] / "traces" / TRACE)
    first_of: dict[int, int] = {}
    members: defaultdict[int, list[int]] = defaultdict(list)
    for index, request in enumerate(trace):
        first_of[index] = first_of[request.after] if request.after >= 0 else index
        members[first_of[index]].append(index)
    rng, start = random.Random(1), 0.0
    num_blocks = 1 + max(block for request in trace for block in request.blocks)
    made = Workload([], [])
    for copy in range(copies):
        for session in rng.sample(list(members), len(members)):
            start += rng.expovariate(1 / gap)
            place = {index: len(made.requests) + number for number, index in enumerate(members[session])}
            for index in members[session]:
                request = trace[index]
                follows = request.after >= 0
                made.requests.append(
                    replace(
                        request,
                        arrival=min(request.arrival, _LONGEST_THINKING) if follows else start,
                        after=place[request.after] if follows else -1,
                        blocks=[block + copy * num_blocks for block in request.blocks],
                        unique=len(made.requests),
                    )
                )
                made.sessions.append(copy * len(trace) + session)
    return made


class Future:
    """When the next turns of sessions come, in seconds from the end of a request."""

    def __init__(self, requests: list[TraceRequest]) -> None:
        self._requests = requests
        self._followers: defaultdict[int, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            if request.after >= 0:
                self._followers[request.after].append(index)
        self._blocks = [frozenset(request.blocks) for request in requests]

    def next_turn(self, index: int) -> float | None:
        """Return the think time before the next turn; None: there is none."""
        return min((self._requests[follower].arrival for follower in self._followers[index]), default=None)

    def uses(self, index: int) -> Iterator[tuple[float, frozenset[int]]]:
        """Yield the next requests of its session: about how long after its end each comes, and its blocks."""
        waiting = [(self._requests[follower].arrival, follower) for follower in self._followers[index]]
        for _ in range(_FUTURE):
            if not waiting:
                return
            soonest = min(waiting)
            waiting.remove(soonest)
            seconds, request = soonest
            yield seconds, self._blocks[request]
            waiting += [(seconds + self._requests[follower].arrival, follower) for follower in self._followers[request]]


class Oracle(LeastRecentlyUsed):
    """Belady's rule by the times of next uses. ``time``: the virtual clock. A block is known by its first token."""

    def __init__(self, future: Future) -> None:
        super().__init__()
        self.time = 0.0
        self._future = future
        self._next: dict[int, float] = {}

    def ends(self, index: int, blocks: list[int]) -> None:
        """A request has ended: note when its blocks are used next."""
        self._next |= dict.fromkeys(blocks, _LATEST)
        for seconds, used in reversed(list(self._future.uses(index))):
            self._next |= dict.fromkeys(used & set(blocks), self.time + seconds)

    def order(self, block: CachedBlock) -> float:
        return -self._next.get(array("i", block.tokens[:4])[0], _LATEST)

    def value(self, block: CachedBlock, use: Evictable | None = None) -> float:
        return self.order(block)


def replayed(case: Case, load: Workload) -> dict[str, Any]:
    """Replay one case."""
    requests, future = load.requests, Future(load.requests)
    oracle = Oracle(future)
    costs = llama_3_8b(BLOCK_SIZE)
    scheduler = Scheduler(
        num_blocks=int(case.millions * 1e6) // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        costs=costs.prefill,
        eviction=oracle if case.mode == "oracle" else "lru" if case.mode == "lru" else "cost",
    )

    def key(index: int) -> str:
        return f"key-{load.sessions[index] % NUM_KEYS}"

    def hints(index: int, tool_call: bool) -> ReuseHints:
        if case.mode in ("lru", "today", "oracle"):
            return ReuseHints()
        said = ReuseHints(session=str(load.sessions[index]))
        seconds = future.next_turn(index)
        if case.mode == "liars" and load.sessions[index] % 2:
            return ReuseHints(session=said.session, returns_in=1.0)
        if seconds is None and case.mode != "sessions":
            return ReuseHints(session=said.session, ends=True)
        return ReuseHints(session=said.session, returns_in=seconds or 0.0) if case.mode in ("hints", "liars") else said

    simulation = Simulation([scheduler], costs, key=key, hints=hints, watch=lambda now: setattr(oracle, "time", now))
    if case.mode == "oracle":
        note_ends(scheduler, oracle, simulation, requests)
    served = simulation.run(requests).served
    return {"million_tokens": case.millions, "mode": case.mode} | summary(served, load)


def note_ends(scheduler: Scheduler, oracle: Oracle, simulation: Simulation, requests: list[TraceRequest]) -> None:
    """Tell the oracle of each request that is about to end."""
    finish = scheduler.finish

    def noted(sequence: Any, reason: Any, stop_reason: Any = None) -> None:
        oracle.time = simulation.now
        index = int(sequence.request.request_id)
        oracle.ends(index, requests[index].blocks)
        finish(sequence, reason, stop_reason)

    scheduler.finish = noted  # type: ignore[method-assign]


def summary(served: list[Served], load: Workload) -> dict[str, Any]:
    """Return the numbers of a replay; ``even`` and ``odd`` are those of the sessions with such numbers."""
    numbers: dict[str, Any] = {}
    for name, rests in (("all", (0, 1)), ("even", (0,)), ("odd", (1,))):
        chosen = [one for one in served if load.sessions[one.trace.unique] % 2 in rests]
        prompts = sum(one.trace.num_prompt_tokens for one in chosen)
        cached = sum(sum(one.request.cached_tokens.values()) for one in chosen)
        times = sorted(one.first_token - one.arrival for one in chosen)
        cuts = quantiles(times, n=100)
        numbers[name] = {
            "hit_rate": round(cached / prompts, 4),
            "computed_again_million": round((prompts - cached) / 1e6, 2),
            "first_token_p50": round(cuts[49], 4),
            "first_token_p99": round(cuts[98], 4),
        }
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=float, nargs="+", default=[0.5, 0.7, 1.0, 1.4], help="tokens of the cache")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--copies", type=int, default=3, help="how often each session of the trace is replayed")
    parser.add_argument("--gap", type=float, default=30.0, help="seconds between the beginnings of two sessions")
    parser.add_argument("--jobs", type=int, default=1, help="replays that run at the same time")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    load = workload(args.copies, args.gap)
    cases = [Case(millions, mode) for millions, mode in product(args.millions, args.modes)]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(args.jobs) as pool:
        print(f"{'tokens':>7} {'mode':<9}{'hits':>7}{'again':>8}{'p50':>8}{'p99':>8}{'hits, even':>12}{'odd':>8}")
        for row in chain.from_iterable([pool.map(replayed, cases, [load] * len(cases))]):
            rows.append(row)
            every = row["all"]
            print(
                f"{row['million_tokens']:>6g}M {row['mode']:<9}{100 * every['hit_rate']:>6.2f}%"
                f"{every['computed_again_million']:>7.2f}M{every['first_token_p50']:>7.3f}s"
                f"{every['first_token_p99']:>7.3f}s{100 * row['even']['hit_rate']:>11.2f}%"
                f"{100 * row['odd']['hit_rate']:>7.2f}%",
                flush=True,
            )
    if args.json:
        write_record(args.json, {"copies": args.copies, "gap": args.gap, "rows": rows}, clock="virtual")


if __name__ == "__main__":
    main()
