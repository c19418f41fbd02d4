"""The linear layers of decoder layers on the CPU: weights in four bits, in eight, and in float32 by PyTorch.

    python -m benchmarks.int4.run [--threads N] [--json FILE]

The sizes are those of Llama 3.2 1B, in as many layers as no cache holds. The contenders take turns in a process; a turn
is all layers once. Every number is a median of the rounds, and every ratio the median of the rounds' ratios. CPU time
is the process's. Other work on the machine makes times larger, so only ratios of one run are compared.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pagewise_kernels.cpu.linear_int4 import Int4Weight
from pagewise_kernels.cpu.linear_int8 import Int8Weight
from torch import nn

from benchmarks.record import record_file, write_record

SIZES = {"qkv": (3072, 2048), "out": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192)}
"""Outputs and inputs."""
LAYERS, GROUP = 3, 64
ROWS = (1, 4, 16, 64)
Products = list[tuple[int, Callable[[torch.Tensor], torch.Tensor]]]
"""Inputs of each linear layer, and its product."""


def _in_four_bits(outs: int, ins: int, *, zeros: bool) -> Int4Weight:
    codes = torch.randint(16, (outs, ins), dtype=torch.uint8)
    scales = torch.rand(outs, ins // GROUP) / 100
    given = torch.randint(16, scales.shape, dtype=torch.uint8) if zeros else None
    return Int4Weight(codes, scales, given, torch.arange(ins) // GROUP)


def contenders() -> dict[str, Products]:
    """Return the linear layers of each contender, by its name."""
    found: dict[str, Products] = {name: [] for name in ("float32, PyTorch", "int8")}
    found |= {name: [] for name in ("int4", "int4, zeros", "int4, zeros, exact inputs")}
    for outs, ins in LAYERS * list(SIZES.values()):
        weight = torch.randn(outs, ins) / 100
        plain, zeros = _in_four_bits(outs, ins, zeros=False), _in_four_bits(outs, ins, zeros=True)
        found["float32, PyTorch"].append((ins, partial(nn.functional.linear, weight=weight)))
        found["int8"].append((ins, Int8Weight(weight).linear))
        found["int4"].append((ins, plain.linear))
        found["int4, zeros"].append((ins, zeros.linear))
        found["int4, zeros, exact inputs"].append((ins, partial(zeros.linear, exact=True)))
    return found


@torch.inference_mode()
def compare(rounds: int, all_rows: list[int]) -> list[dict[str, Any]]:
    """Return for each number of rows and contender the median CPU-ms and ms of a layer, and how often int8 takes it."""
    made, numbers = contenders(), []
    for rows in all_rows:
        x = {ins: torch.randn(rows, ins) for _, ins in SIZES.values()}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
        for turn in range(rounds + 1):
            for name, products in made.items():
                began, cpu = time.perf_counter(), time.process_time()
                for ins, product in products:
                    product(x[ins])
                took = time.process_time() - cpu, time.perf_counter() - began
                if turn:  # the first one warms up
                    times[name].append(took)
        for name, found in times.items():
            pairs = zip(times["int8"], found, strict=True)
            of_int8 = [(other[0] / own[0], other[1] / own[1]) for other, own in pairs]
            row: dict[str, Any] = {"rows": rows, "weights": name}
            for at, unit in enumerate(("cpu_ms", "ms")):
                row[unit] = round(1e3 / LAYERS * statistics.median(each[at] for each in found), 3)
                row[f"int8_{unit}_ratio"] = round(statistics.median(each[at] for each in of_int8), 3)
            numbers.append(row)
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    numbers = compare(args.rounds, args.rows)
    for row in numbers:
        print(
            f"{row['rows']:>3} rows, {row['weights']:<26} {row['cpu_ms']:>8.2f} CPU-ms, {row['ms']:>8.2f} ms of a "
            f"layer; int8 takes {row['int8_cpu_ms_ratio']:.2f} times its CPU time, {row['int8_ms_ratio']:.2f} its time"
        )
    if args.json:
        write_record(args.json, {"threads": args.threads, "rows": numbers})


if __name__ == "__main__":
    main()
