"""Eight executors beside one of eight times the memory and speed: the share of cache hits that routing keeps.

The Mooncake synthetic trace at its own times, on the real scheduler cores and routing policies under a virtual clock.
Each policy, with executors that fetch from each other and without, and the default one with a term left out; the first
of them on conversations and on sessions of coding agents too. Prints a table and, with ``--json`` and ``--plot``,
writes it.

    python -m benchmarks.routing.run --jobs 2
    python -m benchmarks.routing.run --smoke      # a few seconds: the first 200 requests
"""

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pagewise_scheduler.core.memory.use_history import UseHistory
from pagewise_scheduler.core.routing.executor_view import CostEstimate
from pagewise_scheduler.core.routing.policies import ROUTING_NAMES, LeastTimeToFirstToken, RoutingPolicy, make_routing
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.replay.costs import llama_3_8b
from pagewise_scheduler.replay.report import summarise
from pagewise_scheduler.replay.simulation import Simulation
from pagewise_scheduler.replay.traces import read_trace

from benchmarks.record import record_file, write_record

TRACES = Path(__file__).parents[1] / "traces"
SYNTHETIC = "mooncake_synthetic_trace.jsonl.gz"
CONVERSATIONS = "mooncake_conversation_trace.jsonl.gz"
AGENTS = "cc_agentic_max64k_min10req.rle.jsonl.gz"
EXECUTORS = 8
BLOCK_SIZE = 128  # the traces repeat blocks of 512, that of agents of 64
BAR_HIT_RATE, BAR_BUSIEST = 0.95, 1.15
DEFAULT = "ttft, fetching"
"""The defaults of ``pagewise serve``: ``--routing ttft`` and ``--lend-blocks``."""


class WithoutEviction(LeastTimeToFirstToken):
    """Evicted blocks count nothing."""

    def cost(self, found: CostEstimate) -> float:
        return found.queue + found.recovery / (1.0 - found.busy)


class WithoutOthers(LeastTimeToFirstToken):
    """The delay of later requests by computing counts nothing."""

    def cost(self, found: CostEstimate) -> float:
        return found.queue + found.recovery + found.evicted


class WithoutQueue(LeastTimeToFirstToken):
    """Waiting requests before it count nothing."""

    def cost(self, found: CostEstimate) -> float:
        return (found.recovery + found.evicted) / (1.0 - found.busy)


ABLATIONS: dict[str, type[LeastTimeToFirstToken]] = {
    "ttft without eviction": WithoutEviction,
    "ttft without others": WithoutOthers,
    "ttft without queue": WithoutQueue,
}


@dataclass(frozen=True)
class Case:
    """``million_tokens``: that each of the ``executors`` holds. ``speed``: of arrivals, 1 is the trace's own.

    ``peers``: they fetch blocks from each other. ``learn_apart``: each executor learns rates of reuse for itself,
    instead of all together.
    """

    policy: str
    million_tokens: float
    speed: float = 1.0
    executors: int = EXECUTORS
    trace: str = SYNTHETIC
    peers: bool = False
    learn_apart: bool = False
    limit: int | None = None


def simulate(case: Case) -> dict[str, Any]:
    """Replay the trace. One executor takes the place of all: as much memory, as fast."""
    trace = read_trace(TRACES / case.trace, limit=case.limit)
    for request in trace:
        if request.after < 0:  # else it is the time that a person thinks
            request.arrival /= case.speed
    times = EXECUTORS // case.executors
    costs = llama_3_8b(BLOCK_SIZE).times_as_fast(times)
    history = [UseHistory() for _ in range(case.executors if case.learn_apart else 1)] * case.executors
    schedulers = [
        Scheduler(
            num_blocks=int(times * case.million_tokens * 1e6) // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            costs=costs.prefill,
            eviction=history[number],
        )
        for number in range(case.executors)
    ]
    routing: RoutingPolicy
    if case.policy in ABLATIONS:
        routing = ABLATIONS[case.policy]()
    else:
        routing = make_routing(next((name for name in ROUTING_NAMES if name == case.policy), "ttft"))
    outcome = Simulation(schedulers, costs, routing=routing, peers=case.peers).run(trace)
    summary = summarise(outcome, schedulers, slo_first_token=10.0, slo_per_token=0.2)
    return asdict(case) | {
        "hit_rate": summary["hit_rate"]["all"],
        "fetched": summary["hit_rate"]["peer"],
        "busiest_of_mean": summary["routing"]["busiest_of_mean"],
        "device_busy": summary["device_busy"],
        "first_token_seconds": summary["seconds"]["first_token"],
        "reasons": summary["routing"]["reasons"],
        "actual_of_predicted": summary["routing"]["actual_of_predicted"],
    }


def cases(smoke: bool) -> Iterator[Case]:
    """Every policy at one million tokens and the trace's own speed; the default one elsewhere too."""
    limit = 200 if smoke else None
    for policy in ("one", *ROUTING_NAMES, *ABLATIONS):
        yield Case(policy, 1.0, executors=1 if policy == "one" else EXECUTORS, limit=limit)
    for policy in ROUTING_NAMES:
        yield Case(policy, 1.0, peers=True, limit=limit)
    yield Case("ttft", 1.0, learn_apart=True, limit=limit)
    if smoke:
        return
    for tokens, speed in ((0.5, 1.0), (2.0, 1.0), (1.0, 2.0)):
        for policy in ("one", "ttft", "prefix"):
            yield Case(policy, tokens, speed, 1 if policy == "one" else EXECUTORS)
        yield Case("ttft", tokens, speed, peers=True)
    # Memory for a part of the prompts, and sessions that overlap.
    for trace, tokens, speed, first in ((CONVERSATIONS, 1.0, 1.0, 1000), (AGENTS, 0.125, 1000.0, None)):
        for policy in ("one", "ttft", "prefix", "round-robin"):
            yield Case(policy, tokens, speed, 1 if policy == "one" else EXECUTORS, trace, limit=first)
        yield Case("ttft", tokens, speed, trace=trace, peers=True, limit=first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="the first 200 requests only: does it work")
    parser.add_argument("--jobs", type=int, default=1, help="replays at once")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    parser.add_argument("--plot", help="file to draw the figure into (needs matplotlib)")
    parser.add_argument("--redraw", type=Path, help="draw the figure of these results (a file of --json), run nothing")
    args = parser.parse_args()
    if args.redraw:
        plot(json.loads(args.redraw.read_text())["rows"], args.plot or parser.error("--redraw needs --plot"))
        return
    rows: list[dict[str, Any]] = []
    one: dict[tuple[str, float, float], float] = {}
    print(f"{'':>44}{'hit rate':>10}{'of one':>8}{'busiest':>9}{'busy':>7}{'TTFT p50':>10}{'mean':>8}{'p99':>8}")
    with ProcessPoolExecutor(args.jobs) as pool:
        for row in pool.map(simulate, cases(args.smoke)):
            place = row["trace"], row["million_tokens"], row["speed"]
            if row["policy"] == "one":
                one[place] = row["hit_rate"]
            row["hit_rate_of_one"] = round(row["hit_rate"] / one[place], 4)
            rows.append(row)
            name = f"{name_of(row)} {row['trace'][:11]} {row['million_tokens']:g}M x{row['speed']:g}"
            seconds, busiest = row["first_token_seconds"], row["busiest_of_mean"]["busy_seconds"]
            print(
                f"{name:>44}{row['hit_rate']:>10.1%}{row['hit_rate_of_one']:>8.1%}{busiest:>9.2f}"
                f"{row['device_busy']:>7.0%}{seconds['p50']:>10.3f}{seconds['mean']:>8.3f}{seconds['p99']:>8.2f}",
                flush=True,
            )
    if args.json:
        write_record(args.json, {"rows": rows}, clock="virtual")
    if args.plot:
        plot(rows, args.plot)


def name_of(row: dict[str, Any]) -> str:
    """The name of the policy, and its special settings."""
    special = [name for name, key in (("fetching", "peers"), ("learning apart", "learn_apart")) if row[key]]
    return ", ".join([row["policy"], *special])


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Draw the results of the policies on the synthetic trace; the default of ``pagewise serve`` is highlighted."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if (row["trace"], row["million_tokens"], row["speed"]) == (SYNTHETIC, 1, 1)]
    figure, axes = plt.subplots(1, 3, figsize=(11, 4.2), sharey=True, layout="constrained")
    names = [f"{name_of(row)} (default)" if name_of(row) == DEFAULT else name_of(row) for row in rows]
    colours = ["tab:blue" if name_of(row) == DEFAULT else "lightsteelblue" for row in rows]
    for axis, label, values, bound, kind in (
        (
            axes[0],
            "hit rate, % of that of one executor",
            [100 * row["hit_rate_of_one"] for row in rows],
            1.25,
            "%.1f%%",
        ),
        (
            axes[1],
            "busy time of the busiest, by the mean",
            [row["busiest_of_mean"]["busy_seconds"] for row in rows],
            1.2,
            "%.2f",
        ),
        (axes[2], "mean seconds to the first token", [row["first_token_seconds"]["mean"] for row in rows], 1.2, "%.2f"),
    ):
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        axis.bar_label(axis.barh(names, values, color=colours), fmt=kind, padding=3, fontsize=8, bbox=behind)
        axis.set(xlabel=label, xlim=(0, bound * max(values)))
        axis.spines[["top", "right"]].set_visible(False)
    for axis, bar in ((axes[0], 100 * BAR_HIT_RATE), (axes[1], BAR_BUSIEST)):
        axis.axvline(bar, color="grey", linestyle=":", zorder=1)
        axis.text(bar, 1.0, f"aim: {bar:g}", transform=axis.get_xaxis_transform(), ha="center", fontsize=8)
    axes[0].invert_yaxis()
    axes[0].get_yticklabels()[names.index(f"{DEFAULT} (default)")].set_fontweight("bold")
    figure.savefig(path)


if __name__ == "__main__":
    main()
