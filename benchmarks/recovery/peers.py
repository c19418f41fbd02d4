"""How long KV takes to come from another executor: fetched, computed again, both at once, or as the cost model chooses.

    python -m benchmarks.recovery.peers [--json FILE]

Two real CPU executors, each behind the real scheduler core, in one process; blocks go between them over ZeroMQ on
loopback. One has computed a prompt, the other is asked for it: measured is the time from the request to its first
token, all methods side by side.
"""

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from pagewise_executor.tiers.peers import Peers
from pagewise_executor.tiers.tier import Tier
from pagewise_scheduler.core.tiers.peer import Peer, PrefixDirectory

from benchmarks.record import record_file, write_record
from benchmarks.recovery.run import MODES, Bench, build_model, prompt_of, timed


def on_loopback(tiers: Mapping[int, Tier], bytes_per_block: int) -> Peers:
    return Peers(tiers, bytes_per_block, "tcp://127.0.0.1:*", "127.0.0.1")


def measure(path: Path, tokens: int, repeats: int) -> dict[str, Any]:
    """Median milliseconds to the first token by mode, and the choice of auto."""
    directory = PrefixDirectory()
    holder, fetcher = (Bench(path, None, tokens, on_loopback) for _ in range(2))
    for bench in (holder, fetcher):
        info = bench.runner.info
        own = Peer(info.block_endpoint, info.block_format, bench.scheduler, lambda: None)
        bench.scheduler.recoveries.planner.join(directory, own)
    prompt = prompt_of(tokens)
    holder.first_token(prompt, "cold")
    row, _ = timed(fetcher, prompt, repeats, f"{tokens} tokens")
    for bench in (holder, fetcher):
        bench.runner.close()
    median = row["median_ms"]
    size = fetcher.runner.info.bytes_per_block
    return row | {
        "tokens": tokens,
        "recompute_over_fetch": round(median["recompute"] / median["swap"], 2),
        "fetched_GB_per_s": round(size * ((tokens - 1) // 16) / median["swap"] / 1e6, 2),
        "bytes_per_token": size // 16,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    print(f"{'tokens':>8}" + "".join(f"{mode + ' ms':>14}" for mode in MODES) + f"{'auto chose':>12}{'auto/best':>11}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        build_model(Path(folder), max(args.tokens) + 64)
        for tokens in args.tokens:
            rows.append(row := measure(Path(folder), tokens, args.repeats))
            values = "".join(f"{row['median_ms'][mode]:>14}" for mode in MODES)
            print(f"{tokens:>8}{values}{row['auto_chose']:>12}{row['auto_over_best']:>11}", flush=True)
    if args.json:
        write_record(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
