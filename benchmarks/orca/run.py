"""The experiment of the vLLM paper: the content of KV memory under Orca's three reservations, and under paging.

The same scheduler, the same requests (ShareGPT lengths), the same modelled device; only the memory manager differs.
While requests wait, KV memory is sampled and divided into token states, slots reserved for tokens that will come,
internal fragmentation (reserved for tokens that never come, or the rest of a last block) and external fragmentation
(free, or lost to the buddy allocator's rounding). Prints tables and, with ``--json`` and ``--plot``, writes them.
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager
from pagewise_scheduler.replay.costs import modelled
from pagewise_scheduler.replay.simulation import Simulation
from pagewise_scheduler.replay.traces import TraceRequest, read_trace
from tqdm import tqdm

from benchmarks.orca.reserving import Reservation, ReservingKVManager, reserved_slots, scheduler_over
from benchmarks.record import record_file, write_record

TRACE = Path(__file__).parents[1] / "traces" / "sharegpt_8k_filtered_stats_llama2_tokenizer.csv.gz"
NUM_SLOTS = 15_700
"""KV slots of the paper's OPT-13B on an A100 of 40 GB (its table 1)."""

MAX_MODEL_LEN = 2048
Memory = Reservation | Literal["paged"]

PARTS = ("token states", "reserved", "internal fragmentation", "external fragmentation")
NAMES: dict[Memory, str] = {"max": "Orca (Max)", "pow2": "Orca (Pow2)", "oracle": "Orca (Oracle)", "paged": "Pagewise"}
PAPER = {
    "max": (20.4, 13.3, 57.3, 8.9),
    "pow2": (26.8, 17.9, 13.6, 41.6),
    "oracle": (38.2, 25.2, 0.0, 36.6),
    "paged": (96.3, 0.0, 3.7, 0.0),
}
"""Per cent, figure 2 of the paper; the last row is vLLM's."""


class Watch:
    """Adds up the content of KV memory, whenever a request waits."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.parts: Counter[str] = Counter()
        self.samples = self.running = self.allocated = self.empty = 0
        self._scheduler = scheduler

    def __call__(self, now: float) -> None:
        scheduler = self._scheduler
        if not scheduler.num_waiting:
            return
        self.samples += 1
        kv = scheduler.kv
        self.running += len(scheduler.running)
        parts = dict.fromkeys(PARTS, 0)
        for sequence in scheduler.running:
            held = min(sequence.num_tokens, sequence.table.num_slots)
            parts["token states"] += held
            if isinstance(kv, ReservingKVManager):
                reserved = kv.reservations[sequence.table.cache_salt]
                parts["reserved"] += sequence.max_num_tokens - held
                parts["internal fragmentation"] += reserved - sequence.max_num_tokens
            else:
                parts["internal fragmentation"] += sequence.table.num_slots - held
                self.allocated += sequence.table.num_slots
                self.empty += sequence.table.num_slots - held
        parts["external fragmentation"] = NUM_SLOTS - sum(parts.values())
        self.parts.update(parts)


def simulate(trace: list[TraceRequest], kind: Memory, block_size: int) -> dict[str, Any]:
    """Serve ``trace`` with one kind of memory."""
    costs = modelled(
        parameters=13e9, layers=40, heads=40, kv_heads=40, head_dim=128, block_size=block_size,
        flops=200e12, memory_bandwidth=1.5e12, link_bandwidth=25e9,
    )  # fmt: skip
    kv: KVCacheManager
    if kind == "paged":
        kv = KVCacheManager(NUM_SLOTS // block_size, block_size)
    else:
        reserving = kv = ReservingKVManager(NUM_SLOTS, block_size, MAX_MODEL_LEN)
        for index, request in enumerate(trace):
            reserving.reservations[str(index)] = reserved_slots(
                kind,
                request.num_prompt_tokens,
                request.num_output_tokens,
                MAX_MODEL_LEN,
            )
    scheduler = scheduler_over(kv, max_num_seqs=256, max_num_batched_tokens=2560, costs=costs.prefill)
    watch = Watch(scheduler)
    outcome = Simulation([scheduler], costs, salt=str, watch=watch).run(trace)
    total = sum(watch.parts.values())
    output_tokens = sum(request.num_output_tokens for request in trace)
    return {
        "memory": NAMES[kind],
        "percent": {part: round(100 * watch.parts[part] / total, 1) for part in PARTS},
        "paper_percent": dict(zip(PARTS, PAPER[kind], strict=True)),
        "mean_running": round(watch.running / watch.samples, 1),
        "requests_per_second": round(len(outcome.served) / outcome.seconds, 2),
        "output_tokens_per_second": round(output_tokens / outcome.seconds, 1),
        "preemptions": scheduler.num_preemptions,
        "empty_percent_of_allocated": round(100 * watch.empty / watch.allocated, 2) if watch.allocated else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=20.0, help="arrivals per second: more than anybody can serve")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    parser.add_argument("--plot", help="file to draw the figure into (needs matplotlib)")
    parser.add_argument("--redraw", type=Path, help="draw the figure of these results (a file of --json), run nothing")
    args = parser.parse_args()
    if args.redraw:
        plot(json.loads(args.redraw.read_text())["rows"], args.plot or parser.error("--redraw needs --plot"))
        return
    everyone = read_trace(TRACE, rate=args.rate)
    trace = [one for one in everyone if one.num_prompt_tokens + one.num_output_tokens <= MAX_MODEL_LEN][: args.requests]
    start = trace[0].arrival
    for number, request in enumerate(trace):
        request.arrival = (request.arrival - start) * len(trace) / len(everyone) if number else 0.0
    rows = [
        simulate(trace, kind, 16) for kind in tqdm(NAMES, desc="replaying", unit=" managers of memory", disable=None)
    ]
    print(
        f"{'':>14}{'tokens':>9}{'reserved':>10}{'internal':>10}{'external':>10}{'running':>9}{'req/s':>8}{'tok/s':>9}"
    )
    for row in rows:
        parts = "".join(f"{row['percent'][part]:>{width}}%" for part, width in zip(PARTS, (8, 9, 9, 9), strict=True))
        print(
            f"{row['memory']:>14}{parts}{row['mean_running']:>9}"
            f"{row['requests_per_second']:>8}{row['output_tokens_per_second']:>9}"
        )
    sweep = {size: simulate(trace[:600], "paged", size) for size in (8, 16, 32, 64, 128)}
    print("\nallocated slots that hold no token, by block size:")
    for size, row in sweep.items():
        print(f"{size:>6}{row['empty_percent_of_allocated']:>8}%")
    if args.json:
        numbers = {
            "rows": rows,
            "empty_percent_of_allocated_by_block_size": {
                size: row["empty_percent_of_allocated"] for size, row in sweep.items()
            },
        }
        write_record(args.json, numbers, clock="virtual")
    if args.plot:
        plot(rows, args.plot)


SHOWN = (*PARTS[:3], "free, or lost to the buddy allocator", "free")
"""The parts that the figure distinguishes: free blocks are not fragmentation where any of them can be used."""
COLOURS = ("tab:blue", "lightskyblue", "tab:orange", "lightgrey", "white")


def shown(percent: dict[str, float], paged: bool) -> list[float]:
    """Return the percentages of ``SHOWN``."""
    *parts, rest = (percent[part] for part in PARTS)
    return [*parts, 0.0, rest] if paged else [*parts, rest, 0.0]


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Draw a bar for the paper's numbers and one for ours, for each kind of memory, and the requests per second."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (memory, speed) = plt.subplots(1, 2, figsize=(10, 4.2), width_ratios=(5, 2), layout="constrained")
    labels, places, bars = [], [], []
    for number, row in enumerate(rows):
        paged = row["memory"] == NAMES["paged"]
        labels += [("vLLM" if paged else row["memory"]) + ", in the paper", f"{row['memory']}, here"]
        places += [3 * number, 3 * number + 1]
        bars += [shown(row["paper_percent"], paged), shown(row["percent"], paged)]
    lefts = [0.0] * len(bars)
    for name, colour, widths in zip(SHOWN, COLOURS, zip(*bars, strict=True), strict=True):
        memory.barh(places, widths, left=lefts, label=name, color=colour, edgecolor="grey", linewidth=0.5)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for place, (held, *_) in zip(places, bars, strict=True):
        memory.text(held / 2, place, f"{held:.0f}%", ha="center", va="center", color="white", fontsize=8)
    memory.set_yticks(places, labels)
    memory.set(xlabel="% of KV memory, while requests wait", xlim=(0, 100))
    figure.legend(*memory.get_legend_handles_labels(), loc="outside upper center", ncols=len(SHOWN), fontsize=8)
    rates = [row["requests_per_second"] for row in rows]
    speed.bar_label(speed.barh([row["memory"] for row in rows], rates, color="tab:blue"), fmt="%.2f", padding=3)
    speed.set(xlabel="requests/s (modelled)", xlim=(0, 1.2 * max(rates)))
    for axis in (memory, speed):
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


if __name__ == "__main__":
    main()
