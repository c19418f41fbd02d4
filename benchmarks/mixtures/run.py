"""Decode of small mixtures of experts on the CPU: Pagewise beside transformers with its loop over experts and without.

    python -m benchmarks.mixtures.run [--json FILE]

Models of 4 layers in float32, with random weights. A layer has 64 experts of 96, and a token takes 8 of them. The
contenders share a process, its threads and the weights, and they decode the same numbers of tokens in turns. Every time
is the median of the rounds, in CPU milliseconds of the process, and every ratio the median of the ratios of the rounds.
Other work on the machine makes the times larger, so only ratios are compared. It makes threads wait for each other too,
so one thread is the default.

A last turn, which does not count for these, measures how much of a step routers and experts are, without the time of
shared experts compute. Of a mixture that Pagewise computes as one operation, this has the norm before it.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any, get_args

import torch
import transformers
from pagewise_executor.attention.registry import Kernels
from pagewise_kernels.cpu.experts import Mixture, PackedExperts, Router

from benchmarks.record import write_record
from benchmarks.side_by_side import (
    BLOCKS,
    STEPS,
    Contender,
    Family,
    Run,
    build,
    executor_settings,
    pagewise,
    parser_of,
    prompts_of,
    ratio,
    take_turns,
)

MOST = 64
"""Sequences."""
LOOP = "transformers eager"
_DECODER = {
    "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "num_experts_per_tok": 8, "max_position_embeddings": 512,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_SHARED = {
    "moe_intermediate_size": 96, "intermediate_size": 512, "n_routed_experts": 64, "n_shared_experts": 1,
    "first_k_dense_replace": 0, "norm_topk_prob": True,
}  # fmt: skip
FAMILIES: dict[str, Family] = {
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"moe_intermediate_size": 96, "intermediate_size": 512, "num_experts": 64, "norm_topk_prob": True},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {"intermediate_size": 96, "num_local_experts": 64, "layer_types": ["full_attention"] * 4},
    ),
    "glm4_moe": ("Glm4MoeConfig", _SHARED | {"n_group": 1, "topk_group": 1}),
    "deepseek_v3": (
        "DeepseekV3Config",
        _SHARED
        | {
            "head_dim": 16, "num_key_value_heads": 8, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 32, "v_head_dim": 32, "n_group": 8, "topk_group": 4,
        },
    ),
}  # fmt: skip


def of_transformers(path: Path, experts: str) -> Contender:
    """Return transformers' modules with an ``experts_implementation``."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, experts_implementation=experts)
    model.eval()
    blocks = [block for block in model.modules() if hasattr(block, "experts")]
    parts = [part for block in blocks for part in (block.experts, getattr(block, "gate", None) or block.router)]

    @torch.inference_mode()
    def compute(batch: int, run: Run) -> None:
        run.prompts.start()
        out: Any = model(torch.tensor(prompts_of(batch)), use_cache=True, logits_to_keep=1)
        run.prompts.stop()
        for i in range(STEPS + 1):
            if i == 1:
                run.decode.start()
            out = model(out.logits.argmax(-1), past_key_values=out.past_key_values)
        run.decode.stop()

    return Contender(compute, [(part, "forward") for part in parts])


def compare(family: str, rounds: int, kernels: list[Kernels], batches: list[int]) -> list[dict[str, Any]]:
    """Return a row for each batch and contender: the CPU-ms of a step, and its speed relative to the loop."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        name, settings = FAMILIES[family]
        build(path, (name, _DECODER | settings))
        parts: list[tuple[Any, str]] = [(Router, "choose"), (PackedExperts, "sums"), (Mixture, "sums")]
        contenders = {
            f"pagewise {one}": pagewise(executor_settings(path, one, MOST, MOST * BLOCKS + 1), MOST, parts)
            for one in kernels
        }
        contenders |= {f"transformers {one}": of_transformers(path, one) for one in ("eager", "grouped_mm")}
        turns = take_turns(contenders, rounds, batches)
        seconds = {key: [step for _, step in found] for key, found in turns.items()}
        shares = {(batch, name): contenders[name].share(batch) for batch, name in seconds}
    return [
        {
            "family": family,
            "batch": batch,
            "name": name,
            "cpu_ms": round(1e3 * statistics.median(found), 2),
            "times_the_loop": round(ratio(seconds[batch, LOOP], found), 2),
            "share_of_mixtures": round(shares[batch, name], 2),
        }
        for (batch, name), found in seconds.items()
    ]


def main() -> None:
    parser = parser_of(__doc__, FAMILIES, MOST)
    parser.add_argument("--kernels", nargs="+", default=["cpu"], choices=get_args(Kernels))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for family in args.families:
        for row in compare(family, args.rounds, args.kernels, args.batches):
            ratio = f"{row['times_the_loop']:>5.2f} times the loop, {row['share_of_mixtures']:.0%} in mixtures"
            print(f"{family:>12} {row['batch']:>4} {row['name']:>24} {row['cpu_ms']:>8.2f} CPU-ms, {ratio}")
            rows.append(row)
    if args.json:
        write_record(args.json, {"rows": rows}, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
