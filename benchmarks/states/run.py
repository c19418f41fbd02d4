"""Hit rates of hybrid models by the rule that places snapshots of states, at equal bytes.

The real scheduler core, one request at a time, so that the whole memory is cache. The product's rule runs beside the
rules of other servers, fixed grids, and an oracle that knows where later requests of the trace begin (see ``rules``).
With ``--fixed-eviction cost`` all of them evict as the product does, so that places alone differ. With ``lru``, fixed
rules evict the least recently used memory first, as the servers do that have these rules.
"""

import argparse
import time
from typing import Any, get_args
from unittest.mock import patch

from pagewise_scheduler.core.scheduling import scheduler as scheduling
from pagewise_scheduler.replay.simulation import replay_cache_only
from pagewise_scheduler.replay.traces import TraceRequest
from pagewise_shared.config.options import EvictionName

from benchmarks.record import record_file, write_record
from benchmarks.states.models import BLOCK_SIZE, MODELS, Model
from benchmarks.states.rules import Known, oracle, rules
from benchmarks.states.traces import Future, conversations, edited, recorded

FIXED = ("align", "each 256", "each 1,024", "each 4,096", "branch")
RULES = (*FIXED, "ours", "oracle")


def replay(
    model: Model, num_bytes: int, trace: list[TraceRequest], future: Future, rule: str, eviction: EvictionName
) -> dict[str, Any]:
    """Serve a trace. Returns the shares of its prompts' tokens that were cached, and that were computed again."""
    known, began = Known(future), time.process_time()
    memory = oracle(known) if rule == "oracle" else rules(model)[rule]
    with patch.object(scheduling, "GroupedKVCacheManager", memory):
        scheduler = model.scheduler(num_bytes, eviction=eviction)
        outcome = replay_cache_only(scheduler, trace, lambda index: setattr(known, "index", index))
    assert not outcome.refused
    total = sum(one.trace.num_prompt_tokens for one in outcome.served)
    cached = sum(one.request.num_cached_tokens for one in outcome.served)
    begun = BLOCK_SIZE * sum(future.begins)
    counters = scheduler.kv.pool.counters
    return {
        "cached": round(cached / total, 4),
        "computed_again": round((begun - cached) / total, 4),
        "taken": counters.snapshots_taken,
        "used": counters.snapshots_used,
        "unused": counters.snapshots_unused,
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--traces", nargs="+", choices=("agentic", "conversation", "edited", "shifted"), default=["agentic", "shifted"]
    )
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--fixed-eviction", choices=get_args(EvictionName), default="cost", help="of fixed rules")
    parser.add_argument("--gib", type=float, nargs="+", default=[16.0, 64.0])
    parser.add_argument("--requests", type=int, default=843, help="the first of a recorded trace")
    parser.add_argument("--sessions", type=int, default=120, help="of a synthetic trace, or its documents")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"{'':<14}{'':<26}{'GiB':>6}" + "".join(f"{rule:>12}" for rule in args.rules) + f"{'gap closed':>12}")
    for name in args.traces:
        if name in ("shifted", "edited"):
            trace = conversations(args.sessions) if name == "shifted" else edited(args.sessions)
        else:
            trace = recorded(name, args.requests)
        future = Future(trace)
        for model in args.models:
            for gib in args.gib:
                num_bytes = int(gib * 2**30)
                of = {}
                for rule in args.rules:
                    eviction: EvictionName = args.fixed_eviction if rule in FIXED else "cost"
                    of[rule] = replay(MODELS[model], num_bytes, trace, future, rule, eviction)
                row: dict[str, Any] = {"trace": name, "model": model, "gib": gib, "rules": of}
                if set(args.rules) == set(RULES):
                    best = max(of[rule]["cached"] for rule in FIXED)
                    if (gap := of["oracle"]["cached"] - best) > 0:
                        row["gap_closed"] = round((of["ours"]["cached"] - best) / gap, 2)
                rows.append(row)
                shown = "".join(f"{100 * one['cached']:>11.2f}%" for one in of.values())
                print(f"{name:<14}{model:<26}{gib:>6g}{shown}   {row.get('gap_closed', '')}", flush=True)
                if args.json:
                    write_record(
                        args.json,
                        {
                            "requests": args.requests,
                            "sessions": args.sessions,
                            "fixed_eviction": args.fixed_eviction,
                            "rows": rows,
                        },
                        clock="virtual",
                    )


if __name__ == "__main__":
    main()
