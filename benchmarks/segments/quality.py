"""How segments change the predictions of the demo model, beside other ways to reuse the KV of documents.

    python -m benchmarks.segments.quality --json benchmarks/results/segments-quality.json

By transformers alone, with masks (``attention.py``): computed as a whole; as segments, by boundary; *rotated*: each
document's KV was computed behind other tokens and its keys are rotated to its position; *copied*: the same, not
rotated; *left out*: no token attends to the documents. The prompts are of the sources that the model was trained on:
eight pieces of different modules and a text that continues one of them, or eight pieces of one module and the next.
Each next token of the end is compared with the result of the whole prompt: Kullback-Leibler divergence, and whether the
most likely token is the same.
"""

import argparse
import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from pagewise_shared.model_files import resolve_model
from pagewise_shared.segments import Segment, make_segments

from benchmarks.record import record_file, write_record
from benchmarks.segments.attention import expand_by, logits, ways
from benchmarks.segments.texts import Texts

DOCUMENTS, DOCUMENT, TAIL, BEHIND = 8, 192, 64, 256
"""Documents of a prompt; tokens of each, of the end, and before each when its KV was computed."""
BOUNDARIES = (0, 8, 16, 32, 64)


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
        for way in ways(BOUNDARIES):
            copies = expand_by(num_tokens, segments, way, [other] * DOCUMENTS)
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
    parser.add_argument("--prompts", type=int, default=24, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="one prompt, to see that it works")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = list(demo(1 if args.smoke else args.prompts, args.seed))
    if args.json:
        shape = {"documents": DOCUMENTS, "document": DOCUMENT, "tail": TAIL, "behind": BEHIND}
        write_record(args.json, {**shape, "results": results}, threads=args.threads)


if __name__ == "__main__":
    main()
