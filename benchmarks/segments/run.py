"""Time to the first token with segments, beside computing the whole prompt: documents in any order, as in RAG.

    python -m benchmarks.segments.run --json benchmarks/results/segments.json

Real processes: a scheduler, a gateway and an executor of one CPU thread. Each prompt has a system prompt, 8 of 64
documents in random order and a question of its own. It is asked without segments (prefixes are cached, as always), with
the documents declared as segments and known, by boundary, and with them declared under a new cache salt, so that they
have to be computed (*cold*). All take turns, one request at a time, in another order each round. Two models: a Llama of
49M parameters with random weights, whose prefill takes long enough to matter, and the demo model with shorter
documents, for its positions end at 2,048.
"""

import argparse
import contextlib
import dataclasses
import http.client
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks.processes import Cluster, running
from benchmarks.record import record_file, write_record
from benchmarks.segments.texts import Texts
from benchmarks.serving.clients import percentile
from benchmarks.serving.workloads import build_model

BOUNDARIES = (0, 8, 16, 32, 64)
RECOMPUTE, COLD = "recompute", "cold"
BAR = 0.35
"""Of the time to the first token with documents that are known, beside recomputing."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Tokens of the system prompt, of each of ``documents`` documents, of the question and of the answer; a prompt has
    ``chosen`` documents. ``blocks``: of the pool."""

    model: str
    root: int = 32
    documents: int = 64
    chosen: int = 8
    document: int = 512
    question: int = 48
    answer: int = 32
    blocks: int = 8192

    @property
    def prompt(self) -> int:
        return self.root + self.chosen * self.document + self.question


class Answer(NamedTuple):
    """Seconds to the first token, the tokens, and how many tokens were computed for it."""

    first_token: float
    tokens: list[int]
    computed: float


def ask(cluster: Cluster, body: dict[str, Any]) -> Answer:
    before = cluster.metric("iteration_tokens_sum")
    connection = http.client.HTTPConnection(urlsplit(cluster.url).netloc, timeout=300)
    content = json.dumps({**body, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True})
    tokens: list[int] = []
    began, first = time.perf_counter(), 0.0
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"a request failed: {response.read().decode()}")
        for line in response:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    tokens += choice.get("token_ids") or []
                    first = first or time.perf_counter() - began
    return Answer(first, tokens, cluster.metric("iteration_tokens_sum") - before)


def measure(shape: Shape, folder: Path, rounds: int, seed: int) -> dict[str, list[Answer]]:
    """Answers by the way to ask, one of each round."""
    rng, texts = random.Random(seed), Texts(seed)
    root = texts.take(shape.root)
    documents = [texts.take(shape.document) for _ in range(shape.documents)]
    ranges = [(shape.root + i * shape.document, shape.root + (i + 1) * shape.document) for i in range(shape.chosen)]
    answers: dict[str, list[Answer]] = {RECOMPUTE: [], **{f"boundary {k}": [] for k in BOUNDARIES}, COLD: []}
    options = (f"--num-blocks={shape.blocks}", "--device=cpu", "--log-level=error")
    cluster = Cluster(folder, model=shape.model, executor_options=options)
    with running(cluster, 1):

        def declared(prompt: list[int], answer: int, boundary: int, **more: str) -> Answer:
            segments = {"ranges": ranges[: (len(prompt) - shape.root) // shape.document], "boundary": boundary}
            return ask(cluster, {"prompt": prompt, "max_tokens": answer, "segments": segments, **more})

        for first in range(0, shape.documents, shape.chosen):
            known = sum(documents[first : first + shape.chosen], root)
            declared([*known, *texts.take(4)], 1, 0)
        for number in range(rounds):
            question = texts.take(shape.question)
            prompt = sum(rng.sample(documents, shape.chosen), root) + question
            names = list(answers)
            rng.shuffle(names)
            for name in names:
                if name == RECOMPUTE:
                    found = ask(cluster, {"prompt": prompt, "max_tokens": shape.answer})
                elif name == COLD:
                    found = declared(prompt, shape.answer, 0, cache_salt=f"cold {number}")
                else:
                    found = declared(prompt, shape.answer, int(name.split()[1]))
                answers[name].append(found)
    if any(a.tokens != b.tokens for a, b in zip(answers[COLD], answers["boundary 0"], strict=True)):
        raise RuntimeError("what is found gave other tokens than what was computed")
    return answers


def rows_of(shape: Shape, answers: dict[str, list[Answer]]) -> list[dict[str, Any]]:
    """Medians by the way to ask, beside recomputing in the same round."""
    rows = []
    plain = answers[RECOMPUTE]
    for name, found in answers.items():
        times = [one.first_token for one in found]
        equal = [_equal(one.tokens, other.tokens) for one, other in zip(found, plain, strict=True)]
        rows.append(
            {
                "asked": name,
                "first_token_ms": round(1e3 * statistics.median(times), 1),
                "first_token_ms_p90": round(1e3 * percentile(times, 0.9), 1),
                "of_recompute": round(statistics.median(times) / statistics.median(p.first_token for p in plain), 3),
                "of_recompute_p90": round(
                    percentile([t / p.first_token for t, p in zip(times, plain, strict=True)], 0.9), 3
                ),
                "computed": round(
                    statistics.median(one.computed - shape.answer + 1 for one in found) / shape.prompt, 4
                ),
                "equal_answers": round(sum(count == shape.answer for count in equal) / len(equal), 3),
                "equal_tokens": round(statistics.mean(equal) / shape.answer, 3),
            }
        )
    return rows


def _equal(tokens: list[int], others: list[int]) -> int:
    """How many first tokens are equal."""
    return next((i for i, (a, b) in enumerate(zip(tokens, others, strict=True)) if a != b), len(tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a few short documents, to see that it works")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        demo = Shape("pagewise-demo", document=208)
        if args.smoke:
            shapes = [dataclasses.replace(demo, documents=4, chosen=2, document=96, answer=4, blocks=1024)]
        else:
            build_model(folder / "model", max_len=8192)
            shapes = [Shape(str(folder / "model")), demo]
        for number, shape in enumerate(shapes):
            answers = measure(shape, folder / str(number), 2 if args.smoke else args.rounds, args.seed)
            model = shape.model if shape is demo or args.smoke else "Llama of 49M parameters, random weights"
            print(f"\n{model}: {shape.chosen} of {shape.documents} documents of {shape.document} tokens")
            print(
                f"{'':<12}{'first token':>12}{'p90':>10}{'of recompute':>14}{'computed':>10}{'equal':>8}{'tokens':>8}"
            )
            rows = rows_of(shape, answers)
            for row in rows:
                print(
                    f"{row['asked']:<12}{row['first_token_ms']:>9} ms{row['first_token_ms_p90']:>7} ms"
                    f"{row['of_recompute']:>14.3f}{row['computed']:>10.1%}"
                    f"{row['equal_answers']:>8.0%}{row['equal_tokens']:>8.0%}",
                    flush=True,
                )
            results.append({**dataclasses.asdict(shape), "model": model, "rounds": args.rounds, "rows": rows})
    if args.json:
        write_record(args.json, {"bar": BAR, "load_average_at_end": round(os.getloadavg()[0], 1), "results": results})


if __name__ == "__main__":
    main()
