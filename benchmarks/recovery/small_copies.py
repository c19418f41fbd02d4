"""How long KV takes to come back from tiers in fewer bits: ``--tier-dtype`` beside exact copies, in turns.

    python -m benchmarks.recovery.small_copies [--links 1 3 10] [--json FILE]

As ``benchmarks.recovery.run``: the real scheduler core in front of the real CPU executor, and a link to the host that
is held to a bandwidth, which smaller copies cross in less time. The disk is the one of this machine; its files are read
without the page cache. ``predicted_ms`` of the disk is no measurement: the bytes of the copies at the speed of a link,
and the measured time to convert the numbers to the type of the pool.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import transformers
from pagewise_kernels.cpu.small_blocks import SmallBlocks
from pagewise_scheduler.core.tiers.recovery_plan import RecoveryMode
from pagewise_shared.protocol import DEVICE, Copied, Message

from benchmarks.record import record_file, write_record
from benchmarks.recovery.run import Bench, build_model, prompt_of

_TYPES = ("auto", "int8", "int4")
_RECOMPUTED = 1
_HEAD_DIM = 32  # of the model of ``build_model``


class _Timed(Bench):
    """A bench that adds up the seconds of all lists of copies to the device."""

    copying = 0.0

    def _report(self, message: Message) -> None:
        if isinstance(message, Copied) and message.target == DEVICE:
            self.copying += message.elapsed_us * 1e-6
        super()._report(message)


def _in_turns(benches: dict[str, _Timed], tokens: int, repeats: int) -> dict[str, dict[str, float]]:
    """Return the median and the least milliseconds to the first token of a prompt that comes back, by type, and
    computed again, which is repeated less often; and of these the least in which the copies were made. Other work on
    the machine makes all of them larger."""
    prompt = prompt_of(tokens)
    for bench in benches.values():
        bench.first_token(prompt, "cold")
        bench.write_all()
    ways: list[tuple[str, str, RecoveryMode]] = [(kind, kind, "swap") for kind in benches]
    ways.append(("recomputed", "auto", "recompute"))
    times: dict[str, list[float]] = {name: [] for name, _, _ in ways}
    copying: dict[str, list[float]] = {kind: [] for kind in benches}
    for repeat in range(repeats + 1):
        for name, kind, mode in ways:
            if mode == "recompute" and repeat > _RECOMPUTED:
                continue
            bench = benches[kind]
            bench.push_out()
            bench.copying = 0.0
            bench.scheduler.recoveries.planner.policy.mode = mode
            took = bench.first_token(prompt, f"{name}{repeat}")
            if repeat:  # the first round stores the blocks that are in no lower tier yet
                times[name].append(took)
                if mode == "swap":
                    copying[kind].append(bench.copying)
    return {
        "median_ms": {name: round(statistics.median(values) * 1e3, 2) for name, values in times.items()},
        "least_ms": {name: round(min(values) * 1e3, 2) for name, values in times.items()},
        "least_copying_ms": {name: round(min(values) * 1e3, 2) for name, values in copying.items()},
    }


def _bytes_of_block(bench: Bench, kind: str) -> int:
    exact = bench.runner.info.bytes_per_block
    return exact if kind == "auto" else _small(exact, kind).num_bytes


def _small(exact: int, kind: str) -> SmallBlocks:
    return SmallBlocks(exact, _HEAD_DIM, torch.float32, 8 if kind == "int8" else 4)


def _widening(exact: int, kind: str, blocks: int = 64) -> float:
    """Return the milliseconds in which a block becomes as wide as in the pool, by CPU time; 0 for exact copies."""
    if kind == "auto":
        return 0.0
    found = _small(exact, kind)
    rows = np.random.default_rng(1).standard_normal((blocks, exact // 4), np.float32).view(np.uint8)
    small, times = np.zeros((blocks, found.num_bytes), np.uint8), []
    found.shrink(rows, small)
    for _ in range(7):
        began = perf_counter()
        found.widen(small, rows)
        times.append((perf_counter() - began) / blocks * 1e3)
    return statistics.median(times)


def _chosen(path: Path, bandwidth: float | None, tokens: int, kind: str, options: dict[str, Any]) -> str:
    """Return the type of the copies that an executor chooses by the times which it measures when it starts."""
    bench = _Timed(path, bandwidth, tokens, tier_dtype=f"auto:{kind}", **options)
    bench.runner.close()
    return bench.runner.info.tiers[0].dtype or "exact"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048, help="length of the prompt that comes back")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--links", type=float, nargs="+", default=[1, 3, 10], help="GB/s")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        build_model(path, args.tokens + 64)
        for link in [*args.links, None]:
            benches: dict[str, _Timed] = {}
            options: dict[str, Any] = {"disk_cache": str(path / "disk")} if link is None else {}
            bandwidth = link * 1e9 if link is not None else None
            chosen = {kind: _chosen(path, bandwidth, args.tokens, kind, options) for kind in _TYPES[1:]}
            for kind in _TYPES:
                benches[kind] = _Timed(path, bandwidth, args.tokens, tier_dtype=kind, **options)
            sizes = {kind: _bytes_of_block(bench, kind) for kind, bench in benches.items()}
            row: dict[str, Any] = {
                "tier": "disk" if link is None else "host",
                "link_GB_per_s": link,
                "chosen": chosen,
                **_in_turns(benches, args.tokens, args.repeats),
                "bytes_per_token": {kind: size // 16 for kind, size in sizes.items()},
                "tokens_per_GiB": {
                    kind: 2**30 * 16 // (bench.runner.info.tiers[0].block_bytes or sizes[kind])
                    for kind, bench in benches.items()
                },
            }
            if link is None:
                widened = {kind: _widening(sizes["auto"], kind) for kind in _TYPES}
                row["widening_us_of_block"] = {kind: round(took * 1e3, 1) for kind, took in widened.items()}
                row["predicted_ms"] = {
                    f"{speed:g} GB/s": {
                        kind: round(args.tokens / 16 * (sizes[kind] / speed / 1e6 + widened[kind]), 2)
                        for kind in _TYPES
                    }
                    for speed in args.links
                }
            for bench in benches.values():
                bench.runner.close()
            rows.append(row)
            print(row, flush=True)
    if args.json:
        write_record(args.json, {"tokens": args.tokens, "rows": rows})


if __name__ == "__main__":
    main()
