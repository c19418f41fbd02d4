"""Decode of a small mixture of experts on the CPU: Pagewise beside transformers with its loop over experts and without.

    python -m benchmarks.mixtures.run [--json FILE]

A Qwen3-MoE of 4 layers in float32. A layer has 64 experts of 96, and a token takes 8 of them. The contenders share a
process, its threads and the weights, and they decode the same numbers of tokens in turns. Every number is the median of
the rounds, in CPU milliseconds of the process. Other work on the machine makes them larger, so only ratios of one run
are compared.
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from pagewise_executor.attention.registry import Kernels
from pagewise_executor.model_runner import ModelRunner
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import NewSequence, StepPlan, Welcome, pack_int32s
from pagewise_shared.sampling import SamplingParams
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.record import record_file, write_record

CONTEXT, STEPS, BLOCK_SIZE = 64, 8, 16
BATCHES = (1, 4, 16, 64)
LOOP = "transformers eager"
_BLOCKS = -(-(CONTEXT + STEPS + 2) // BLOCK_SIZE)
"""Of a sequence."""


def build_mixture(path: Path) -> None:
    """Write the model, with random weights."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, moe_intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, num_experts=64, num_experts_per_tok=8,
        norm_topk_prob=True, max_position_embeddings=512, eos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(path)  # type: ignore[no-untyped-call]


def pagewise(path: Path, kernels: Kernels) -> Callable[[int], float]:
    """Return a function from a batch to the CPU seconds of one of its decode steps."""
    settings = ExecutorConfig(
        model=str(path), device="cpu", dtype="float32", kernels=kernels, num_blocks=max(BATCHES) * _BLOCKS + 1,
        block_size=BLOCK_SIZE, max_num_seqs=max(BATCHES), profile=False, threads=torch.get_num_threads(),
    )  # fmt: skip
    runner = ModelRunner(settings)

    def decode(batch: int) -> float:
        runner.reset(Welcome(0, max(BATCHES), max(BATCHES) * CONTEXT))
        joined = tuple(
            NewSequence(
                row, pack_int32s([(7 * i + row) % 500 for i in range(CONTEXT)]), CONTEXT, 0,
                np.arange(row * _BLOCKS, (row + 1) * _BLOCKS, dtype=np.int32).tobytes(),
                SamplingParams(temperature=0.0),
            )
            for row in range(batch)
        )  # fmt: skip
        chunks = tuple((row, CONTEXT) for row in range(batch))
        runner.execute(StepPlan(0, 1, joined=joined, chunks=chunks)).result()
        runner.execute(StepPlan(0, 2)).result()
        began = time.process_time()
        for step in range(STEPS):
            runner.execute(StepPlan(0, 3 + step)).result()
        return (time.process_time() - began) / STEPS

    return decode


def transformers(path: Path, experts: str) -> Callable[[int], float]:
    """Return such a function for transformers' modules with an ``experts_implementation``."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, experts_implementation=experts)
    model.eval()

    @torch.inference_mode()
    def decode(batch: int) -> float:
        prompts = torch.tensor([[(7 * i + row) % 500 for i in range(CONTEXT)] for row in range(batch)])
        out: Any = model(prompts, use_cache=True, logits_to_keep=1)
        out = model(out.logits.argmax(-1), past_key_values=out.past_key_values)
        began = time.process_time()
        for _ in range(STEPS):
            out = model(out.logits.argmax(-1), past_key_values=out.past_key_values)
        return (time.process_time() - began) / STEPS

    return decode


def compare(rounds: int, kernels: list[Kernels], batches: list[int]) -> list[dict[str, Any]]:
    """Return a row for each batch and contender: the median CPU-ms of a step, and its speed relative to the loop."""
    with tempfile.TemporaryDirectory() as folder:
        build_mixture(Path(folder))
        contenders = {f"pagewise {one}": pagewise(Path(folder), one) for one in kernels}
        contenders |= {f"transformers {one}": transformers(Path(folder), one) for one in ("eager", "grouped_mm")}
        seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
        for turn in range(rounds + 1):
            for batch in batches:
                for name, decode in contenders.items():
                    took = decode(batch)
                    if turn:  # the first one warms up
                        seconds[batch, name].append(took)
    medians = {key: statistics.median(found) for key, found in seconds.items()}
    return [
        {
            "batch": batch,
            "name": name,
            "cpu_ms": round(1e3 * median, 2),
            "times_the_loop": round(medians[batch, LOOP] / median, 2),
        }
        for (batch, name), median in medians.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", nargs="+", default=["cpu", "torch"], choices=get_args(Kernels))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES), choices=BATCHES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    rows = compare(args.rounds, args.kernels, args.batches)
    for row in rows:
        ratio = f"{row['times_the_loop']:>5.2f} times the loop"
        print(f"{row['batch']:>4} {row['name']:>24} {row['cpu_ms']:>8.2f} CPU-ms, {ratio}")
    if args.json:
        write_record(args.json, {"rows": rows}, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
