"""Does goodput hold when sequences need three times the memory there is?

The scheduler under a virtual clock with ShareGPT lengths: everything arrives at once, and the pool holds the working
set of the running sequences 1/0.9 times, or a third of it. Paging out and in must not cost the gain of batching. Prints
a table and, with ``--json``, writes it.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.recovery_plan import RecoveryMode
from pagewise_scheduler.replay.costs import llama_3_8b
from pagewise_scheduler.replay.simulation import Simulation
from pagewise_scheduler.replay.traces import TraceRequest, read_trace
from pagewise_shared.protocol import HOST

from benchmarks.record import record_file, write_record

TRACE = Path(__file__).parents[1] / "traces" / "sharegpt_8k_filtered_stats_llama2_tokenizer.csv.gz"
BLOCK_SIZE = 16


def serve(trace: list[TraceRequest], pool_tokens: int, host_tokens: int, recovery: RecoveryMode) -> dict[str, Any]:
    """Output tokens per second, preemptions, and the mean number of running sequences."""
    costs = llama_3_8b(BLOCK_SIZE)
    scheduler = Scheduler(
        num_blocks=pool_tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_num_seqs=len(trace),
        max_num_batched_tokens=8192,
        tiers={HOST: host_tokens // BLOCK_SIZE},
        costs=costs.prefill,
        recovery=recovery,
        eviction="cost",
    )
    outcome = Simulation([scheduler], costs).run(trace)
    assert len(outcome.served) == len(trace)
    tokens = sum(request.num_output_tokens for request in trace)
    return {
        "output_tokens_per_second": round(tokens / outcome.seconds, 1),
        "preemptions": scheduler.num_preemptions,
        "mean_running": round(statistics.mean(sample.running for sample in outcome.samples), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    trace = read_trace(TRACE, limit=args.requests)
    for request in trace:
        request.arrival = 0.0
    working_set = sum(request.num_prompt_tokens + request.num_output_tokens for request in trace)
    rows = []
    print(f"{'load':>6}{'memory':>22}{'tok/s':>10}{'of 0.9x':>9}{'preempted':>11}{'running':>9}")
    base = serve(trace, int(working_set / 0.9), 0, "auto")
    for load, host, recovery in (
        (0.9, 0, "auto"),
        (3.0, 0, "auto"),
        (3.0, working_set, "auto"),
        (3.0, working_set, "swap"),
    ):
        result = serve(trace, int(working_set / load), host, recovery)  # type: ignore[arg-type]
        share = result["output_tokens_per_second"] / base["output_tokens_per_second"]
        memory = f"host, {recovery}" if host else "device only"
        rows.append({"load": load, "memory": memory, "of_0.9": round(share, 3)} | result)
        print(
            f"{load:>6}{memory:>22}{result['output_tokens_per_second']:>10}{share:>9.0%}"
            f"{result['preemptions']:>11}{result['mean_running']:>9}",
            flush=True,
        )
    if args.json:
        write_record(args.json, {"rows": rows}, clock="virtual")


if __name__ == "__main__":
    main()
