"""What segments lose, beside computing the whole prompt, and beside other ways to reuse the KV of documents.

    python -m benchmarks.segments.quality --json benchmarks/results/segments-quality.json

By transformers alone, with masks (``attention.py``): computed as a whole; as segments, by boundary; *rotated*:
each document's KV was computed behind other documents and its keys are rotated to where it stands; *copied*: the same,
not rotated; *left out*: nobody attends to the documents.

First, accuracy at questions about several documents, of two small models that are trained here: one with full
attention, one with segments as well (``task.py``). Then the demo model on the sources that it knows: eight pieces of
different modules and a text that goes on where one of them ends, or the first pieces of one module and the next. There,
each next token is compared with what the whole prompt gives: Kullback-Leibler divergence, and whether the most likely
token is the same.
"""

import argparse
import random
import statistics
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
import transformers
from pagewise_shared.model_files import resolve_model
from pagewise_shared.segments import Segment, make_segments

from benchmarks.record import record_file, write_record
from benchmarks.segments import task
from benchmarks.segments.attention import Expanded, Reuse, expand, logits
from benchmarks.segments.texts import Texts

WHOLE = "whole prompt"
DOCUMENTS, DOCUMENT, TAIL, BEHIND = 8, 192, 64, 256
"""Documents of a prompt to the demo model, tokens of each, of what follows, and that their KV was computed behind."""
DEMO_BOUNDARIES = (0, 8, 16, 32, 64)


class Way(NamedTuple):
    """How the KV of documents is come by."""

    name: str
    reuse: Reuse | None
    boundary: int = 0


def ways(boundaries: tuple[int, ...]) -> list[Way]:
    reused: list[Reuse] = ["rotated", "copied", "left out"]
    return [
        Way(WHOLE, None),
        *(Way(f"boundary {size}", "segments", size) for size in boundaries),
        *(Way(reuse, reuse) for reuse in reused),
    ]


def expanded(num_tokens: int, segments: tuple[Segment, ...], way: Way, others: list[range]) -> Expanded:
    """``segments``: with boundary 0. ``others``: what their KV was computed behind, unless as segments."""
    if way.reuse is None:
        return expand(num_tokens, (), "segments")
    moved = [one._replace(moved=min(one.stop, one.start + way.boundary)) for one in segments]
    return expand(num_tokens, moved, way.reuse, others)


# ---- questions about several documents ---------------------------------------------------------------


@torch.inference_mode()
def accuracy(model: transformers.LlamaForCausalLM, batches: int, seed: int) -> dict[str, dict[str, float]]:
    """The share of right answers by way, and by kind of question."""
    rng = random.Random(seed)
    right: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for _ in range(batches):
        prompts = task.make_prompts(32, rng)
        num_tokens = prompts.tokens.shape[1]
        # Behind what another prompt begins with: at least one document.
        tokens = torch.cat([prompts.tokens, prompts.tokens.roll(1, 0)], 1)
        starts = [one.start for one in prompts.segments]
        others = [range(num_tokens, num_tokens + starts[1 + i % (len(starts) - 1)]) for i in range(len(starts))]
        kinds, wanted = list(chain(*prompts.kinds)), task.answers(prompts)
        for way in ways(task.BOUNDARIES):
            found = task.answer_logits(model, prompts, expanded(num_tokens, prompts.segments, way, others), tokens)
            for kind, is_right in zip(kinds, (found.argmax(-1) == wanted).flatten().tolist(), strict=True):
                right[way.name, kind].append(is_right)
    return {
        way.name: {kind: round(statistics.mean(right[way.name, kind]), 4) for kind in task.KINDS}
        for way in ways(task.BOUNDARIES)
    }


def questions(steps: int, batches: int, seeds: list[int]) -> Iterator[dict[str, Any]]:
    for seed in seeds:
        for trained, mixed in (("full attention", False), ("both", True)):
            model = task.build_model(seed)
            seconds = task.train(model, steps, seed, mixed=mixed)
            table = accuracy(model, batches, 10_000 + seed)
            print(f"\ntrained with {trained}, seed {seed}, {seconds:.0f} s: right answers")
            print(f"{'':<14}" + "".join(f"{kind:>18}" for kind in task.KINDS))
            for name, row in table.items():
                print(f"{name:<14}" + "".join(f"{share:>18.1%}" for share in row.values()), flush=True)
            yield {"trained": trained, "seed": seed, "steps": steps, "seconds": round(seconds), "right": table}


# ---- the demo model ----------------------------------------------------------------------------------


def prompts_of(kind: str, count: int, seed: int) -> Iterator[tuple[list[int], tuple[Segment, ...], range]]:
    """Prompts to the demo model, their documents, and where the others' tokens begin that stand behind them."""
    texts = Texts(seed)
    rng = random.Random(seed)
    for _ in range(count):
        if kind == "one module":
            whole = texts.take(DOCUMENTS * DOCUMENT + TAIL)
            documents, tail = whole[:-TAIL], whole[-TAIL:]
        else:
            pieces = [texts.take(DOCUMENT + TAIL) for _ in range(DOCUMENTS)]
            documents = [token for piece in pieces for token in piece[:DOCUMENT]]
            tail = rng.choice(pieces)[DOCUMENT:]
        prompt = [0, *documents, *tail]  # 0: <|endoftext|>, the root
        ranges = [(1 + i * DOCUMENT, 1 + (i + 1) * DOCUMENT) for i in range(DOCUMENTS)]
        segments = make_segments(len(prompt), ranges)
        yield [*prompt, 0, *texts.take(BEHIND - 1)], segments, range(len(prompt), len(prompt) + BEHIND)


@torch.inference_mode()
def divergence(model: transformers.LlamaForCausalLM, kind: str, count: int, seed: int) -> dict[str, dict[str, float]]:
    """By way: medians and means over the tokens behind the documents, beside the whole prompt."""
    found: dict[str, dict[str, list[torch.Tensor]]] = defaultdict(lambda: defaultdict(list))
    for tokens, segments, other in prompts_of(kind, count, seed):
        num_tokens = len(tokens) - BEHIND
        whole: torch.Tensor | None = None
        given = torch.tensor([tokens])
        following = given[0, num_tokens - TAIL + 1 : num_tokens]
        for way in ways(DEMO_BOUNDARIES):
            copies = expanded(num_tokens, segments, way, [other] * DOCUMENTS)
            guessed = logits(model, given, copies, TAIL)[0].float().log_softmax(-1)
            whole = guessed if whole is None else whole
            row = found[way.name]
            row["kl"].append((whole.exp() * (whole - guessed)).sum(-1))
            row["agreement"].append((guessed.argmax(-1) == whole.argmax(-1)).float())
            row["loss"].append(-guessed[:-1].gather(1, following[:, None])[:, 0])
            row["right"].append((guessed[:-1].argmax(-1) == following).float())
    return {
        name: {what: round(torch.cat(values).mean().item(), 5) for what, values in row.items()}
        | {"kl_p90": round(torch.cat(row["kl"]).quantile(0.9).item(), 5)}
        for name, row in found.items()
    }


def demo(count: int, seed: int) -> Iterator[dict[str, Any]]:
    model = transformers.LlamaForCausalLM.from_pretrained(resolve_model("pagewise-demo"), dtype=torch.float32)
    for kind in ("modules", "one module"):
        table = divergence(model, kind, count, seed)
        print(f"\nthe demo model, {DOCUMENTS} pieces of {DOCUMENT} tokens, {kind}, {count} prompts")
        print(f"{'':<14}{'KL':>9}{'p90':>9}{'agreement':>11}{'loss':>8}{'right':>8}")
        for name, row in table.items():
            print(
                f"{name:<14}{row['kl']:>9.4f}{row['kl_p90']:>9.4f}{row['agreement']:>11.1%}{row['loss']:>8.3f}"
                f"{row['right']:>8.1%}",
                flush=True,
            )
        yield {"documents": kind, "prompts": count, "ways": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500, help="of training each model")
    parser.add_argument("--batches", type=int, default=8, help="of 32 prompts each, to find how many answers are right")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of models")
    parser.add_argument("--prompts", type=int, default=24, help="to the demo model, of each kind")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="models that learn nothing, to see that it works")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.smoke:
        args.steps, args.batches, args.prompts = 3, 1, 1
    asked = list(questions(args.steps, args.batches, args.seeds))
    known = list(demo(args.prompts, args.seeds[0]))
    if args.json:
        shape = {"documents": DOCUMENTS, "document": DOCUMENT, "tail": TAIL, "behind": BEHIND}
        write_record(args.json, {"questions": asked, "demo_model": {**shape, "results": known}}, threads=args.threads)


if __name__ == "__main__":
    main()
