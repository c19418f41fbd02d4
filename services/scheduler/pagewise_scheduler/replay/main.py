"""``pagewise replay``: runs a request trace through the scheduler under a virtual clock."""

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any, get_args

from pagewise_shared.config.options import EvictionName
from pagewise_shared.errors import ConfigError
from pagewise_shared.protocol import HOST
from tqdm import tqdm

from pagewise_scheduler.core.memory.use_history import UseHistory
from pagewise_scheduler.core.routing.policies import ROUTING_NAMES, make_routing
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.cost_model import Costs
from pagewise_scheduler.replay.belady import Belady
from pagewise_scheduler.replay.costs import llama_3_8b
from pagewise_scheduler.replay.report import summarise
from pagewise_scheduler.replay.simulation import Simulation, replay_cache_only
from pagewise_scheduler.replay.traces import TraceError, TraceRequest, read_trace

_UNITS = {"K": 1_000, "M": 1_000_000, "G": 1_000_000_000}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the process's exit code."""
    options = _parser().parse_args(argv)
    try:
        _check(options)
        trace = read_trace(options.trace, limit=options.limit, rate=options.rate, seed=options.seed)
        if not trace:
            raise TraceError(f"{options.trace}: it contains no requests")
        result = replay(trace, options)
    except (TraceError, ConfigError) as error:
        print(f"pagewise replay: {error}", file=sys.stderr)
        return 2
    text = json.dumps({"trace": options.trace.name} | result, indent=1)
    if options.json:
        options.json.write_text(text + "\n")
    print(text)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Check the options together before the replay begins.

    Raises:
        ConfigError: Belady's policy needs a known order of requests, several executors need a clock, or the result
            could not be written.
    """
    if options.eviction == "belady" and not options.cache_only:
        raise ConfigError("--eviction belady has to know the order in which requests run: add --cache-only")
    if options.cache_only and options.executors > 1:
        raise ConfigError("--cache-only replays one cache: --executors needs the clock")
    if options.json is not None and not options.json.parent.is_dir():
        raise ConfigError(f"{options.json}: there is no directory {options.json.parent}")


def replay(trace: list[TraceRequest], options: argparse.Namespace) -> dict[str, Any]:
    """Replay ``trace``, and return the report.

    Raises:
        ConfigError: the pool is too small for a block.
    """
    began = time.perf_counter()
    if options.cache_only:
        trace.sort(key=lambda request: request.recorded)
    belady = Belady(trace) if options.eviction == "belady" else None
    costs = llama_3_8b(options.block_size, options.link * 1e9, (options.peer_link or 1.0) * 1e9)
    costs = costs.times_as_fast(options.device_speed)
    schedulers = _schedulers(trace, options, costs.prefill, belady)
    progress = tqdm(total=len(trace), desc="replay", unit=" requests", leave=False, disable=None)

    def tick(index: int) -> None:
        progress.update()
        if belady is not None:
            belady.index = index

    with progress:
        if options.cache_only:
            outcome = replay_cache_only(schedulers[0], trace, tick)
        else:
            for request in trace:
                if request.after < 0:
                    request.arrival /= options.speed
            routing, peers = make_routing(options.routing), options.peer_link > 0
            outcome = Simulation(schedulers, costs, routing=routing, peers=peers, tick=tick).run(trace)
    summary = summarise(
        outcome, schedulers, slo_first_token=options.slo_first_token, slo_per_token=options.slo_per_token
    )
    if options.cache_only:  # without a clock, times mean nothing
        for name in ("virtual_seconds", "device_busy", "good_requests", "seconds", "routing"):
            del summary[name]
    settings = {name: value for name, value in vars(options).items() if name not in ("trace", "json")}
    return {"settings": settings} | summary | {"replayed_in_seconds": round(time.perf_counter() - began, 1)}


def _schedulers(
    trace: list[TraceRequest], options: argparse.Namespace, costs: Costs, belady: Belady | None
) -> list[Scheduler]:
    """The scheduler of each executor."""
    lengths = [request.num_prompt_tokens + request.num_output_tokens for request in trace]
    everything = sum(lengths) + 2 * options.block_size * len(trace)
    tokens = everything if options.kv_tokens == "all" else parse_tokens(options.kv_tokens)
    if tokens < options.block_size:
        raise ConfigError(f"--kv-tokens {options.kv_tokens} is less than a block of {options.block_size}")
    eviction = UseHistory() if options.eviction == "cost" else belady or options.eviction
    return [
        Scheduler(
            num_blocks=tokens // options.block_size,
            block_size=options.block_size,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=max(*lengths, 8192) if options.cache_only else options.max_num_batched_tokens,
            tiers={HOST: parse_tokens(options.host_tokens) // options.block_size},
            costs=costs,
            recovery=options.recovery,
            eviction=eviction,
        )
        for _ in range(options.executors)
    ]


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value


def _amount(text: str) -> float:
    value = float(text)
    if not 0 < value < inf:
        raise argparse.ArgumentTypeError("more than 0")
    return value


def _amount_or_none(text: str) -> float:
    return 0.0 if text == "0" else _amount(text)


def parse_tokens(text: str) -> int:
    """The number of tokens in a text such as ``3M`` or ``500K``.

    Raises:
        ConfigError: it is not a number of tokens.
    """
    unit = _UNITS.get(text[-1:].upper())
    try:
        amount = float(text if unit is None else text[:-1]) * (unit or 1)
    except ValueError:
        amount = -1.0
    if not 0 <= amount < 1e15:
        raise ConfigError(f"{text!r} is not a number of tokens: write 3000000, 500K or 3M")
    return int(amount)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagewise replay",
        description="Replay a request trace on the scheduler that serves, with a simulated executor and a virtual "
        "clock: a modelled Llama 3 8B on a modelled device. Prints JSON.",
    )
    parser.add_argument("trace", type=Path, help="Mooncake or agentic JSON lines, Azure or ShareGPT CSV; .gz too")
    fleet = parser.add_argument_group("executors")
    fleet.add_argument(
        "--executors", type=_count, default=1, metavar="N", help="executors, each with the memory below (default: 1)"
    )
    fleet.add_argument("--routing", choices=ROUTING_NAMES, default="ttft", help="where requests go (default: ttft)")
    fleet.add_argument(
        "--device-speed", type=_amount, default=1.0, metavar="X", help="device and links X times as fast (default: 1)"
    )
    fleet.add_argument(
        "--peer-link",
        type=_amount_or_none,
        default=10.0,
        metavar="GB/S",
        help="from other executors; 0: they do not fetch blocks from each other (default: 10)",
    )
    memory = parser.add_argument_group("memory")
    memory.add_argument(
        "--kv-tokens", default="1M", metavar="N", help="tokens the device holds, 3M, or all (default: 1M)"
    )
    memory.add_argument("--host-tokens", default="0", metavar="N", help="tokens the host holds (default: 0)")
    memory.add_argument("--block-size", type=_count, default=16, metavar="N", help="tokens per block (default: 16)")
    memory.add_argument(
        "--eviction",
        choices=(*get_args(EvictionName), "belady"),
        default="cost",
        help="what goes first (default: cost)",
    )
    memory.add_argument(
        "--recovery", choices=("auto", "swap", "recompute", "both"), default="auto", help="(default: auto)"
    )
    memory.add_argument("--link", type=_amount, default=50.0, metavar="GB/S", help="host link, each way (default: 50)")
    load = parser.add_argument_group("load")
    load.add_argument("--cache-only", action="store_true", help="one request at a time, in no time: the cache alone")
    load.add_argument("--limit", type=_count, metavar="N", help="first N requests only")
    load.add_argument(
        "--rate", type=_amount, default=1.0, metavar="R", help="requests per second, if the trace has no times"
    )
    load.add_argument("--speed", type=_amount, default=1.0, metavar="X", help="arrivals X times as fast (default: 1)")
    load.add_argument("--seed", type=int, default=0, help="of random arrivals (default: 0)")
    load.add_argument("--max-num-seqs", type=_count, default=256, metavar="N", help="(default: 256)")
    load.add_argument("--max-num-batched-tokens", type=_count, default=8192, metavar="N", help="(default: 8192)")
    out = parser.add_argument_group("output")
    out.add_argument("--slo-first-token", type=float, default=10.0, metavar="S", help="for goodput (default: 10)")
    out.add_argument("--slo-per-token", type=float, default=0.2, metavar="S", help="for goodput (default: 0.2)")
    out.add_argument("--json", type=Path, metavar="FILE", help="write the JSON there too")
    return parser


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    sys.exit(main())
