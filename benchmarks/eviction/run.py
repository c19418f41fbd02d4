"""How much of a trace the prefix cache saves, by its size and by the order of eviction.

Three traces on the real scheduler core, one request at a time, so that the whole pool is cache: LRU, the cost-aware
policy (which knows nothing of the future) and Belady's optimum (which knows it all). The sessions of the agentic trace
run side by side as they were recorded; there the cost-aware policy is replayed once more without the knowledge which
answers called a tool. Prints a table and, with ``--json`` and ``--plot``, writes it. With ``--jobs``, replays run side
by side; their times then say less.
"""

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.replay.belady import Belady
from pagewise_scheduler.replay.costs import llama_3_8b
from pagewise_scheduler.replay.report import summarise
from pagewise_scheduler.replay.simulation import replay_cache_only
from pagewise_scheduler.replay.traces import TraceRequest, read_trace
from tqdm import tqdm

from benchmarks.record import record_file, write_record

TRACES = {
    "synthetic": "mooncake_synthetic_trace.jsonl.gz",
    "conversation": "mooncake_conversation_trace.jsonl.gz",
    "agentic": "cc_agentic_max64k_min10req.rle.jsonl.gz",
}
MILLIONS = {"synthetic": (0.5, 1, 3, 10), "conversation": (0.5, 1, 3, 10), "agentic": (0.1, 0.2, 0.5, 1)}
Policy = Literal["lru", "cost", "belady", "untold"]
POLICIES: tuple[Policy, ...] = ("lru", "cost", "belady")
SHOWN: tuple[Policy, ...] = (*POLICIES, "untold")
BLOCK_SIZE = 16


class Case(NamedTuple):
    """One replay: of a trace, with a cache of so many tokens (0: all that there are), by a policy."""

    trace: str
    tokens: int
    policy: Policy


class Replayed(NamedTuple):
    """``hit_rate``: share of the trace's own blocks that were cached. ``seconds``: CPU time of the replay."""

    hit_rate: float
    seconds: float


@cache
def load(name: str) -> list[TraceRequest]:
    return sorted(read_trace(Path(__file__).parents[1] / "traces" / TRACES[name]), key=lambda one: one.recorded)


def replayed(case: Case) -> Replayed:
    """Replay one of them."""
    trace = load(case.trace)
    if case.policy == "untold":
        trace = [replace(request, tool_call=False) for request in trace]
    everything = sum(request.num_prompt_tokens + request.num_output_tokens + 32 for request in trace)
    began = time.process_time()
    belady = Belady(trace)
    scheduler = Scheduler(
        num_blocks=(case.tokens or everything) // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_num_seqs=1,
        max_num_batched_tokens=1 << 18,
        costs=llama_3_8b(BLOCK_SIZE).prefill,
        eviction=belady if case.policy == "belady" else "lru" if case.policy == "lru" else "cost",
    )
    outcome = replay_cache_only(scheduler, trace, lambda index: setattr(belady, "index", index))
    rate: float = summarise(outcome, [scheduler], slo_first_token=1.0, slo_per_token=1.0)["hit_rate"]["of_trace_blocks"]
    return Replayed(rate, time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=list(TRACES))
    parser.add_argument("--millions", type=float, nargs="+", help="tokens that the cache holds")
    parser.add_argument("--jobs", type=int, default=1, help="replays that run at the same time")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    parser.add_argument("--plot", help="file to draw the figure into (needs matplotlib)")
    args = parser.parse_args()
    sizes = [(name, int(millions * 1e6)) for name in args.traces for millions in args.millions or MILLIONS[name]]
    cases = [Case(name, tokens, policy) for (name, tokens), policy in product(sizes, POLICIES)]
    cases += [Case(name, tokens, "untold") for name, tokens in sizes if name == "agentic"]
    cases += [Case(name, 0, "lru") for name in args.traces]
    with ProcessPoolExecutor(args.jobs) as pool:
        replays = tqdm(pool.map(replayed, cases), total=len(cases), desc="replaying", unit=" traces", disable=None)
        results = dict(zip(cases, replays, strict=True))
    rows: list[dict[str, Any]] = []
    print(
        f"{'trace':<14}{'tokens':>10}{'LRU':>9}{'cost':>9}{'Belady':>9}{'untold':>9}{'gap closed':>12}"
        f"{'time, cost / LRU':>18}"
    )
    for name, tokens in sizes:
        of = {case.policy: one for case, one in results.items() if case[:2] == (name, tokens)}
        rates = {policy: one.hit_rate for policy, one in of.items()}
        closed = (rates["cost"] - rates["lru"]) / (rates["belady"] - rates["lru"])
        slower = of["cost"].seconds / of["lru"].seconds
        rows.append(
            {
                "trace": name,
                "million_tokens": tokens / 1e6,
                "hit_rate": rates,
                "gap_closed": round(closed, 3),
                "replay_seconds": {policy: round(one.seconds, 1) for policy, one in of.items()},
            }
        )
        shown = "".join(f"{100 * rates[policy]:>8.2f}%" if policy in rates else 9 * " " for policy in SHOWN)
        print(f"{name:<14}{tokens / 1e6:>9g}M{shown}{100 * closed:>11.0f}%{slower:>18.2f}")
    unlimited = {name: results[Case(name, 0, "lru")].hit_rate for name in args.traces}
    for name, rate in unlimited.items():
        print(f"{name:<14}{'unlimited':>10}{100 * rate:>8.1f}%")
    if args.json:
        write_record(args.json, {"rows": rows, "unlimited": unlimited}, clock="virtual")
    if args.plot:
        plot(rows, unlimited, args.plot)


def plot(rows: list[dict[str, Any]], unlimited: dict[str, float], path: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(unlimited), figsize=(5 * len(unlimited), 4), sharey=True, squeeze=False)
    for axes, (trace, limit) in zip(panels[0], unlimited.items(), strict=True):
        of_trace = [row for row in rows if row["trace"] == trace]
        for policy, name in (("lru", "LRU"), ("cost", "cost-aware"), ("belady", "Belady's optimum")):
            axes.plot(
                [row["million_tokens"] for row in of_trace],
                [100 * row["hit_rate"][policy] for row in of_trace],
                marker="o",
                label=name,
            )
        axes.axhline(100 * limit, color="grey", linestyle=":", label="unlimited cache")
        axes.set(xscale="log", xlabel="cache, million tokens", ylim=(0, None), title=trace)
    panels[0][0].set_ylabel("% of the trace's blocks cached")
    panels[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
