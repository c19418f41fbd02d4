"""The time of a model's step on the CPU: decodes, a prefill, and decodes that share a prefix, on several kernels.

    python -m benchmarks.cpu_steps.run
    python -m benchmarks.cpu_steps.run --kernels torch cpu cpu+int8 cpu+int4 cpu+bfloat16 --json FILE
    python -m benchmarks.cpu_steps.run --kernels torch torch+mmu cpu
    python -m benchmarks.cpu_steps.run --kernels cpu cpu+kv-int8 cpu+kv-int4 --cases "decode 4, 1k" "decode 4, 8k"

Each kind of kernels has a process of its own, which runs a Llama of 49M parameters on a model runner without a
scheduler. The processes take turns. CPU milliseconds are of the whole process; every number is the median and the least
of the rounds. Other work on the machine makes these numbers larger, so kernels are compared within one run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

from pagewise_shared.cpu_threads import wait_variables
from tqdm import tqdm

from benchmarks.record import record_file, write_record
from benchmarks.serving.workloads import build_model

BLOCK_SIZE = 16
STEPS = 24
NUM_BLOCKS = 2100
CASES = {
    "decode 1": (1, 192, 0),
    "decode 16": (16, 192, 0),
    "decode 32": (32, 192, 0),
    "decode 16, shared 512": (16, 560, 512),
    "decode 4, 1k": (4, 1024, 0),
    "decode 4, 8k": (4, 8192, 0),
    "prefill 512": (1, 512, 0),
    "prefill 2048": (1, 2048, 0),
}
"""Sequences, tokens in each context when measuring begins, and how many of them lie in shared blocks."""


def serve_cases(model: str, kernels: str, threads: int | None) -> None:
    """Answer each line of standard input, the name of a case, by CPU ms and ms of one step."""
    import numpy as np
    from pagewise_executor.model_runner import ModelRunner
    from pagewise_shared.config import ExecutorConfig
    from pagewise_shared.protocol import NewSequence, StepPlan, Welcome, pack_int32s
    from pagewise_shared.sampling import SamplingParams

    kernels, _, option = kernels.partition("+")
    config = ExecutorConfig(
        model=model,
        device="cpu",
        dtype="bfloat16" if option == "bfloat16" else "float32",
        kernels=kernels,  # type: ignore[arg-type]
        quantization=option if option in ("int8", "int4") else "none",  # type: ignore[arg-type]
        kv_mapping="mmu" if option == "mmu" else "table",
        kv_layout="blocks" if option == "mmu" else "layers",  # else there would be too many maps
        kv_dtype=option.removeprefix("kv-") if option.startswith("kv-") else "auto",  # type: ignore[arg-type]
        num_blocks=NUM_BLOCKS,
        max_num_seqs=32,
        profile=False,
        threads=threads or "auto",
        block_size=BLOCK_SIZE,
    )
    runner = ModelRunner(config)
    block_size = BLOCK_SIZE
    rng = np.random.default_rng(0)
    prompt = rng.integers(10, 4000, 8192).tolist()

    def run(sequences: int, context: int, shared: int, prefill: bool) -> tuple[float, float]:
        runner.reset(Welcome(0, max(32, sequences), 4096))
        # Blocks lie scattered, as they do after a while of serving.
        scattered = np.random.default_rng(1).permutation(NUM_BLOCKS).astype(np.int32)
        common = scattered[: shared // block_size]
        per_sequence = -(-(context + STEPS + 1 - shared) // block_size)
        own = scattered[shared // block_size :][: sequences * per_sequence].reshape(sequences, per_sequence)
        joined = tuple(
            NewSequence(
                row,
                pack_int32s([*prompt[: context - 1], 10 + row]),
                context,
                context - 1 if not prefill else 0,
                np.concatenate([common, own[row]]).tobytes(),
                SamplingParams(temperature=0.0),
            )
            for row in range(sequences)
        )
        chunks = tuple((row, context if prefill else 1) for row in range(sequences))
        if prefill:
            began, cpu = time.perf_counter(), time.process_time()
            runner.execute(StepPlan(0, 1, joined=joined, chunks=chunks)).result()
            return 1e3 * (time.process_time() - cpu), 1e3 * (time.perf_counter() - began)
        runner.execute(StepPlan(0, 1, joined=joined, chunks=chunks)).result()
        runner.execute(StepPlan(0, 2)).result()
        began, cpu = time.perf_counter(), time.process_time()
        for step in range(STEPS - 2):
            runner.execute(StepPlan(0, 3 + step)).result()
        per_step = 1e3 / (STEPS - 2)
        return per_step * (time.process_time() - cpu), per_step * (time.perf_counter() - began)

    run(2, 64, 0, False)
    print("ready", flush=True)
    for line in sys.stdin:
        sequences, context, shared = CASES[line.strip()]
        print(json.dumps(run(sequences, context, shared, line.startswith("prefill"))), flush=True)


class Contender:
    """The process of one kind of kernels."""

    def __init__(self, kernels: str, model: str, threads: int) -> None:
        command = [sys.executable, "-m", "benchmarks.cpu_steps.run", "--child", model, "--kernels", kernels]
        self._process = subprocess.Popen(
            [*command, "--threads", str(threads)],
            env=os.environ | wait_variables(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._line("ready")

    def _line(self, start: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(start):
                return line
        raise RuntimeError("a contender ended early")

    def run(self, case: str) -> tuple[float, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(case + "\n")
        self._process.stdin.flush()
        cpu, wall = json.loads(self._line("["))
        return cpu, wall

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def compare(kinds: list[str], cases: list[str], rounds: int, threads: int) -> list[dict[str, Any]]:
    runs: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        build_model(Path(folder), max_len=8192 + 2 * STEPS)
        contenders: dict[str, Contender] = {}
        try:
            for kind in kinds:
                contenders[kind] = Contender(kind, folder, threads)
            turns = list(product(range(rounds), cases, contenders.items()))
            for _, case, (kind, contender) in tqdm(turns, desc="measuring", unit=" runs", disable=None):
                runs[case, kind].append(contender.run(case))
        finally:
            for contender in contenders.values():
                contender.close()
    rows = []
    for (case, kind), found in runs.items():
        cpu, wall = ([run[i] for run in found] for i in (0, 1))
        row = {"case": case, "kernels": kind, "cpu_ms": statistics.median(cpu), "least_cpu_ms": min(cpu)}
        row |= {"ms": statistics.median(wall), "least_ms": min(wall)}
        rows.append({name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", nargs="+", default=["torch", "cpu"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0, help="threads of each process; 0: all cores")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        serve_cases(args.child, args.kernels[0], args.threads or None)
        return
    rows = compare(args.kernels, args.cases, args.rounds, args.threads)
    for row in rows:
        print(
            f"{row['case']:>22} {row['kernels']:>6} {row['cpu_ms']:>7.1f} CPU-ms (least {row['least_cpu_ms']:.1f}), "
            f"{row['ms']:>7.1f} ms (least {row['least_ms']:.1f})"
        )
    if args.json:
        write_record(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
