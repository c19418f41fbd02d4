"""Small hybrid models on the CPU: Pagewise with and without operations for recurrent layers, and generate().

    python -m benchmarks.recurrent.run [--json FILE]

Models of about 100M weights in float32, which are random. The contenders share a process and its threads, and they
compute the same numbers of tokens in turns. Every time is the median of the rounds, in CPU milliseconds of the process,
and every ratio the median of the ratios of the rounds. Other work on the machine makes the times larger, so only ratios
are compared. It makes threads wait for each other too, so one thread is the default. Of ``generate()``, the time up to
the first token counts as that of prompts, and from the second to the last one as that of decode steps.

One contender keeps the states at each full block: in one of as many steps as a block has tokens, all sequences write
other blocks than they read. Its time relative to Pagewise without this is the price of snapshots.

A last turn, which does not count for these, measures how much of a decode step recurrent modules are, with their
projections.
"""

import gc
import statistics
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from pagewise_executor.models.recurrent import PagedRecurrence
from pagewise_shared.protocol import GroupedStepPlan, pack_int32s

from benchmarks.record import write_record
from benchmarks.side_by_side import (
    BLOCK_SIZE,
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

MOST = 16
"""Sequences."""
PAGEWISE, GENERATE = "pagewise", "generate()"
_STATES = 1
"""The group of states."""
_DECODER = {
    "vocab_size": 32000, "hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64,
    "tie_word_embeddings": True, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
_DELTA = {
    "num_hidden_layers": 8, "linear_num_key_heads": 6, "linear_num_value_heads": 12, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}  # fmt: skip
_MAMBA = {"mamba_num_heads": 24, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "intermediate_size": 3072}
FAMILIES: dict[str, Family] = {
    "qwen3_5": ("Qwen3_5TextConfig", _DELTA | {"intermediate_size": 2048}),
    "qwen3_next": (
        "Qwen3NextConfig",
        _DELTA
        | {
            "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        _MAMBA
        | {
            "layers_block_type": [
                *["linear_attention", "mlp"] * 3, "linear_attention", "full_attention",
                *["linear_attention", "mlp"] * 3, "linear_attention", "full_attention",
            ],
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        {
            "num_hidden_layers": 7, "intermediate_size": 2048, "mamba_n_heads": 24, "mamba_d_head": 64,
            "mamba_d_ssm": 1536, "mamba_n_groups": 1, "mamba_d_state": 128,
            "ssm_multipliers": [0.35, 0.25, 0.125, 0.5, 0.35], "ssm_in_multiplier": 1.25,
        },
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            "num_hidden_layers": 8, "linear_num_heads": 8, "linear_head_dim": 128, "intermediate_size": 2048,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
            "mlp_layer_types": ["dense"] * 8, "num_key_value_heads": 12, "kv_lora_rank": 256,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {
            "num_hidden_layers": 10, "intermediate_size": 2560, "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "conv", "full_attention", "conv", "conv"] * 2,
        },
    ),
}  # fmt: skip


def switches_at_blocks(batch: int, tokens: int) -> bytes:
    """Let each sequence write another block than before where a block is full, in turns of two."""
    if not tokens or tokens % BLOCK_SIZE:
        return b""
    first = MOST * (1 + tokens // BLOCK_SIZE % 2)
    return pack_int32s(value for row in range(batch) for value in (row, _STATES, tokens, first + row))


def switches_never(batch: int, tokens: int) -> bytes:
    """Let each sequence write the block that it has."""
    return b""


class _Times(transformers.StoppingCriteria):
    """Measures the prompts, which end with the first token, and the tokens behind the second one. Stops nothing."""

    def __init__(self, run: Run) -> None:
        self._run, self._count = run, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        self._count += 1
        if self._count == 1:
            self._run.prompts.stop()
        if self._count == 2:
            self._run.decode.start()
        if self._count == STEPS + 2:
            self._run.decode.stop()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def of_transformers(path: Path) -> Contender:
    """Return transformers' model, with its own way to generate."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path)
    model.eval()

    @torch.inference_mode()
    def compute(batch: int, run: Run) -> None:
        ids = torch.tensor(prompts_of(batch))
        run.prompts.start()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=STEPS + 2,
            stopping_criteria=transformers.StoppingCriteriaList([_Times(run)]),
        )  # fmt: skip

    return Contender(compute, [(one, "forward") for one in model.modules() if hasattr(one, "conv_kernel_size")])


def compare(family: str, rounds: int, batches: list[int]) -> list[dict[str, Any]]:
    """Return a row for each batch and contender: CPU-ms of prompts and of a step, and its speed beside generate()."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        config, more = FAMILIES[family]
        weights = build(path, (config, _DECODER | more))
        settings, parts = executor_settings(path, "cpu", MOST, 6144), [(PagedRecurrence, "__call__")]
        contenders = {
            PAGEWISE: pagewise(settings, MOST, parts, GroupedStepPlan, states=switches_never),
            "pagewise with snapshots": pagewise(settings, MOST, parts, GroupedStepPlan, states=switches_at_blocks),
            GENERATE: of_transformers(path),
        }
        with mock.patch("pagewise_executor.forward_pass.find_recurrences", return_value={}):
            by_pytorch = pagewise(settings, MOST, parts, GroupedStepPlan, states=switches_never)
        contenders["pagewise by PyTorch"] = by_pytorch
        seconds = take_turns(contenders, rounds, batches)
        shares = {(batch, name): contenders[name].share(batch) for batch, name in seconds}
    rows = []
    for (batch, name), found in seconds.items():
        prompts, steps = zip(*found, strict=True)
        of_generate, of_pagewise = (list(zip(*seconds[batch, one], strict=True)) for one in (GENERATE, PAGEWISE))
        rows.append(
            {
                "family": family,
                "weights": weights,
                "batch": batch,
                "name": name,
                "cpu_ms": round(1e3 * statistics.median(steps), 2),
                "tokens_per_cpu_second": round(batch / statistics.median(steps), 1),
                "times_generate": round(ratio(of_generate[1], steps), 2),
                "time_of_pagewise": ratio(steps, of_pagewise[1]),
                "prompts_cpu_ms": round(1e3 * statistics.median(prompts), 1),
                "prompts_times_generate": round(ratio(of_generate[0], prompts), 2),
                "share_of_recurrent_layers": round(shares[batch, name], 2),
            }
        )
    return rows


def main() -> None:
    args = parser_of(__doc__, FAMILIES, MOST).parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for family in args.families:
        for row in compare(family, args.rounds, args.batches):
            beside = f"{row['times_generate']:>5.2f} times generate(), {row['time_of_pagewise']:.3f} of pagewise's time"
            share = f"{row['share_of_recurrent_layers']:.0%} in recurrent layers"
            print(f"{family:>12} {row['batch']:>4} {row['name']:>24} {row['cpu_ms']:>8.2f} CPU-ms, {beside}, {share}")
            prompts = f"{row['prompts_cpu_ms']:>8.1f} CPU-ms, {row['prompts_times_generate']:>5.2f} times generate()"
            print(f"{'prompts':>42} {prompts}", flush=True)
            rows.append(row)
        gc.collect()  # the models and pools of the family
        if args.json:
            write_record(args.json, {"rows": rows}, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
