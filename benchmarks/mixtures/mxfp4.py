"""The experts of a layer of gpt-oss on the CPU: in MXFP4 by the operation in C, beside transformers' in float32.

    python -m benchmarks.mixtures.mxfp4 [--json FILE]

The sizes are as in gpt-oss-20b, with 8 experts instead of 32, because they take 0.8 GB in float32. The contenders
take turns in a process. Every number is the median of the rounds, in CPU milliseconds of the process. Other work on the
machine makes them larger, so only ratios of one run are compared.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from pagewise_kernels.cpu.mxfp4_experts import PackedMxfp4Experts
from pagewise_kernels.mxfp4 import BLOCK, Mxfp4Weights
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from benchmarks.record import record_file, write_record

EXPERTS, TOP_K, HIDDEN = 8, 4, 2880
TOKENS = (1, 4, 16, 64, 256)
Sums = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def drawn(outs: int) -> Mxfp4Weights:
    """Return random weights."""
    blocks = torch.randint(256, (EXPERTS, outs, HIDDEN // BLOCK, BLOCK // 2), dtype=torch.uint8)
    scales = torch.randint(116, 122, (EXPERTS, outs, HIDDEN // BLOCK), dtype=torch.uint8)
    return Mxfp4Weights(blocks, scales, torch.randn(EXPERTS, outs) / 10)


def contenders() -> dict[str, Sums]:
    """Return the contenders, which compute the same experts, by name."""
    gate_up, down = drawn(2 * HIDDEN), drawn(HIDDEN)
    found: dict[str, Sums] = {"MXFP4 in C": PackedMxfp4Experts(gate_up, down, 7.0, 1.702).sums}
    values = {
        name: torch.stack([weights.dequantised(expert, torch.float32).t() for expert in range(EXPERTS)])
        for name, weights in (("gate_up_proj", gate_up), ("down_proj", down))
    } | {"gate_up_proj_bias": gate_up.bias, "down_proj_bias": down.bias}
    for implementation in ("eager", "grouped_mm"):
        config = GptOssConfig(
            hidden_size=HIDDEN, intermediate_size=HIDDEN, num_local_experts=EXPERTS,
            experts_implementation=implementation,  # type: ignore[call-arg] # which it takes
        )  # fmt: skip
        with torch.device("meta"):
            experts: Any = GptOssExperts(config)  # type: ignore[no-untyped-call]
        experts.load_state_dict(values, assign=True)
        found[f"float32, {implementation}"] = experts
    return found


@torch.inference_mode()
def compare(rounds: int, tokens: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return a row for each number of tokens and contender: the median CPU-ms of a layer's experts."""
    seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
    sums = contenders()
    for turn in range(rounds + 1):
        for count in tokens:
            x, chosen = torch.randn(count, HIDDEN), torch.rand(count, EXPERTS).argsort(1)[:, :TOP_K]
            weights = torch.rand(count, TOP_K)
            for name, call in sums.items():
                began = time.process_time()
                call(x, chosen, weights)
                if turn:  # the first one warms up
                    seconds[count, name].append(time.process_time() - began)
    return [
        {"tokens": count, "name": name, "cpu_ms": round(1e3 * statistics.median(found), 2)}
        for (count, name), found in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = compare(args.rounds, TOKENS)
    for row in rows:
        print(f"{row['tokens']:>4} {row['name']:>22} {row['cpu_ms']:>9.2f} CPU-ms")
    if args.json:
        write_record(args.json, {"rows": rows}, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
