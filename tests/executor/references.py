"""Tokens of transformers for the same prompts, and its log-probabilities of answers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from pagewise_scheduler.core.requests.request import Request
from pagewise_shared.sampling import BeamParams
from pagewise_shared.segments import TOKEN_ID
from torch.nn.functional import log_softmax

from tests.model_builders import EAGER

CLOSE = 1e-3
"""The greatest difference between log-probabilities of chunks, blocks and batches, and of one pass."""


@dataclass(frozen=True)
class Answer:
    """Tokens that were sampled behind a prompt, one at least, and the log-probability of each.

    ``name``: for messages. ``greedy``: whether each token is to be the likeliest one.
    """

    name: str
    prompt: tuple[int, ...]
    tokens: list[int]
    logprobs: list[float]
    greedy: bool


def check_answers(path: Path, answers: Iterable[Answer]) -> float:
    """Compare every token with one uncached pass of the model at ``path`` over its prompt and answer; returns by how
    much the log-probability of one differs at most."""
    eager = "eager" if any(name in str(path) for name in EAGER) else "sdpa"
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=eager)
    of_text: dict[tuple[int, ...], list[Answer]] = {}
    for answer in answers:
        of_text.setdefault((*answer.prompt, *answer.tokens), []).append(answer)
    texts = sorted(of_text, key=len)
    most = 0.0
    for first in range(0, len(texts), 64):
        some = texts[first : first + 64]
        ids = torch.zeros(len(some), len(some[-1]), dtype=torch.int64)
        for row, text in enumerate(some):
            ids[row, : len(text)] = torch.tensor(text)
        with torch.inference_mode():
            expected = log_softmax(model(ids, use_cache=False).logits, -1)
        for row, text in enumerate(some):
            most = max(most, *(_difference(answer, expected[row]) for answer in of_text[text]))
    return most


def _difference(answer: Answer, expected: torch.Tensor) -> float:
    """By how much the log-probabilities of an answer differ at most from the ``expected`` ones [tokens, vocabulary] of
    its text. Of a greedy one, each token has to be the likeliest one."""
    start = len(answer.prompt)
    rows = expected[start - 1 : start - 1 + len(answer.tokens)]
    found = rows.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    name = f"{answer.name} behind {start} tokens"
    if answer.greedy:
        likeliest = rows.argmax(-1).tolist()
        assert (found >= rows.max(-1).values - CLOSE).all(), f"{name}: {answer.tokens} instead of {likeliest}"
    most = float((torch.tensor(answer.logprobs, dtype=torch.float32) - found).abs().max())
    assert most < CLOSE, f"{name}: a log-probability differs by {most}"
    return most


def reference(
    model: transformers.PreTrainedModel, prompts: list[list[int]], lengths: list[int], device: str
) -> list[list[int]]:
    """Tokens of ``generate()`` for each prompt, greedily, with exactly ``lengths`` tokens."""
    outputs = []
    for prompt, max_tokens in zip(prompts, lengths, strict=True):
        ids = torch.tensor([prompt], device=device)
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
        )
        outputs.append(generated[0, len(prompt) :].tolist())
    return outputs


def beam_reference(
    model: transformers.PreTrainedModel,
    prompt: list[int],
    max_tokens: int,
    beam: BeamParams,
    n: int,
    ends: list[int],
    allowed: Callable[[int, torch.Tensor], list[int]] | None = None,
) -> list[list[int]]:
    """The ``n`` best beams that ``generate()`` finds, each up to and including one of the tokens ``ends``.

    ``allowed``: of which tokens the next one is, as ``prefix_allowed_tokens_fn``.
    """
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        num_beams=beam.width,
        num_return_sequences=n,
        length_penalty=beam.length_penalty,
        early_stopping=beam.early_stopping,
        do_sample=False,
        eos_token_id=ends or None,
        pad_token_id=0,
        prefix_allowed_tokens_fn=allowed,
    )
    outputs = []
    for row in found[:, len(prompt) :].tolist():
        stop = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        outputs.append(row[:stop])
    return outputs


def segments_reference(model: transformers.PreTrainedModel, request: Request, device: str = "cpu") -> list[int]:
    """Tokens that a model generates greedily for a prompt with segments.

    Each segment is computed behind the root alone, at positions such that the segment is at its own position in the
    prompt, and the root as far before it as at the canonical position. RoPE knows distances only, so nothing has to be
    rotated.
    """
    prompt = [token & TOKEN_ID for token in request.prompt_token_ids]
    cache = transformers.DynamicCache()

    def compute(start: int, stop: int) -> torch.Tensor | None:
        if start == stop:
            return None
        assert cache.get_seq_length() == start
        output = model(
            torch.tensor([prompt[start:stop]], device=device),
            position_ids=torch.arange(start, stop, device=device)[None],
            past_key_values=cache,
            use_cache=True,
        )
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    at = 0
    for segment in request.segments:
        compute(at, segment.moved)
        at = segment.stop
        if segment.moved == segment.stop:
            continue
        original = transformers.DynamicCache()
        tokens = prompt[: segment.root] + prompt[segment.start : segment.stop]
        positions = torch.arange(len(tokens), device=device) + segment.distance
        model(
            torch.tensor([tokens], device=device),
            position_ids=positions[None],
            past_key_values=original,
            use_cache=True,
        )
        first = segment.root + segment.moved - segment.start
        for number, layer in enumerate(original.layers):
            cache.update(layer.keys[:, :, first:], layer.values[:, :, first:], number)
    logits = compute(at, len(prompt))
    assert logits is not None
    generated: list[int] = []
    for _ in range(request.max_tokens):
        generated.append(int(logits.argmax()))
        prompt.append(generated[-1])
        logits = compute(len(prompt) - 1, len(prompt))
        assert logits is not None
    return generated
