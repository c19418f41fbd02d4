"""Attention of a layer of Gemma 4 31B that sees all tokens, with K and V apart and as one vector.

The operations in C, on one thread, with the launches that put queries, K and V into order. CPU time, medians of pairs
that are computed in turns.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from pagewise_executor.attention.stored_once import StoredOnce
from pagewise_executor.kv.kv_pool import KVPool, KVShape
from pagewise_kernels.cpu.attention import CpuStep

from benchmarks.record import record_file, write_record

HEADS, KV_HEADS, HEAD_DIM, PAIRS, BLOCK_SIZE = 32, 4, 512, 64, 16
CASES = ((1, 4096, 1), (8, 4096, 1), (8, 512, 1), (1, 2048, 512))
"""Sequences, tokens of their contexts, and how many of them are new: one in decodes, more in a chunk of a prompt."""


def problem(num_sequences: int, context: int, new: int, dtype: torch.dtype) -> dict[str, Callable[[], torch.Tensor]]:
    """Both ways to attend with the new tokens of each sequence, in pools of random numbers."""
    generator = torch.Generator().manual_seed(0)
    blocks = -(-context // BLOCK_SIZE)
    table = torch.randperm(num_sequences * blocks, generator=generator).view(num_sequences, blocks).int().numpy()
    positions = np.arange(context - new, context)
    slots = (table[:, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE).ravel()
    rows = np.arange(num_sequences if new == 1 else 0)
    chunks = np.array([[0, 0, context - new, new]] * (new > 1), np.int64).reshape(-1, 4)
    step = CpuStep(slots, table, rows, np.full(len(rows), context), chunks, block_size=BLOCK_SIZE)
    apart, together = (_layer(shape, table.size, dtype) for shape in ((KV_HEADS, HEAD_DIM), (KV_HEADS, 640, 512, 512)))
    q, k, v = (
        torch.randn(len(slots), heads, HEAD_DIM, generator=generator).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    once = StoredOnce(torch.rand(HEAD_DIM, generator=generator).to(dtype) + 0.5, PAIRS)

    def one_vector() -> torch.Tensor:
        return once.values(step.attend(once.queries(q), *once.stored(k, v), together, scale=0.05))

    return {"apart": lambda: step.attend(q, k, v, apart, scale=0.05), "one vector": one_vector}


def _layer(shape: KVShape, num_blocks: int, dtype: torch.dtype) -> Any:
    pool = KVPool([shape], num_blocks, BLOCK_SIZE, dtype, torch.device("cpu"), layout="blocks")
    for part in pool.keys[0], pool.values[0]:
        part.normal_()
    return pool.layers[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for dtype in torch.float32, torch.bfloat16:
        for case in CASES:
            ways = problem(*case, dtype)
            taken: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(args.repeats + 1):
                for name, attend in ways.items():
                    start = time.process_time()
                    attend()
                    taken[name].append(1000 * (time.process_time() - start))
            pairs = list(zip(*(times[1:] for times in taken.values()), strict=True))  # the first runs touch memory
            row = {"dtype": str(dtype).removeprefix("torch."), "sequences": case[0], "context": case[1], "new": case[2]}
            row |= {name: round(median(times[1:]), 2) for name, times in taken.items()}
            rows.append(row | {"ratio": round(median(apart / one for apart, one in pairs), 2)})
            print(rows[-1], flush=True)
    if args.json:
        write_record(args.json, {"unit": "ms of CPU time", "repeats": args.repeats, "rows": rows}, threads=1)


if __name__ == "__main__":
    main()
