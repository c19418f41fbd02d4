"""The results of a transformers model for a prompt whose documents were computed elsewhere, in one forward pass.

There is a copy of a document's tokens for each computation of it: once for its KV, behind a prefix of its own, and once
at its own position in the prompt. The attention mask selects the copies that a token sees. RoPE knows distances only,
so KV that is rotated to another position is KV that was computed at that position: nothing has to be rotated here.
Gradients flow, so models can be trained with any of it.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import transformers
from pagewise_shared.segments import Segment

Reuse = Literal["segments", "rotated", "copied", "left out"]
"""How the KV of documents is come by. ``segments``: as Pagewise does, behind the root. ``rotated``: it happened to be
computed behind another prompt's prefix, and its K are rotated to the document's position. ``copied``: the same, not
rotated. ``left out``: no token attends to the documents."""


class Expanded(NamedTuple):
    """A prompt with all copies of its tokens.

    ``sources`` int64 [n]: of each copy, its token in the prompt with the other one behind it. ``positions`` int64 [n].
    ``mask`` bool [1, 1, n, n]: which copies (columns) each of them (rows) attends to. The last ones are the prompt's
    tokens behind the last document.
    """

    sources: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor


def expand(num_tokens: int, segments: Sequence[Segment], reuse: Reuse, others: Sequence[range] = ()) -> Expanded:
    """Return the copies of the tokens of a prompt with ``segments``; none: everything is computed in its place.

    ``others``: of each segment, the tokens that its KV was computed behind instead of the root, unless ``reuse`` is
    ``segments``; their numbers count on behind the prompt.
    """
    sources: list[int] = []
    positions: list[int] = []
    seen: list[tuple[list[int], int]] = []  # the tokens that each stretch of copies sees beside itself, and its length
    before: list[int] = []

    def compute(tokens: Sequence[int], position: int, context: list[int]) -> list[int]:
        copies = list(range(len(sources), len(sources) + len(tokens)))
        sources.extend(tokens)
        positions.extend(range(position, position + len(tokens)))
        seen.append((list(context), len(tokens)))
        return copies

    at = 0
    for number, one in enumerate(segments):
        before += compute(range(at, one.start), at, before)
        at = one.stop
        if reuse == "left out":
            continue
        prefix = range(one.root) if reuse == "segments" else others[number]
        position = 0 if reuse == "copied" else one.start - len(prefix)
        context = compute(prefix, position, [])
        original = compute(range(one.start, one.stop), position + len(prefix), context)
        before += compute(range(one.start, one.moved), one.start, before)
        before += original[one.moved - one.start :]
    compute(range(at, num_tokens), at, before)

    mask = torch.zeros(len(sources), len(sources), dtype=torch.bool)
    row = 0
    for context, length in seen:
        rows = slice(row, row + length)
        mask[rows, context] = True
        mask[rows, rows] = torch.ones(length, length, dtype=torch.bool).tril()
        row += length
    return Expanded(torch.tensor(sources), torch.tensor(positions), mask[None, None])


def with_boundary(segments: Sequence[Segment], boundary: int) -> list[Segment]:
    return [one._replace(moved=min(one.stop, one.start + boundary)) for one in segments]


WHOLE = "whole prompt"


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


def expand_by(num_tokens: int, segments: Sequence[Segment], way: Way, others: Sequence[range]) -> Expanded:
    """``segments``: with boundary 0. ``others``: the tokens before them when their KV was computed, unless as
    segments."""
    if way.reuse is None:
        return expand(num_tokens, (), "segments")
    return expand(num_tokens, with_boundary(segments, way.boundary), way.reuse, others)


def logits(model: transformers.PreTrainedModel, tokens: torch.Tensor, expanded: Expanded, last: int) -> torch.Tensor:
    """Return the logits [rows, last, vocabulary] of the last tokens of prompts [rows, tokens]."""
    output = model(
        input_ids=tokens[:, expanded.sources],
        position_ids=expanded.positions[None],
        attention_mask=expanded.mask,
        use_cache=False,
        logits_to_keep=last,
    )
    found: torch.Tensor = output.logits
    return found
