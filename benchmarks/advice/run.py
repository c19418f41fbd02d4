"""The benefit of sessions and of hints on next turns: time to the first token, and tokens that are computed again.

The sessions of the agentic trace, several times, or of agents with sub-agents (``subagents.py``), begin by a Poisson
process and keep their think times, under the virtual clock of ``pagewise replay``.

*Today*: no sessions. *Sessions* names them and their parents, and names the tools that were called, as gateways do; no
hint announces the next turn, so its time is learned. *Ends* also announces the end of a session, and *hints* after each
other turn the seconds until the next one. *Oracle*: Belady's rule, which evicts the block whose next use is the
latest, with the times of all future uses.

In the other modes half of the API keys, of which each has every second session, say less or lie. *Silent*: they give no
hints. *Liars*: they say after each turn that the next one comes in a second; *endless*: they say so where a session has
ended, and else the truth; *early*: they do, and else say a quarter of the true seconds. *Names*: no key gives hints,
and these keys call tools by the names of others, and people too.
"""

import argparse
import random
from array import array
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace as changed
from itertools import product, repeat
from pathlib import Path
from statistics import quantiles
from typing import Any, Literal, NamedTuple, get_args

from msgspec.structs import replace
from pagewise_scheduler.core.memory.eviction import Evictable, LeastRecentlyUsed
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.scheduling.step import StepOutput
from pagewise_scheduler.replay.costs import DeviceCosts, llama_3_8b
from pagewise_scheduler.replay.simulation import SAMPLED, Served, Simulation
from pagewise_scheduler.replay.traces import TraceRequest, read_trace
from pagewise_shared.protocol import Advise, ReuseHints, StepPlan, StepResult

from benchmarks.advice.subagents import Turns, sub_agents
from benchmarks.record import record_file, write_record

TRACE = Path(__file__).parents[1] / "traces" / "cc_agentic_max64k_min10req.rle.jsonl.gz"
Mode = Literal["lru", "today", "sessions", "ends", "hints", "liars", "endless", "early", "silent", "names", "oracle"]
MODES: tuple[Mode, ...] = get_args(Mode)
NUM_KEYS = 8
_LONGEST_THINKING = 3600.0
_LATEST = 1e12
_TOKEN_SECONDS = 0.005
"""The seconds of a token of an answer, roughly."""
_TOKENS_AT_ONCE = 8
"""To save the time of the replay, a step decodes so many tokens of an answer, and takes so many times as long."""


class Case(NamedTuple):
    """One replay, with a cache of so many million tokens in blocks of ``block_size``."""

    millions: float
    mode: Mode
    block_size: int


def agentic(copies: int, gap: float, seed: int = 1) -> Turns:
    """Return the trace's sessions ``copies`` times, of which one begins every ``gap`` seconds on average."""
    trace = read_trace(TRACE)
    first_of: dict[int, int] = {}
    members: defaultdict[int, list[int]] = defaultdict(list)
    for index, request in enumerate(trace):
        first_of[index] = first_of[request.after] if request.after >= 0 else index
        members[first_of[index]].append(index)
    number_of = {session: number for number, session in enumerate(members)}
    rng, start = random.Random(seed), 0.0
    num_blocks = 1 + max(block for request in trace for block in request.blocks)
    made = Turns([], [], [], {})
    for copy in range(copies):
        for session in rng.sample(list(members), len(members)):
            start += rng.expovariate(1 / gap)
            place = {index: len(made.requests) + number for number, index in enumerate(members[session])}
            for index in members[session]:
                request = trace[index]
                follows = request.after >= 0
                made.requests.append(
                    changed(
                        request,
                        arrival=min(request.arrival, _LONGEST_THINKING) if follows else start,
                        after=place[request.after] if follows else -1,
                        blocks=[block + copy * num_blocks for block in request.blocks],
                        unique=len(made.requests),
                    )
                )
                made.sessions.append(copy * len(members) + number_of[session])
                made.tools.append(("",) if request.tool_call else ())
    return made


def expected_times(requests: list[TraceRequest]) -> tuple[list[float], list[float]]:
    """Return about when each request arrives and ends, from the think times and the lengths of answers."""
    arrivals, ends = [0.0] * len(requests), [0.0] * len(requests)
    for index, request in enumerate(requests):
        arrivals[index] = request.arrival + (ends[request.after] if request.after >= 0 else 0.0)
        ends[index] = arrivals[index] + _TOKEN_SECONDS * request.num_output_tokens
    return arrivals, ends


class Oracle(LeastRecentlyUsed):
    """Belady's rule by the expected times of next uses. A block is known by its first token."""

    def __init__(self, requests: list[TraceRequest]) -> None:
        super().__init__()
        self._waits = [True] * len(requests)
        self._uses: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
        arrivals, _ = expected_times(requests)
        for index, request in enumerate(requests):
            for block in request.blocks:
                self._uses[block].append((arrivals[index], index))
        for uses in self._uses.values():
            uses.sort(reverse=True)

    def arrives(self, index: int) -> None:
        """A request uses its blocks from now on."""
        self._waits[index] = False

    def order(self, block: CachedBlock) -> float:
        uses = self._uses.get(array("i", block.tokens[:4])[0], [])
        while uses and not self._waits[uses[-1][1]]:
            uses.pop()
        return -uses[-1][0] if uses else -_LATEST

    def value(self, block: CachedBlock, use: Evictable | None = None) -> float:
        return self.order(block)


class Speaker:
    """The hints of clients and gateways in one mode. ``next_turns``: think times of next turns, by request."""

    def __init__(self, mode: Mode, load: Turns) -> None:
        self._mode, self._load = mode, load
        self.next_turns: dict[int, float] = {}
        last: dict[int, int] = {}
        arrivals, ends = expected_times(load.requests)
        for index, session in enumerate(load.sessions):
            if session in last:
                self.next_turns[last[session]] = arrivals[index] - ends[last[session]]
            last[session] = index

    def hints(self, index: int, tool_call: bool) -> ReuseHints:
        mode, session = self._mode, self._load.sessions[index]
        said = ReuseHints(tool_call_ids=(SAMPLED,) if tool_call else ())
        if mode in ("lru", "today", "oracle"):
            return said
        parent = self._load.parents.get(session)
        said = replace(said, session=str(session), parent="" if parent is None else str(parent))
        seconds, lies = self.next_turns.get(index), session_key(self._load, session) % 2
        if mode in ("sessions", "names") or (mode == "silent" and lies):
            return said
        if mode == "early" and lies and seconds is not None:
            return replace(said, returns_in=seconds / 4)
        if (mode == "liars" or (mode in ("endless", "early") and seconds is None)) and lies:
            return replace(said, returns_in=1.0)
        if seconds is None:
            return replace(said, ends=True)
        return said if mode == "ends" else replace(said, returns_in=seconds)

    def _tools(self, index: int) -> tuple[str, ...]:
        """The tools that an answer has called, by the names that the key gives them."""
        tools, session = self._load.tools[index], self._load.sessions[index]
        if self._mode == "names" and session_key(self._load, session) % 2:
            return ("run_tests",) if any(tool in ("read_file", "edit_file") for tool in tools) else ("read_file",)
        return tools

    def tell_calls(self, scheduler: Scheduler, simulation: Simulation) -> None:
        """Tell the scheduler after each answer which tools it has called, as gateways do."""
        update = scheduler.update

        def updated(result: StepResult, tokens: Sequence[int] | None = None) -> StepOutput:
            output = update(result, tokens)
            for sequence in output.finished:
                index = int(sequence.request.request_id)
                tools = self._tools(index)
                if any(tools):
                    params = sequence.request.params
                    called = Advise(0, 0, "called", key=params.key, session=params.reuse.session, tools=tools)
                    scheduler.features.advice.advise(called, simulation.now)
            return output

        scheduler.update = updated  # type: ignore[method-assign]


def decode_at_once(simulation: Simulation, costs: DeviceCosts) -> None:
    """Let steps that decode take as long as if each decoded one token, and they were so many."""
    (executor,) = simulation.executors
    scheduler = executor.scheduler
    schedule, pool, size = scheduler.schedule, scheduler.kv.pool, scheduler.kv.block_size

    def scheduled(now: float) -> StepPlan | None:
        plan = schedule(now)
        if plan is not None:
            step = scheduler.steps_in_flight[-1]
            if num_decodes := step.num_seqs - len(step.chunk_rows):
                seconds = costs.prefill.step + costs.decode * num_decodes + costs.context * pool.num_in_use * size
                begins = max(now, executor.free_at.get("step", 0.0))
                executor.free_at["step"] = begins + (_TOKENS_AT_ONCE - 1) * seconds
        return plan

    scheduler.schedule = scheduled  # type: ignore[method-assign]


def session_key(load: Turns, session: int) -> int:
    """Return the number of the API key of a session; a sub-agent has that of its parent."""
    return load.parents.get(session, session) % NUM_KEYS


def replayed(case: Case, load: Turns) -> dict[str, Any]:
    """Replay one case."""
    requests = [
        changed(one, num_output_tokens=max(1, one.num_output_tokens // _TOKENS_AT_ONCE)) for one in load.requests
    ]
    oracle, speaker = Oracle(load.requests), Speaker(case.mode, load)
    costs = llama_3_8b(case.block_size)
    scheduler = Scheduler(
        num_blocks=int(case.millions * 1e6) // case.block_size,
        block_size=case.block_size,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        costs=costs.prefill,
        eviction=oracle if case.mode == "oracle" else "lru" if case.mode == "lru" else "cost",
    )
    simulation = Simulation(
        [scheduler],
        costs,
        key=lambda index: f"key-{session_key(load, load.sessions[index])}",
        hints=speaker.hints,
        tick=oracle.arrives,
    )
    decode_at_once(simulation, costs)
    if case.mode not in ("lru", "today", "oracle"):
        speaker.tell_calls(scheduler, simulation)
    served = simulation.run(requests).served
    return case._asdict() | summary(served, load)


def summary(served: list[Served], load: Turns) -> dict[str, Any]:
    """Return the results of a replay: of all API keys, of keys with even and odd numbers, and of each key."""
    numbers: dict[str, Any] = {}
    keys = range(NUM_KEYS)
    groups = {"all": keys, "even": keys[::2], "odd": keys[1::2]} | {f"key {key}": keys[key : key + 1] for key in keys}
    for name, members in groups.items():
        chosen = [one for one in served if session_key(load, load.sessions[one.trace.unique]) in members]
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
    parser.add_argument("--trace", choices=("agentic", "sub-agents"), default="agentic")
    parser.add_argument("--millions", type=float, nargs="+", default=[0.5, 0.7, 1.0, 1.4], help="tokens of the cache")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--copies", type=int, default=3, help="how often each session of the trace is replayed")
    parser.add_argument("--agents", type=int, default=60, help="how many agents have sub-agents")
    parser.add_argument("--block-size", type=int, default=64, help="tokens of a block")
    parser.add_argument("--gap", type=float, default=30.0, help="seconds between the beginnings of two sessions")
    parser.add_argument("--seed", type=int, default=1, help="of the order and the beginnings of sessions")
    parser.add_argument("--jobs", type=int, default=1, help="replays that run at the same time")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    if args.trace == "agentic":
        load = agentic(args.copies, args.gap, args.seed)
    else:
        load = sub_agents(read_trace(TRACE), args.agents, args.gap, args.seed)
    cases = [Case(millions, mode, args.block_size) for millions, mode in product(args.millions, args.modes)]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(args.jobs) as pool:
        print(f"{'tokens':>7} {'mode':<9}{'hits':>7}{'again':>8}{'p50':>8}{'p99':>8}{'hits, even':>12}{'odd':>8}")
        for row in pool.map(replayed, cases, repeat(load)):
            rows.append(row)
            every = row["all"]
            print(
                f"{row['millions']:>6g}M {row['mode']:<9}{100 * every['hit_rate']:>6.2f}%"
                f"{every['computed_again_million']:>7.2f}M{every['first_token_p50']:>7.3f}s"
                f"{every['first_token_p99']:>7.3f}s{100 * row['even']['hit_rate']:>11.2f}%"
                f"{100 * row['odd']['hit_rate']:>7.2f}%",
                flush=True,
            )
            if args.json:
                write_record(
                    args.json, {"trace": args.trace, "requests": len(load.requests), "rows": rows}, clock="virtual"
                )


if __name__ == "__main__":
    main()
