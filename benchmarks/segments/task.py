"""A task that needs the content of several documents, and small models that are trained for it here.

Four documents of sentences between words that mean nothing; then questions, each with one answer:

- *one hop*: "anna paris", in one document. Where is anna?
- *two hops*: "anna paris" and "paris europe", in two documents, in either order. On which continent is anna?
- *reference*: "berta speaks", and in the next document "she rome". Where is berta? *She* is the last speaker.

A model can follow two hops when it is asked, from documents that know nothing of each other. Who *she* is it can hardly
find out then: the document has to have been read behind the one before it.
"""

import itertools
import random
import sys
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from pagewise_shared.segments import Segment, make_segments
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.segments.attention import Expanded, expand, logits, with_boundary

Kind = Literal["one hop", "two hops", "early reference", "late reference"]
KINDS: tuple[Kind, ...] = ("one hop", "two hops", "early reference", "late reference")
EARLY = 4
"""References are early if they are among so many first tokens of their document."""
DOCUMENTS = 4
BOUNDARIES = (0, 4, 8, 16)

_BEGIN, _READ, _SPEAKS, _SHE = range(4)
_ASKS = {"one hop": 4, "two hops": 5, "early reference": 4, "late reference": 4}
_WORDS = range(6, 14)
_PEOPLE, _PLACES, _REGIONS = range(14, 34), range(34, 54), range(54, 64)
VOCABULARY = 64
_ROOT = (_BEGIN, _READ)
_QUESTION = 3
"""Tokens of a question: its kind, the person, the answer."""


class Shape(NamedTuple):
    """``lengths``: tokens of a document, from and to. ``one``, ``two``: people in questions of one hop or of two; one
    hop is asked of the first people's places, too. ``references``: whether there are any, one less than documents."""

    lengths: tuple[int, int] = (16, 24)
    one: int = 3
    two: int = 3
    references: bool = True


FULL = Shape()
LESSONS = (Shape((8, 10), 6, 0, references=False), FULL)
"""The shapes that models are trained with, in turn: models learn to match names much faster if that is the only
task."""
ROWS = (24, 24)
"""Prompts of a step of each lesson."""
LEARNED = 0.85
"""The share of right answers with which the next lesson comes."""


class Prompts(NamedTuple):
    """Prompts of the same shape.

    ``tokens`` int64 [rows, tokens]: they end with the questions and their answers. ``segments``: the documents, with
    boundary 0. ``kinds`` [rows][questions].
    """

    tokens: torch.Tensor
    segments: tuple[Segment, ...]
    kinds: list[list[Kind]]

    @property
    def num_asked(self) -> int:
        """Tokens of all questions of a prompt."""
        return len(self.kinds[0]) * _QUESTION


def make_prompts(rows: int, rng: random.Random, shape: Shape = FULL) -> Prompts:
    lengths = [rng.randint(*shape.lengths) for _ in range(DOCUMENTS)]
    made = [_prompt(lengths, shape, rng) for _ in range(rows)]
    ends = list(itertools.accumulate(lengths, initial=len(_ROOT)))
    tokens = torch.tensor([prompt for prompt, _ in made])
    segments = make_segments(tokens.shape[1], itertools.pairwise(ends))
    return Prompts(tokens, segments, [kinds for _, kinds in made])


def _prompt(lengths: Sequence[int], shape: Shape, rng: random.Random) -> tuple[list[int], list[Kind]]:
    known, speaking = shape.one + shape.two, (DOCUMENTS - 1) * shape.references
    people, places = rng.sample(_PEOPLE, known + speaking), rng.sample(_PLACES, known + speaking)
    sentences: list[list[list[int]]] = [[] for _ in lengths]
    questions: list[tuple[Kind, int, int]] = []  # kind, person, answer
    for number, (who, where) in enumerate(zip(people[:known], places, strict=False)):
        # Where there is most room, so that no document has more sentences than fit.
        order = sorted(range(DOCUMENTS), key=lambda one: (len(sentences[one]), rng.random()))
        first, second = rng.sample(order[:3], 2)
        region = rng.choice(_REGIONS)
        sentences[first].append([who, where])
        sentences[second].append([where, region])
        if number < shape.one:
            questions += [("one hop", who, where), ("one hop", where, region)]
        else:
            questions.append(("two hops", who, region))
    for one in sentences:
        rng.shuffle(one)
    # Each document but the last ends with a speaker, and each but the first has the place of the speaker before.
    speakers = list(zip(people[known:], places[known:], strict=True))
    for number, (who, where) in enumerate(speakers):
        sentences[number].append([who, _SPEAKS])
        after = sentences[number + 1]
        after.insert(rng.randint(0, len(after)), [_SHE, where])
    prompt = list(_ROOT)
    for number, (one, length) in enumerate(zip(sentences, lengths, strict=True)):
        document = _fill(one, length, rng)
        if number and speakers:
            is_early = document.index(_SHE) + 2 <= EARLY
            questions.append(("early reference" if is_early else "late reference", *speakers[number - 1]))
        prompt += document
    rng.shuffle(questions)
    for kind, who, answer in questions:
        prompt += [_ASKS[kind], who, answer]
    return prompt, [kind for kind, _, _ in questions]


def _fill(sentences: list[list[int]], length: int, rng: random.Random) -> list[int]:
    """Put words that mean nothing between sentences."""
    room = length - sum(map(len, sentences))
    gaps = [0] * (len(sentences) + 1)
    for _ in range(room):
        gaps[rng.randrange(len(gaps))] += 1
    document = []
    for gap, sentence in zip(gaps, [*sentences, []], strict=True):
        document += [rng.choice(_WORDS) for _ in range(gap)] + sentence
    return document


def build_model(seed: int) -> LlamaForCausalLM:
    """A Llama with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def answers(prompts: Prompts) -> torch.Tensor:
    """The right answers [rows, questions]."""
    return prompts.tokens[:, -prompts.num_asked :][:, _QUESTION - 1 :: _QUESTION]


def answer_logits(model: LlamaForCausalLM, prompts: Prompts, expanded: Expanded, tokens: torch.Tensor) -> torch.Tensor:
    """The answers of a model [rows, questions, vocabulary]. ``tokens``: of the prompts, and further ones to compute."""
    found = logits(model, tokens, expanded, prompts.num_asked)
    return found[:, _QUESTION - 2 :: _QUESTION]


def train(model: LlamaForCausalLM, steps: int, seed: int, *, peak: float = 3e-3) -> float:
    """Train with full attention, lesson after lesson. Returns seconds."""
    training, began = _Training(model, random.Random(seed)), time.monotonic()
    lesson, since = 0, 0
    for step in range(steps):
        # The next lesson comes as soon as this one is learned, and the last one for half of the steps at least.
        is_learned = step - since > 50 and all(share > LEARNED for share in training.right.values())
        if lesson + 1 < len(LESSONS) and (is_learned or 2 * (step - since) > steps):
            lesson, since = lesson + 1, step
            training.right.clear()
        training.step(ROWS[lesson], LESSONS[lesson], None, peak * min(1.0, step / 50))
        if step % 50 == 49:
            _report(f"lesson {lesson + 1}, step {step + 1:5d} {time.monotonic() - began:5.0f} s", training)
    return time.monotonic() - began


def go_on(model: LlamaForCausalLM, steps: int, seed: int, *, mixed: bool, peak: float = 3e-3) -> float:
    """Train on, ever slower, with full attention; ``mixed``: two of three times as segments, with any boundary. Returns
    seconds."""
    rng = random.Random(seed)
    training, began = _Training(model, rng), time.monotonic()
    for step in range(steps):
        boundary = rng.choice(BOUNDARIES) if mixed and rng.random() < 2 / 3 else None
        training.step(ROWS[-1], FULL, boundary, peak * min(1.0, step / 50, 1 - step / steps))
        if step % 50 == 49:
            _report(f"going on, step {step + 1:5d} {time.monotonic() - began:5.0f} s", training)
    return time.monotonic() - began


class _Training:
    """``right``: running shares of right answers, by kind, in which the first questions count less and less."""

    def __init__(self, model: LlamaForCausalLM, rng: random.Random) -> None:
        self._model, self._rng = model, rng
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in model.named_parameters() if p.ndim < 2 or "embed" in name]
        # As for the demo model: Muon for the layers' matrices learns faster per token than AdamW.
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=0.0, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]
        self.right: dict[str, float] = {}

    def step(self, rows: int, shape: Shape, boundary: int | None, rate: float) -> None:
        """Learn from some prompts. ``boundary``: of the documents as segments; None: full attention."""
        prompts = make_prompts(rows, self._rng, shape)
        segments = () if boundary is None else with_boundary(prompts.segments, boundary)
        expanded = expand(prompts.tokens.shape[1], segments, "segments")
        found = answer_logits(self._model, prompts, expanded, prompts.tokens)
        wanted = answers(prompts)
        loss = torch.nn.functional.cross_entropy(found.flatten(0, 1), wanted.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        hits: dict[str, list[bool]] = {}
        rights = (found.argmax(-1) == wanted).flatten().tolist()
        for kind, is_right in zip(itertools.chain(*prompts.kinds), rights, strict=True):
            hits.setdefault(kind, []).append(is_right)
        for name, values in hits.items():
            share = sum(values) / len(values)
            self.right[name] = share + 0.95 * (self.right.get(name, share) - share)


def _report(text: str, training: _Training) -> None:
    shares = ", ".join(f"{kind} {share:.0%}" for kind, share in sorted(training.right.items()))
    print(f"{text}  {shares}", file=sys.stderr, flush=True)
