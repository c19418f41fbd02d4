"""How long KV takes to come back from pinned host memory to a GPU: loaded, computed again, both at once, or by choice.

    python -m benchmarks.recovery.device [--tokens 256 1024 ...] [--json FILE]

The shape of Qwen3-0.6B with random weights, over the real link. See ``benchmarks.recovery.run``, which does the same on
the CPU with links held to given bandwidths. ``--smoke``: a small model on the CPU, to see that all works.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.run import build
from benchmarks.record import record_file, write_record
from benchmarks.recovery.run import HEADER, Bench, build_model, measure, shown


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 4096, 16_384, 32_768])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="a small model on the CPU, once: does everything run?")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        parser.error("there is no GPU here: only --smoke makes sense")
    tokens, repeats = ([128], 1) if args.smoke else (args.tokens, args.repeats)
    options: dict[str, Any] = {"host_memory": "64MiB", "budget": 64}
    if not args.smoke:
        options = {
            "device": "cuda",
            "host_memory": "16GiB",
            "budget": 8192,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 8192,
        }
    rows: list[dict[str, Any]] = []
    device = "cpu" if args.smoke else torch.cuda.get_device_name()
    print(f"{'tokens':>10}{HEADER}")
    with tempfile.TemporaryDirectory() as directory:
        if args.smoke:
            build_model(Path(directory), max(tokens) + 64)
        else:
            build("qwen3-0.6b", Path(directory), "cuda")
        # One start for all lengths, and the longest first: it compiles the kernels of the others.
        bench = Bench(Path(directory), None, max(tokens), **options)
        for number in sorted(tokens, reverse=True):
            row = {"tokens": number} | measure(bench, number, repeats, f"{number} tokens")
            rows.append(row)
            print(f"{number:>10}{shown(row)}", flush=True)
            if args.json:
                write_record(args.json, {"rows": rows}, device=device, torch=torch.__version__)


if __name__ == "__main__":
    main()
