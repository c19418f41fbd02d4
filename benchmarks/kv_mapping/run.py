"""Block tables and page tables in hardware beside each other: memory, sharing, time to map, and time of attention.

    python -m benchmarks.kv_mapping.run --json FILE --plot FILE

The loss by the size of blocks is arithmetic over traces, and a replay of their first requests on the scheduler core
under a virtual clock. Times are measured on this machine, in turns; every number is a median.
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.kv_mapping.granularity import PAGES, TRACES, lost, read, served
from benchmarks.kv_mapping.measured import CASES, CONTENDERS, attention_times, block_times, map_times
from benchmarks.record import record_file, write_record

SIZES = (2, 16, 32, 64, 128, 256, 512, 1024)
SERVED_SIZES = (16, 32, 256, 1024)
ATTENTION_SIZES = (16, 64, 256)
MAPPED = {"4 KiB": 4 * 2**10, "64 KiB": 64 * 2**10, "2 MiB": 2 * 2**20}
PRESENT = (1_000, 50_000)


def granularity(requests: int) -> dict[str, list[dict[str, Any]]]:
    """The loss by block size: over whole traces, and in a pool of 40 GiB over their first requests."""
    whole, replayed = [], []
    print(f"{'trace':<16}{'block':>6}{'empty':>9}{'memory':>9}{'shared':>9}")
    for name in TRACES:
        trace = read(name)
        for size in SIZES:
            found = lost(trace, size)
            whole.append({"trace": name, "block_size": size} | found)
            print(f"{name:<16}{size:>6}{found['tails']:>9.2%}{found['memory']:>9.3f}{found['reused']:>9.2%}")
    print(f"\n{'trace':<16}{'block':>6}{'empty':>9}{'hits':>9}{'running':>9}{'requests/s':>12}{'runs':>8}")
    for name in TRACES:
        for size in SERVED_SIZES:
            found = served(read(name, requests), size)
            replayed.append({"trace": name, "block_size": size} | found)
            print(
                f"{name:<16}{size:>6}{found['tails']:>9.2%}{found['hit_rate']:>9.2%}{found['running']:>9}"
                f"{found['requests_per_second']:>12}{found['runs']:>8}",
                flush=True,
            )
    return {"whole_traces": whole, "served": replayed}


def mapping() -> dict[str, list[dict[str, Any]]]:
    """The time to map pages, and blocks."""
    calls, blocks = [], []
    for name, size in MAPPED.items():
        for present in PRESENT:
            times = map_times(size, present)
            calls.append({"size": name, "maps_present": present} | times)
            print(f"{name:>7} beside {present:,} maps: {times['new']} µs, {times['replaced']} µs in place of another")
    for layout in ("layers", "tokens"):
        found = block_times(layout, 16)
        blocks.append({"layout": "blocks" if layout == "tokens" else layout, "block_size": 16} | found)
        print(f"a block of 16 tokens, --kv-layout {blocks[-1]['layout']}: {found['calls']} calls, {found['us']} µs")
    return {"calls": calls, "blocks": blocks}


def attention(rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of attention per layer."""
    rows = []
    print(f"{'':<26}{'block':>6}" + "".join(f"{name:>24}" for name in CONTENDERS))
    for name, case in CASES.items():
        for size in ATTENTION_SIZES:
            times = attention_times(case, size, rounds)
            rows.append({"case": name, "block_size": size, "ms_per_layer": times})
            print(f"{name:<26}{size:>6}" + "".join(f"{times[one]:>24}" for one in CONTENDERS), flush=True)
    return rows


def plot(granularity: dict[str, list[dict[str, Any]]], attention: list[dict[str, Any]], path: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (memory, sharing, times) = plt.subplots(1, 3, figsize=(14, 4.2))
    for name in TRACES:
        rows = [row for row in granularity["whole_traces"] if row["trace"] == name]
        sizes = [row["block_size"] for row in rows]
        memory.plot(sizes, [100 * (row["memory"] - 1) for row in rows], marker="o", markersize=4, label=name)
        if rows[0]["reused"]:
            lost = [100 * (1 - row["reused"] / rows[0]["reused"]) for row in rows]
            sharing.plot(sizes, lost, marker="o", markersize=4, label=name)
    for page, tokens in PAGES.items():
        memory.axvline(tokens, color="grey", linestyle=":", linewidth=1)
        memory.text(tokens, 0.98, f" {page}", rotation=90, va="top", ha="right", fontsize=7, color="grey",
                    transform=memory.get_xaxis_transform())  # fmt: skip
    memory.set(xscale="log", xlabel="tokens per block", ylabel="% of memory more than tokens take")
    sharing.set(xscale="log", xlabel="tokens per block", ylabel="% of the shared prompt tokens lost")
    for name in CONTENDERS:
        rows = [row for row in attention if row["case"] == "decode, 16 x 512"]
        times.plot([row["block_size"] for row in rows], [row["ms_per_layer"][name] for row in rows], marker="o",
                   markersize=4, label=name)  # fmt: skip
    times.set(xscale="log", xlabel="tokens per block", ylabel="attention, ms per layer", title="16 decodes, 512 tokens")
    times.set_ylim(bottom=0)
    for axes, shown in ((memory, SIZES), (sharing, SIZES), (times, ATTENTION_SIZES)):
        axes.set_xticks(shown, [str(size) for size in shown])
        axes.set_xticks([], minor=True)
        axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000, help="of each trace, those that are replayed")
    parser.add_argument("--rounds", type=int, default=15, help="of attention")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    parser.add_argument("--plot", help="file to draw the figure into (needs matplotlib)")
    args = parser.parse_args()
    by_size = granularity(args.requests)
    mapped = mapping()
    times = attention(args.rounds)
    if args.json:
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
        write_record(
            args.json,
            {"tokens_per_page": PAGES, "granularity": by_size, "mapping": mapped, "attention": times},
            max_map_count=limit,
        )
    if args.plot:
        plot(by_size, times, args.plot)


if __name__ == "__main__":
    main()
