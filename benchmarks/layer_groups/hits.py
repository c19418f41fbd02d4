"""Hit rates of an agentic trace, with full tables and with groups of layers, in the same number of GiB.

The real scheduler core, one request at a time, so that the whole memory is cache, as in ``benchmarks.eviction.run``.
Each size of memory is given by the tokens that full tables hold in it. Without a limit, no block is evicted. Groups
then find less only where a prompt leaves the path of an earlier one and no snapshot lies there.
"""

import argparse
from dataclasses import replace
from typing import Any

from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.replay.costs import llama_3_8b
from pagewise_scheduler.replay.report import summarise
from pagewise_scheduler.replay.simulation import replay_cache_only
from tqdm import tqdm

from benchmarks.eviction.run import load
from benchmarks.layer_groups.models import BLOCK_SIZE, MODELS, Model, scheduler_of
from benchmarks.record import record_file, write_record

STEP_TOKENS = 2048
OUTPUT_TOKENS = 16
"""Most tokens of an answer: the prompt behind it has its text, but the trace does not say with which tokens."""
UNLIMITED = 8.0
"""Million tokens: more than all prompts and answers of the trace have, if shared tokens count once."""


def hit_rate(model: Model, num_bytes: int, num_requests: int, *, grouped: bool) -> float:
    """The share of the trace's blocks that were cached."""
    requests = load("agentic")[:num_requests]
    trace = [replace(one, num_output_tokens=min(one.num_output_tokens, OUTPUT_TOKENS)) for one in requests]
    costs = llama_3_8b(BLOCK_SIZE).prefill
    scheduler = scheduler_of(
        model, num_bytes, STEP_TOKENS, grouped=grouped, kind=Scheduler, costs=costs, eviction="cost"
    )
    outcome = replay_cache_only(scheduler, trace, lambda index: None)
    report = summarise(outcome, [scheduler], slo_first_token=1.0, slo_per_token=1.0)
    rate: float = report["hit_rate"]["of_trace_blocks"]
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["Gemma 3 27B", "gpt-oss-20b"])
    parser.add_argument("--millions", type=float, nargs="+", default=[0.1, 0.2, 0.5, UNLIMITED], help="of tokens")
    parser.add_argument("--requests", type=int, default=843, help="the first of the trace (default: all)")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"{'':<16}{'full tables':>12}{'GiB':>8}{'full tables':>13}{'groups':>9}")
    cases = [(name, millions) for name in args.models for millions in args.millions]
    for name, millions in tqdm(cases, desc="replaying", unit=" sizes", disable=None):
        model = MODELS[name]
        num_bytes = int(millions * 1e6) * model.before
        full, groups = (hit_rate(model, num_bytes, args.requests, grouped=one) for one in (False, True))
        rows.append(
            {
                "model": name,
                "million_tokens": millions,
                "gib": round(num_bytes / 2**30, 1),
                "hit_rate": {"full tables": full, "groups": groups},
            }
        )
        print(f"{name:<16}{millions:>11g}M{num_bytes / 2**30:>8.1f}{100 * full:>12.2f}%{100 * groups:>8.2f}%")
    if args.json:
        numbers = {"step_tokens": STEP_TOKENS, "output_tokens": OUTPUT_TOKENS, "requests": args.requests, "rows": rows}
        write_record(args.json, numbers, clock="virtual")


if __name__ == "__main__":
    main()
