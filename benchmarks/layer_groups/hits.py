"""Hit rates of an agentic trace, with full tables and with groups of layers.

The real scheduler core, one request at a time, so that the whole memory is cache, as in ``benchmarks.eviction.run``.
Each size of memory is given by the tokens that full tables hold in it. Groups have the same number of GiB, or so few
that the longest sequence has the same number of tokens. In a further size, both have host memory besides. Without a
limit, no block is evicted. Groups then find less only where a prompt leaves the path of an earlier one and has no
snapshot there; this is replayed with fewer snapshots, too.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from pagewise_scheduler.core.memory.block_table import CachedPrefix
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.grouped import GroupedKVCacheManager
from pagewise_scheduler.replay.costs import llama_3_8b
from pagewise_scheduler.replay.report import summarise
from pagewise_scheduler.replay.simulation import replay_cache_only
from pagewise_shared.protocol import HOST
from tqdm import tqdm

from benchmarks.eviction.run import load
from benchmarks.layer_groups.models import BLOCK_SIZE, MODELS, Model, scheduler_of
from benchmarks.record import record_file, write_record

STEP_TOKENS = 2048
OUTPUT_TOKENS = 16
"""Most tokens of an answer: the prompt behind it has its text, but the trace does not say with which tokens."""
UNLIMITED = 8.0
"""Million tokens: more than all prompts and answers of the trace have, if shared tokens count once."""
Snapshots = Literal["all", "ends and junctions", "ends"]


def create(model: Model, num_bytes: int, host_bytes: int, *, grouped: bool) -> Scheduler:
    """A scheduler of an executor with so much memory for KV on the device and in host memory."""
    unit = model.layout.page_bytes if grouped else BLOCK_SIZE * model.before
    return scheduler_of(
        model,
        num_bytes,
        STEP_TOKENS,
        grouped=grouped,
        kind=Scheduler,
        costs=llama_3_8b(BLOCK_SIZE).prefill,
        eviction="cost",
        tiers={HOST: host_bytes // unit},
        recovery="swap",
    )


def bytes_for(model: Model, num_tokens: int) -> int:
    """The bytes in which the longest sequence has ``num_tokens`` tokens, in groups of layers."""
    return create(model, num_tokens * model.before, 0, grouped=True).kv.room_for(num_tokens) * model.layout.page_bytes


def take_fewer(kv: GroupedKVCacheManager, snapshots: Snapshots) -> None:
    """Let sequences begin at the exact ends of prompts and answers alone, or where prompts leave a path, too."""
    begin_with = kv.begin_with

    def begin(cache_salt: str | None, blocks: list[CachedBlock], rest: bytes) -> CachedPrefix:
        prefix = begin_with(cache_salt, blocks, rest)
        prefix.junction = prefix.junction if snapshots == "ends and junctions" else 0
        return prefix

    kv.begin_with = begin  # type: ignore[method-assign]
    for group in kv.windows:
        group.margin = 0


def hit_rate(scheduler: Scheduler, num_requests: int, snapshots: Snapshots = "all") -> float:
    """The share of the trace's blocks that were cached."""
    if snapshots != "all":
        assert isinstance(scheduler.kv, GroupedKVCacheManager)
        take_fewer(scheduler.kv, snapshots)
    requests = load("agentic")[:num_requests]
    trace = [replace(one, num_output_tokens=min(one.num_output_tokens, OUTPUT_TOKENS)) for one in requests]
    outcome = replay_cache_only(scheduler, trace, lambda index: None)
    report = summarise(outcome, [scheduler], slo_first_token=1.0, slo_per_token=1.0)
    rate: float = report["hit_rate"]["of_trace_blocks"]
    return rate


def compare(model: Model, millions: float, host_millions: float, num_requests: int) -> dict[str, Any]:
    """Replay the trace in one size of memory."""
    num_tokens = int(millions * 1e6)
    sizes = num_tokens * model.before, int(host_millions * 1e6) * model.before
    rates = {
        name: hit_rate(create(model, *sizes, grouped=name == "groups"), num_requests)
        for name in ("full tables", "groups")
    }
    row = {"million_tokens": millions, "gib": _gib(sizes[0])}
    if host_millions:
        row |= {"million_tokens_in_host": host_millions, "gib_of_host": _gib(sizes[1])}
    elif millions < UNLIMITED:
        few = bytes_for(model, num_tokens)
        rates["groups, same tokens"] = hit_rate(create(model, few, 0, grouped=True), num_requests)
        row["gib_of_groups_with_same_tokens"] = _gib(few)
    else:
        fewer: Sequence[Snapshots] = ("ends", "ends and junctions")
        for snapshots in fewer:
            rates[f"groups, snapshots at {snapshots}"] = hit_rate(
                create(model, *sizes, grouped=True), num_requests, snapshots
            )
    return row | {"hit_rate": rates}


def _gib(num_bytes: int) -> float:
    return round(num_bytes / 2**30, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["Gemma 3 27B"])
    parser.add_argument("--millions", type=float, nargs="*", default=[0.1, 0.2, UNLIMITED], help="of tokens")
    parser.add_argument(
        "--host", type=float, nargs=2, default=[0.1, 0.4], help="of tokens on the device and in the host"
    )
    parser.add_argument("--requests", type=int, default=843, help="the first of the trace (default: all)")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    sizes = [*((millions, 0.0) for millions in args.millions), tuple(args.host)]
    cases = [(name, *size) for name in args.models for size in sizes]
    for name, millions, host in tqdm(cases, desc="replaying", unit=" sizes", disable=None):
        rows.append({"model": name} | compare(MODELS[name], millions, host, args.requests))
        print(rows[-1])
    if args.json:
        numbers = {"step_tokens": STEP_TOKENS, "output_tokens": OUTPUT_TOKENS, "requests": args.requests, "rows": rows}
        write_record(args.json, numbers, clock="virtual")


if __name__ == "__main__":
    main()
