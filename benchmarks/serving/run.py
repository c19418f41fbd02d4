"""Serving throughput and latency beside other engines, on the same requests in the same run.

    python -m benchmarks.serving.run                        # 32 requests of unequal lengths, then of equal lengths
    python -m benchmarks.serving.run --workloads short outputs prefix --requests 16 \\
        --contenders pagewise openvino-genai openvino-genai-prefix-cache generate --beside nothing busy --rounds 5
    python -m benchmarks.serving.run --contenders "pagewise:--kernels torch" http://localhost:8001#4711

Contenders: ``pagewise`` (``pagewise serve`` in its own processes, driven over HTTP; options after a colon),
``generate`` and ``generate_batch`` (transformers' static batch, padded to the longest, and its continuous batching),
``openvino-genai`` with or without its prefix cache, ``openvino-genai-int4``, ``llama-cpp-q4_0`` and
``llama-cpp-q4_k_m`` (of up to 16 requests), and any OpenAI-compatible server by its URL. Engines other than
servers run without HTTP, each in a process of its own. They take turns, every round has new prompts, also beside a busy
process, and every number is a median over the rounds. Useful tokens are the requested ones; CPU seconds are user
plus system time of all processes that serve, without loading. ``--beside busy``: a process that never rests keeps the
last CPU busy meanwhile.
"""

import argparse
import contextlib
import statistics
import tempfile
from collections import defaultdict
from itertools import product
from pathlib import Path

from tqdm import tqdm

from benchmarks.busy import busy_processes
from benchmarks.record import record_file, write_record
from benchmarks.serving.clients import percentile
from benchmarks.serving.contenders import Contender, Round, contender
from benchmarks.serving.workloads import SHAPES, WORKLOADS, Work, build_model, earlier, workload

Row = dict[str, float | None]


def compare(args: argparse.Namespace, model_path: str) -> list[dict[str, object]]:
    """Run every workload, beside nothing or a busy process, as ``--beside`` asks, on all contenders in turns."""
    contenders: dict[str, Contender] = {}
    rounds: dict[tuple[str, str, str], list[tuple[int, Round]]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        for name in args.contenders:
            contenders[name] = contender(name, model_path, args.device, args.dtype, args.url_model)
            stack.callback(contenders[name].close)
        turns = list(product(args.workloads, args.beside, range(args.rounds)))
        for workload_name, beside, number in tqdm(turns, desc="measuring", unit=" rounds", disable=None):
            works = workload(workload_name, args.requests, args.seed + number, beside)
            for name, one in contenders.items():
                if before := earlier(workload_name, works):
                    one.round(before, None, number)
                taken = _round(one, works, args, number, beside)
                rounds[workload_name, beside, name].append((sum(work.output for work in works), taken))
        starts = {name: one.start_seconds for name, one in contenders.items()}
    return [
        {
            "workload": workload_name,
            "beside": beside,
            "requests": args.requests,
            "rows": {name: _row(rounds[workload_name, beside, name], starts[name]) for name in args.contenders},
        }
        for workload_name in args.workloads
        for beside in args.beside
    ]


def _round(one: Contender, works: list[Work], args: argparse.Namespace, number: int, beside: str) -> Round:
    with busy_processes(1, on_last_cpu=True) if beside == "busy" else contextlib.nullcontext():
        return one.round(works, args.rate, number)


def _row(rounds: list[tuple[int, Round]], start_seconds: float | None) -> Row:
    """Medians over the rounds, each with the number of its useful tokens."""
    row: Row = {
        "useful_tokens_per_second": round(statistics.median(useful / one.seconds for useful, one in rounds), 1),
        "useful_tokens_per_cpu_second": None,
        "start_seconds": None if start_seconds is None else round(start_seconds, 1),
    }
    rates = [useful / one.cpu_seconds for useful, one in rounds if one.cpu_seconds]
    if rates:
        row["useful_tokens_per_cpu_second"] = round(statistics.median(rates), 1)
    for metric, values in (
        ("ttft", [value for _, one in rounds for value in one.first_token]),
        ("itl", [value for _, one in rounds for value in one.between_tokens]),
    ):
        if values:
            row |= {f"{metric}_p{p}_ms": round(percentile(values, p / 100) * 1e3, 1) for p in (50, 90, 99)}
    return row


def report(results: list[dict[str, object]]) -> None:
    """Print a table for each workload: rates, and the first contender's rate over each contender's."""
    for result in results:
        rows: dict[str, Row] = result["rows"]  # type: ignore[assignment]
        first = next(iter(rows))
        beside = "" if result["beside"] == "nothing" else ", beside a busy process"
        print(f"\n{result['workload']}: {WORKLOADS[str(result['workload'])]}; {result['requests']} requests{beside}")
        width = max(map(len, rows))
        print(f"{'':>{width}} {'tok/s':>9} {'tok/CPU-s':>10}   {first} is")
        for name, row in rows.items():
            ratios = [
                f"{ours / theirs:.2f}x" if (ours := rows[first][rate]) and (theirs := row[rate]) else ""
                for rate in ("useful_tokens_per_second", "useful_tokens_per_cpu_second")
            ]
            cpu = row["useful_tokens_per_cpu_second"]
            print(
                f"{name:>{width}} {row['useful_tokens_per_second']:>9} {'' if cpu is None else cpu:>10}   "
                + " / ".join(ratios)
            )
        for name, row in rows.items():
            latency = {key: value for key, value in row.items() if key.endswith("_ms")}
            if latency:
                print(f"   {name}, ms: " + ", ".join(f"{key[:-3]} {value}" for key, value in latency.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="model directory (default: a random model of --shape)")
    parser.add_argument("--shape", default="49m", choices=SHAPES, help="of the random model")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rate", type=float, help="requests per second to servers, Poisson (default: all at once)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workloads", nargs="+", default=["unequal", "equal"], choices=WORKLOADS)
    parser.add_argument("--contenders", nargs="+", default=["pagewise", "generate", "generate_batch"])
    parser.add_argument("--url-model", help="the name by which servers at URLs know the model")
    parser.add_argument("--beside", nargs="+", default=["nothing"], choices=["nothing", "busy"])
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if args.model is None:
            build_model(Path(directory), shape=args.shape)
        results = compare(args, args.model or directory)
    report(results)
    if args.json:
        write_record(args.json, {"results": results}, device=args.device, dtype=args.dtype)


if __name__ == "__main__":
    main()
