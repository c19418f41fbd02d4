"""Eight executors that prefill and decode, or some for prompts and the others for decoding: when that pays.

Real scheduler cores, routing and moves under a virtual clock, a modelled Llama 3 8B, chunked prefill everywhere. The
beginning of each trace comes at several speeds to fleets of equal hardware: all executors for both, also with small
chunks, which is the other way to keep prompts from holding up tokens; 2 for prompts and 6 for decoding; 4 and 4; 6 and
2. Prints a table and, with ``--json``, writes it.

    python -m benchmarks.roles.run --jobs 2
    python -m benchmarks.roles.run --smoke      # a few seconds: the first 100 requests
"""

import argparse
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pagewise_scheduler.core.memory.use_history import UseHistory
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.replay.costs import llama_3_8b
from pagewise_scheduler.replay.report import summarise
from pagewise_scheduler.replay.simulation import Simulation
from pagewise_scheduler.replay.traces import read_trace
from pagewise_shared.protocol import Role

from benchmarks.record import record_file, write_record

TRACES = {
    "conversation": "mooncake_conversation_trace.jsonl.gz",
    "agentic": "cc_agentic_max64k_min10req.rle.jsonl.gz",
    "sharegpt": "sharegpt_8k_filtered_stats_llama2_tokenizer.csv.gz",
}
SPEEDS = {"conversation": (0.5, 1.0, 2.0), "agentic": (50.0, 200.0, 1000.0), "sharegpt": (10.0, 20.0, 40.0)}
REQUESTS = {"conversation": 1000, "agentic": 843, "sharegpt": 2000}
LAYOUTS: dict[str, tuple[Role, ...]] = {
    "both": ("both",) * 8,
    "2:6": ("prefill",) * 2 + ("decode",) * 6,
    "4:4": ("prefill",) * 4 + ("decode",) * 4,
    "6:2": ("prefill",) * 6 + ("decode",) * 2,
}
BLOCK_SIZE = 64  # the traces repeat multiples of it
TOKENS = 500_000
CHUNK, SMALL_CHUNK = 2048, 512
LINK, FAST_LINK = 10.0, 50.0


@dataclass(frozen=True)
class Case:
    """``speed``: of arrivals and pauses, 1 is the trace's own; of a trace without times, requests per second.
    ``chunk``: tokens of a step. ``link``: GB/s that each executor sends to others, and receives."""

    trace: str
    speed: float
    layout: str = "both"
    chunk: int = CHUNK
    link: float = LINK
    limit: int = 0


def simulate(case: Case) -> dict[str, Any]:
    """Replay the trace."""
    path = Path(__file__).parents[1] / "traces" / TRACES[case.trace]
    timeless = case.trace == "sharegpt"
    trace = read_trace(path, limit=case.limit, rate=case.speed if timeless else 1.0)
    for request in trace if not timeless else ():
        request.arrival /= case.speed
    costs = llama_3_8b(BLOCK_SIZE, peer_bandwidth=case.link * 1e9)
    history = UseHistory()
    schedulers = [
        Scheduler(
            num_blocks=TOKENS // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            max_num_seqs=256,
            max_num_batched_tokens=case.chunk,
            costs=costs.prefill,
            eviction=history,
        )
        for _ in LAYOUTS[case.layout]
    ]
    simulation = Simulation(schedulers, costs, peers=True, uplinks=True, roles=LAYOUTS[case.layout], gaps=True)
    outcome = simulation.run(trace)
    summary = summarise(outcome, schedulers, slo_first_token=2.0, slo_per_token=0.05)
    gaps = sorted(outcome.gaps)
    return asdict(case) | {
        "first_token_seconds": summary["seconds"]["first_token"],
        "gap_seconds": {
            f"p{100 * share:g}": round(gaps[int(share * (len(gaps) - 1))], 4) for share in (0.5, 0.9, 0.99, 0.999)
        },
        "end_to_end_seconds": summary["seconds"]["end_to_end"],
        "tokens_per_second": summary["throughput_tokens_per_second"],
        "good_requests": summary["good_requests"],
        "moved": round(sum(one.moves for one in outcome.served) / len(outcome.served), 3),
        "hit_rate": summary["hit_rate"]["all"],
        "device_busy": summary["device_busy"],
        "preemptions": summary["preemptions"],
        "virtual_seconds": summary["virtual_seconds"],
    }


def cases(smoke: bool) -> Iterator[Case]:
    """Every layout at every speed; with a faster link in the middle."""
    for trace, speeds in SPEEDS.items():
        limit = 100 if smoke else REQUESTS[trace]
        for speed in speeds[:1] if smoke else speeds:
            yield Case(trace, speed, chunk=SMALL_CHUNK, limit=limit)
            for layout in LAYOUTS:
                yield Case(trace, speed, layout, limit=limit)
        if not smoke:
            yield Case(trace, speeds[1], "4:4", link=FAST_LINK, limit=limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="the first 100 requests only: does it work")
    parser.add_argument("--jobs", type=int, default=1, help="replays at once")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(
        f"{'':<44}{'TTFT p50':>10}{'p99':>8}{'gap p50':>9}{'p99':>8}{'p99.9':>8}{'tokens/s':>10}{'good':>7}{'moved':>7}"
        f"{'hits':>7}{'busy':>6}"
    )
    with ProcessPoolExecutor(args.jobs) as pool:
        for row in pool.map(simulate, cases(args.smoke)):
            rows.append(row)
            name = f"{row['trace']} x{row['speed']:g} {row['layout']} chunk {row['chunk']} {row['link']:g} GB/s"
            first, gap = row["first_token_seconds"], row["gap_seconds"]
            print(
                f"{name:<44}{first['p50']:>10.3f}{first['p99']:>8.2f}{1e3 * gap['p50']:>9.1f}{1e3 * gap['p99']:>8.1f}"
                f"{1e3 * gap['p99.9']:>8.1f}{row['tokens_per_second']:>10.0f}{row['good_requests']:>7.1%}"
                f"{row['moved']:>7.0%}{row['hit_rate']:>7.0%}{row['device_busy']:>6.0%}",
                flush=True,
            )
    if args.json:
        write_record(args.json, {"rows": rows}, clock="virtual")


if __name__ == "__main__":
    main()
