"""How much of a trace the prefix cache saves, by its size and by what is evicted first.

The Mooncake synthetic trace on the real scheduler core, one request at a time: LRU, the cost-aware policy (which knows
nothing of the future) and Belady's optimum (which knows it all). Prints a table and, with ``--json`` and ``--plot``,
writes it.
"""

import argparse
import time
from pathlib import Path
from typing import Any, Literal

from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.replay.belady import Belady
from pagewise_scheduler.replay.costs import llama_3_8b
from pagewise_scheduler.replay.report import summarise
from pagewise_scheduler.replay.simulation import replay_cache_only
from pagewise_scheduler.replay.traces import TraceRequest, read_trace

from benchmarks.record import record_file, write_record

TRACE = Path(__file__).parents[1] / "traces" / "mooncake_synthetic_trace.jsonl.gz"
Policy = Literal["lru", "cost", "belady"]
POLICIES: tuple[Policy, ...] = ("lru", "cost", "belady")
BLOCK_SIZE = 16


def hit_rate(trace: list[TraceRequest], tokens: int, policy: Policy) -> float:
    """Share of the trace's own blocks that were cached."""
    belady = Belady(trace)
    scheduler = Scheduler(
        num_blocks=tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_num_seqs=1,
        max_num_batched_tokens=1 << 18,
        costs=llama_3_8b(BLOCK_SIZE).prefill,
        eviction=belady if policy == "belady" else policy,
    )
    outcome = replay_cache_only(scheduler, trace, lambda index: setattr(belady, "now", index))
    rate: float = summarise(outcome, [scheduler], slo_first_token=1.0, slo_per_token=1.0)["hit_rate"]["of_trace_blocks"]
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=float, nargs="+", default=[0.5, 1, 3, 10], help="tokens the cache holds")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    parser.add_argument("--plot", help="file to draw the figure into (needs matplotlib)")
    args = parser.parse_args()
    trace = read_trace(TRACE)
    rows: list[dict[str, Any]] = []
    print(f"{'tokens':>10}{'LRU':>9}{'cost':>9}{'Belady':>9}{'gap closed':>12}")
    for millions in args.millions:
        rates = {policy: hit_rate(trace, int(millions * 1e6), policy) for policy in POLICIES}
        closed = (rates["cost"] - rates["lru"]) / (rates["belady"] - rates["lru"])
        rows.append({"million_tokens": millions, "hit_rate": rates, "gap_closed": round(closed, 3)})
        shown = "".join(f"{100 * rates[policy]:>8.1f}%" for policy in POLICIES)
        print(f"{millions:>9}M{shown}{100 * closed:>11.0f}%", flush=True)
    began = time.perf_counter()
    everything = sum(request.num_prompt_tokens + request.num_output_tokens + 32 for request in trace)
    unlimited = hit_rate(trace, everything, "lru")
    print(f"{'unlimited':>10}{100 * unlimited:>8.1f}%   replayed in {time.perf_counter() - began:.0f} s")
    if args.json:
        write_record(args.json, {"rows": rows, "unlimited": unlimited}, clock="virtual")
    if args.plot:
        plot(rows, unlimited, args.plot)


def plot(rows: list[dict[str, Any]], unlimited: float, path: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for policy, name in (("lru", "LRU"), ("cost", "cost-aware"), ("belady", "Belady's optimum")):
        axes.plot(
            [row["million_tokens"] for row in rows],
            [100 * row["hit_rate"][policy] for row in rows],
            marker="o",
            label=name,
        )
    axes.axhline(100 * unlimited, color="grey", linestyle=":", label="unlimited cache")
    axes.set(xscale="log", xlabel="cache, million tokens", ylabel="% of the trace's blocks cached", ylim=(0, None))
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
