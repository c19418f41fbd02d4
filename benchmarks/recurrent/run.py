"""Decode of small hybrid models on the CPU: Pagewise with and without operations for recurrent layers, and generate().

    python -m benchmarks.recurrent.run [--json FILE]

Models of about 100M weights in float32, which are random. The contenders share a process and its threads, and they
decode the same numbers of tokens in turns. Every time is the median of the rounds, in CPU milliseconds of the process,
and every ratio the median of the ratios of the rounds. Other work on the machine makes the times larger, so only ratios
are compared. It makes threads wait for each other too, so one thread is the default. Of ``generate()``, the time from
the second token to the last one counts.

A last turn, which does not count for these, measures how much of a step recurrent modules are, with their projections.
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import transformers
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.models.recurrent import PagedRecurrence
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import GroupedStepPlan, NewSequence, Welcome, pack_int32s
from pagewise_shared.sampling import SamplingParams

from benchmarks.record import record_file, write_record

CONTEXT, STEPS, BLOCK_SIZE = 64, 16, 16
MOST = 16
"""Sequences."""
GENERATE = "generate()"
_BLOCKS = -(-(CONTEXT + STEPS + 2) // BLOCK_SIZE)
"""Of a sequence."""
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
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
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
}  # fmt: skip


def build_hybrid(path: Path, family: str) -> int:
    """Write the model, with random weights; return how many it has."""
    torch.manual_seed(0)
    name, settings = FAMILIES[family]
    config = getattr(transformers, name)(**_DECODER | settings)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(path)
    return int(model.num_parameters())


def prompts_of(batch: int) -> list[list[int]]:
    """Return prompts of as many sequences."""
    return [[(7 * i + row) % 500 for i in range(CONTEXT)] for row in range(batch)]


class Contender(NamedTuple):
    """``decode``: decodes tokens of a number of sequences, and returns the CPU seconds of a step. ``recurrent``: the
    objects that compute recurrent layers, each with the name of its method."""

    decode: Callable[[int], float]
    recurrent: list[tuple[Any, str]]

    def share(self, batch: int) -> float:
        """Return the share of recurrent layers in the CPU time of decode steps."""
        within: list[float] = []

        def timed(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **named: Any) -> Any:
                began = time.process_time()
                result = function(*args, **named)
                within.append(time.process_time() - began)
                return result

            return call

        with ExitStack() as stack:
            for owner, name in self.recurrent:
                stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name))))
            took = self.decode(batch)
        calls = len(within) // (STEPS + 2) * STEPS  # without the prefill and the first step
        return sum(within[-calls:]) / (STEPS * took)


def pagewise(path: Path, *, operations: bool) -> Contender:
    """Return the executor; without ``operations``, PyTorch computes its recurrent layers."""
    settings = ExecutorConfig(
        model=str(path), device="cpu", dtype="float32", kernels="cpu", num_blocks=4096, block_size=BLOCK_SIZE,
        max_num_seqs=MOST, profile=False, threads=torch.get_num_threads(),
    )  # fmt: skip
    with ExitStack() as stack:
        if not operations:
            finder = "pagewise_executor.forward_pass.find_recurrences"
            stack.enter_context(mock.patch(finder, return_value={}))
        runner = ModelRunner(settings)

    def decode(batch: int) -> float:
        runner.reset(Welcome(0, MOST, MOST * CONTEXT))
        joined = tuple(
            NewSequence(
                row, pack_int32s(prompt), CONTEXT, 0, pack_int32s(range(row * _BLOCKS, (row + 1) * _BLOCKS)),
                SamplingParams(temperature=0.0), windows=((0, pack_int32s([row])),),
            )
            for row, prompt in enumerate(prompts_of(batch))
        )  # fmt: skip
        chunks = tuple((row, CONTEXT) for row in range(batch))
        numbers = count(1)
        runner.execute(GroupedStepPlan(0, next(numbers), joined=joined, chunks=chunks)).result()
        runner.execute(GroupedStepPlan(0, next(numbers))).result()
        began = time.process_time()
        for _ in range(STEPS):
            runner.execute(GroupedStepPlan(0, next(numbers))).result()
        return (time.process_time() - began) / STEPS

    return Contender(decode, [(PagedRecurrence, "__call__")])


class _Times(transformers.StoppingCriteria):
    """Notes the CPU time at each token, and stops nothing."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        self.seconds.append(time.process_time())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def of_transformers(path: Path) -> Contender:
    """Return transformers' model, with its own way to generate."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path)
    model.eval()

    @torch.inference_mode()
    def decode(batch: int) -> float:
        times, ids = _Times(), torch.tensor(prompts_of(batch))
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=STEPS + 2,
            stopping_criteria=transformers.StoppingCriteriaList([times]),
        )  # fmt: skip
        return (times.seconds[-1] - times.seconds[1]) / STEPS

    recurrent = [module for module in model.modules() if isinstance(getattr(module, "A_log", None), torch.Tensor)]
    return Contender(decode, [(one, "forward") for one in recurrent])


def compare(family: str, rounds: int, batches: list[int]) -> list[dict[str, Any]]:
    """Return a row for each batch and contender: the CPU-ms of a step, and its speed relative to generate()."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        weights = build_hybrid(path, family)
        contenders = {"pagewise": pagewise(path, operations=True), GENERATE: of_transformers(path)}
        contenders["pagewise by PyTorch"] = pagewise(path, operations=False)
        seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
        for turn in range(rounds + 1):
            for batch in batches:
                for name, contender in contenders.items():
                    took = contender.decode(batch)
                    if turn:  # the first one warms up
                        seconds[batch, name].append(took)
        shares = {(batch, name): contenders[name].share(batch) for batch, name in seconds}
    return [
        {
            "family": family,
            "weights": weights,
            "batch": batch,
            "name": name,
            "cpu_ms": round(1e3 * statistics.median(found), 2),
            "tokens_per_cpu_second": round(batch / statistics.median(found), 1),
            "times_generate": round(
                statistics.median(one / own for one, own in zip(seconds[batch, GENERATE], found, strict=True)), 2
            ),
            "share_of_recurrent_layers": round(shares[batch, name], 2),
        }
        for (batch, name), found in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16], choices=range(1, MOST + 1))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for family in args.families:
        for row in compare(family, args.rounds, args.batches):
            ratio = f"{row['times_generate']:>5.2f} times generate()"
            share = f"{row['share_of_recurrent_layers']:.0%} in recurrent layers"
            print(f"{family:>12} {row['batch']:>4} {row['name']:>20} {row['cpu_ms']:>8.2f} CPU-ms, {ratio}, {share}")
            rows.append(row)
        if args.json:
            write_record(args.json, {"rows": rows}, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
