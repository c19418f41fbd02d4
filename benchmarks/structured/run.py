"""The cost of structured output: throughput with 0, 20 and 100% of requests that have grammars, and the cost of masks.

    python -m benchmarks.structured.run
    python -m benchmarks.structured.run --rows 64 --json FILE

Throughput: one model runner on the CPU computes the same requests of the bundled model, once for each share, in turns;
requests join, their prompts are computed, and they decode, without a scheduler. The grammars are schemas whose texts
are longer than the decoded outputs. Masks: the time that one step spends on them beside the model, for the bundled
model's vocabulary, and for one of 113,000 random tokens. All numbers are medians of the rounds.

Neighbours: the time of steps for seven requests without grammars while an eighth one has an ambiguous grammar, which is
made to take long. It runs until its grammar may not be followed any further, for twice as many steps, or for ten
seconds; with the limits of executors, and with the limits of the library.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from pagewise_shared.cpu_threads import wait_variables

os.environ.update(wait_variables(os.environ))  # as executors do, before torch is imported

import numpy as np
import tokenizers
import torch
from llguidance import LLParserLimits
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.structured import grammars as compiled_grammars
from pagewise_executor.structured.grammars import Grammars, load_tokenizer
from pagewise_executor.structured.structured_rows import forbidden_tokens
from pagewise_executor.uploads import Uploads
from pagewise_shared.config import DEMO_MODEL, ExecutorConfig
from pagewise_shared.model_files import resolve_model
from pagewise_shared.protocol import NewSequence, StepPlan, Welcome, pack_int32s
from pagewise_shared.sampling import SamplingParams
from tokenizers import decoders, models, pre_tokenizers
from tqdm import tqdm

from benchmarks.record import record_file, write_record

SHARES = (0.0, 0.2, 1.0)
NEIGHBOURS = 7
MOST_SECONDS = 10.0
HOSTILE = {
    "no grammar": "",
    "a list of words": 'start: (WORD " ")* "~~"\nWORD: /[a-z]{1,12}/',
    "sums": 'start: e "~~"\ne: e "+" t | t\nt: t "*" f | f\nf: "(" e ")" | /[0-9]+/',
    "palindromes": 'start: a "~~"\na: ' + " | ".join(f'"{letter}" a "{letter}"' for letter in "abcdefgh ") + ' | ""',
    "any binary tree": 'start: s "~~"\ns: s s | /[a-z ]/',
    "any tree": 'start: s "~~"\ns: s s s | s s | "a" | "b"',
}  # fmt: skip
"""The grammar of the output of the eighth request."""
PROMPT = 64
LARGE = 113_000


def grammar(number: int) -> str:
    """A list of objects that is never complete, without whitespace; a schema of its own for each number."""
    item = {
        "type": "object",
        "properties": {
            f"name_{number}": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "kind": {"enum": ["class", "function", "module"]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": [f"name_{number}", "age", "kind", "tags"],
        "additionalProperties": False,
    }
    schema = {"type": "array", "items": item, "minItems": 5000, "x-guidance": {"whitespace_flexible": False}}
    return json.dumps({"grammars": [{"json_schema": schema}]})


def joining(runner: ModelRunner, steps: int, grammars: list[str]) -> StepPlan:
    """Reset ``runner``, and return the step in which a request for each of ``grammars`` joins, to run so many steps."""
    size, rows = runner.info.block_size, len(grammars)
    blocks = -(-(PROMPT + steps + 1) // size)
    rng = random.Random(1)
    runner.reset(Welcome(0, rows, 65_536))
    joined = tuple(
        NewSequence(
            row,
            pack_int32s([rng.randrange(10, 4000) for _ in range(PROMPT)]),
            PROMPT,
            0,
            pack_int32s(range(row * blocks, (row + 1) * blocks)),
            SamplingParams(temperature=1.0, seed=row, grammar=one, stop_token_ids=(0, 1)),
        )
        for row, one in enumerate(grammars)
    )
    return StepPlan(0, 1, joined=joined, chunks=tuple((row, PROMPT) for row in range(rows)))


def serve(runner: ModelRunner, rows: int, steps: int, share: float) -> tuple[float, float]:
    """Serve ``rows`` requests for so many steps, ``share`` of which have grammars.

    Returns tokens per second, and per second of CPU time of this process, which other work on the machine changes less.
    """
    grammars = [grammar(row % 8) if row < share * rows else "" for row in range(rows)]
    first = joining(runner, steps, grammars)
    began, cpu = time.perf_counter(), time.process_time()
    results = [runner.execute(first)]
    results += [runner.execute(StepPlan(0, 2 + step)) for step in range(steps - 1)]
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    assert not any(step.result().failures for step in results)
    return rows * steps / seconds, rows * steps / cpu_seconds


def neighbours(runner: ModelRunner, steps: int, hostile: str, limits: LLParserLimits) -> dict[str, Any]:
    """Milliseconds of the steps of requests beside one with the grammar ``hostile``: the median, and the longest.

    ``tokens``: how many the grammar was followed for. ``failed``: whether it then could not be, so that its request
    ended.
    """
    compiled_grammars.RULE_LIMITS = limits
    plan = joining(runner, steps, [hostile, *[""] * NEIGHBOURS])
    taken, followed, failed = [], 0, False
    for step in range(2, steps + 2):
        began = time.perf_counter()
        result = runner.execute(plan).result()
        taken.append(1e3 * (time.perf_counter() - began))
        if result.failures and not failed:
            failed = True
            plan = StepPlan(0, step, left=(0,))
        else:
            plan = StepPlan(0, step)
        followed += not failed
        if sum(taken) > 1e3 * MOST_SECONDS:
            break
    decoding = taken[1:]
    return {
        "step_ms": round(statistics.median(decoding), 2),
        "longest_step_ms": round(max(decoding), 1),
        "tokens": followed,
        "failed": failed,
    }


def large_tokenizer(folder: Path, size: int) -> int:
    """Save a byte-level tokenizer of so many random tokens; returns its size."""
    rng, alphabet = random.Random(0), sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<|end|>", *alphabet])}
    parts = [token for token in alphabet if token.isascii() and (token.isalnum() or token in '"{}[]:,')] + ["Ġ"]
    merges = []
    while len(vocabulary) < size:
        left, right = rng.choice(parts), rng.choice(parts)
        if len(left + right) <= 10 and left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            merges.append((left, right))
            parts.append(left + right)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return len(vocabulary)


def mask_costs(path: Path, vocab_size: int, rows: int, rounds: int) -> dict[str, Any]:
    """The cost of masks, in milliseconds: the tokenizer, a grammar, and for each token of so many rows."""
    began = time.perf_counter()
    tokenizer = load_tokenizer(path, vocab_size)
    loaded = time.perf_counter() - began
    grammars = Grammars(tokenizer, 1)
    began = time.perf_counter()
    matchers = [grammars.matcher(grammar(row % 8)) for row in range(rows)]
    compiled = time.perf_counter() - began
    upload, device = Uploads(torch.device("cpu")), torch.device("cpu")
    rng = random.Random(2)
    logits = torch.zeros(rows, vocab_size, device=device)
    consuming, masking, applying = [], [], []
    longest = 0.0
    for _ in range(rounds):
        began = time.perf_counter()
        masks = grammars.masks(matchers)
        masked = time.perf_counter()
        logits.masked_fill_(forbidden_tokens(masks, vocab_size, upload), float("-inf"))
        applied = time.perf_counter()
        bits = np.unpackbits(masks.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        drawn = [int(rng.choice(np.flatnonzero(row))) for row in bits]
        consumed = time.perf_counter()
        for matcher, token in zip(matchers, drawn, strict=True):
            assert matcher.consume_token(token)
        consuming.append(time.perf_counter() - consumed)
        masking.append(masked - began)
        applying.append(applied - masked)
        longest = max(longest, masked - began)
        logits.zero_()
    grammars.close()
    return {
        "vocabulary": vocab_size,
        "rows": rows,
        "tokenizer_ms": round(1e3 * loaded, 1),
        "grammars_ms": round(1e3 * compiled, 2),
        "masks_ms": round(1e3 * statistics.median(masking), 3),
        "longest_masks_ms": round(1e3 * longest, 3),
        "applying_ms": round(1e3 * statistics.median(applying), 3),
        "consuming_ms": round(1e3 * statistics.median(consuming), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="few and short rounds")
    parser.add_argument("--json", type=record_file)
    arguments = parser.parse_args()
    rows, steps, rounds = (4, 12, 2) if arguments.smoke else (arguments.rows, arguments.steps, arguments.rounds)
    runner = ModelRunner(
        ExecutorConfig(
            model=DEMO_MODEL, device="cpu", num_blocks=rows * 16, max_num_seqs=max(rows, NEIGHBOURS + 1),
            profile=False,
            threads=arguments.threads,
        )
    )  # fmt: skip
    serve(runner, rows, steps, 1.0)
    taken: dict[float, list[tuple[float, float]]] = {share: [] for share in SHARES}
    for number in tqdm(range(rounds), desc="measuring throughput", unit=" rounds", disable=None):
        for share in SHARES[:: 1 if number % 2 else -1]:
            taken[share].append(serve(runner, rows, steps, share))
    median = {
        share: [statistics.median(column) for column in zip(*rates, strict=True)] for share, rates in taken.items()
    }
    throughput = [
        {
            "structured": share,
            "tokens_per_s": round(rate, 1),
            "tokens_per_cpu_s": round(cpu_rate, 1),
            "of_plain": round(rate / median[0.0][0], 3),
            "of_plain_by_cpu_time": round(cpu_rate / median[0.0][1], 3),
        }
        for share, (rate, cpu_rate) in median.items()
    ]
    for row in throughput:
        print(
            f"{row['structured']:>5.0%} structured{row['tokens_per_s']:>10.1f} tokens/s{row['of_plain']:>8.2f}x"
            f"{row['tokens_per_cpu_s']:>10.1f} tokens/CPU s{row['of_plain_by_cpu_time']:>8.2f}x"
        )
    ours, beside = compiled_grammars.RULE_LIMITS, []
    for name, text in HOSTILE.items():
        for limits, other in ((ours, ""), (LLParserLimits(verbose_errors=False), "// as another grammar\n")):
            taken_beside = neighbours(runner, 2 * steps, text and other + text, limits)
            beside.append({"grammar": name, "limits": "library" if other else "executor", **taken_beside})
    for one in beside:
        print(", ".join(f"{name} {value}" for name, value in one.items()))
    masks = [mask_costs(resolve_model(DEMO_MODEL), 4096, rows, 3 * rounds)]
    with tempfile.TemporaryDirectory() as folder:
        size = large_tokenizer(Path(folder), 5000 if arguments.smoke else LARGE)
        masks.append(mask_costs(Path(folder), size, rows, 3 * rounds))
    for one in masks:
        print(", ".join(f"{name} {value}" for name, value in one.items()))
    if arguments.json:
        machine = {"device": runner.info.device, "kernels": runner.info.kernels, "dtype": runner.info.dtype}
        write_record(arguments.json, {"rows": throughput, "neighbours": beside, "masks": masks}, **machine)


if __name__ == "__main__":
    main()
