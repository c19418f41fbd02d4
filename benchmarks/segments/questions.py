"""The loss by segments where an answer needs several documents, with small models that are trained for it here.

    python -m benchmarks.segments.questions --json benchmarks/results/segments-questions.json

Questions of one hop, of two hops, and about *she* (``task.py``), to a model that was trained with full attention, and
to one that was trained further with segments as well. Right answers are counted by how the KV of the documents is come
by (``attention.py``): computed as a whole; as segments, by boundary; *rotated*: computed behind other documents, and
its keys rotated to its position; *copied*: the same, not rotated; *left out*.
"""

import argparse
import copy
import random
import statistics
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
import transformers

from benchmarks.record import record_file, write_record
from benchmarks.segments import task
from benchmarks.segments.attention import expand_by, ways


@torch.inference_mode()
def accuracy(model: transformers.LlamaForCausalLM, batches: int, seed: int) -> dict[str, dict[str, float]]:
    """The share of right answers by way, and by kind of question."""
    rng = random.Random(seed)
    right: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for _ in range(batches):
        prompts = task.make_prompts(32, rng)
        num_tokens = prompts.tokens.shape[1]
        # Behind the beginning of another prompt: at least one document.
        tokens = torch.cat([prompts.tokens, prompts.tokens.roll(1, 0)], 1)
        starts = [one.start for one in prompts.segments]
        others = [range(num_tokens, num_tokens + starts[1 + i % (len(starts) - 1)]) for i in range(len(starts))]
        kinds, wanted = list(chain(*prompts.kinds)), task.answers(prompts)
        for way in ways(task.BOUNDARIES):
            found = task.answer_logits(model, prompts, expand_by(num_tokens, prompts.segments, way, others), tokens)
            for kind, is_right in zip(kinds, (found.argmax(-1) == wanted).flatten().tolist(), strict=True):
                right[way.name, kind].append(is_right)
    return {
        way.name: {kind: round(statistics.mean(right[way.name, kind]), 4) for kind in task.KINDS}
        for way in ways(task.BOUNDARIES)
    }


def questions(steps: int, more: int, batches: int, seeds: list[int]) -> Iterator[dict[str, Any]]:
    for seed in seeds:
        learned = task.build_model(seed)
        before = task.train(learned, steps, seed)
        for trained, mixed in (("full attention", False), ("both", True)):
            model = copy.deepcopy(learned)
            seconds = before + task.go_on(model, more, seed, mixed=mixed)
            table = accuracy(model, batches, 10_000 + seed)
            print(f"\ntrained with {trained}, seed {seed}, {seconds:.0f} s: right answers")
            print(f"{'':<14}" + "".join(f"{kind:>18}" for kind in task.KINDS))
            for name, row in table.items():
                print(f"{name:<14}" + "".join(f"{share:>18.1%}" for share in row.values()), flush=True)
            yield {"trained": trained, "seed": seed, "steps": [steps, more], "seconds": round(seconds), "right": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1200, help="of training with full attention")
    parser.add_argument("--more", type=int, default=150, help="of training each of the two models after that")
    parser.add_argument("--batches", type=int, default=6, help="of 32 prompts each, to find how many answers are right")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of models")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="models that learn nothing, to see that it works")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.smoke:
        args.steps, args.more, args.batches = 6, 2, 1
    results = list(questions(args.steps, args.more, args.batches, args.seeds))
    if args.json:
        write_record(args.json, {"results": results}, threads=args.threads)


if __name__ == "__main__":
    main()
