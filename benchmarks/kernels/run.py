"""Kernels against the ceilings of the device, and against peers that are installed.

    python -m benchmarks.kernels.run [--only TEXT] [--json FILE]

Bandwidth is compared with a copy and arithmetic with a bfloat16 matrix product, both measured in the same run. Medians
of CUDA-graph replays, so that launching does not count; small cases stay in the caches for all contenders alike. Peers:
FlashInfer, PyTorch's scaled dot product and flex attention where they are there. ``--smoke`` runs tiny shapes once, in
Triton's interpreter too, to see that everything works.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch

from benchmarks.kernels.attention import decode, prefill, shared, sweep
from benchmarks.kernels.bench import Bench
from benchmarks.kernels.elementwise import elementwise, inputs, linears
from benchmarks.kernels.experts import experts
from benchmarks.kernels.few_rows import few_rows
from benchmarks.kernels.layer import layer
from benchmarks.kernels.recurrent import recurrent
from benchmarks.kernels.sampling import sampling
from benchmarks.record import record_file, write_record


def groups() -> Iterator[tuple[str, Callable[[Bench], None]]]:
    yield from (("decode", decode), ("shared", shared), ("prefill", prefill), ("sweep", sweep))
    yield from (("elementwise", elementwise), ("linear", linears), ("inputs", inputs), ("sampling", sampling))
    yield from (("linear-of-few-rows", few_rows), ("experts", experts), ("layer", layer))
    yield "recurrent", recurrent


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="groups or cases whose name contains this")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, once: does everything run?")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.smoke:
        parser.error("there is no GPU here: only --smoke makes sense")
    bench = Bench(device, args.smoke, args.only)
    bench.ceilings()
    if args.json:
        bench.added = lambda: save(args.json, bench)
    for name, run in groups():
        if not args.only or args.only in name or name in args.only:
            run(bench)


def save(path: str, bench: Bench) -> None:
    """Write the measurements so far."""
    name = torch.cuda.get_device_name() if bench.device.type == "cuda" else "cpu"
    ceilings = {"copy_gb_per_s": bench.copy_rate, "matmul_tflop_per_s": bench.matmul_rate}
    numbers = {"ceilings": ceilings, "rows": [asdict(row) for row in bench.rows]}
    write_record(path, numbers, device=name, torch=torch.__version__)


if __name__ == "__main__":
    main()
