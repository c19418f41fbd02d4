"""Drafts of a step: tokens that a plan says may follow those of a row, and what became of them."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from pagewise_shared.config.speculative import MAX_SPECULATIVE_TOKENS
from pagewise_shared.speculation import num_accepted

from pagewise_executor.plan_checks import InvalidPlanError

_Int32s = npt.NDArray[np.int32]


@dataclass(slots=True)
class Draft:
    """Tokens [n] that may follow those of a row that decodes, at positions from ``start`` + 1 on.

    ``num_accepted``: how many of them were drawn; known once the step has sampled.
    """

    row: int
    start: int
    tokens: _Int32s
    num_accepted: int = 0

    def computed_tokens(self, num_joined: int, sampled: "array[int]") -> _Int32s:
        """Return the tokens that verify it [1 + n]: the one that was sampled last, and its own.

        ``num_joined``: the tokens that the row joined with; ``sampled``: those that were sampled for it since.

        Raises:
            InvalidPlanError: the result of the step before is not back.
        """
        if not sampled or num_joined + len(sampled) != self.start + 1:
            raise InvalidPlanError(f"row {self.row} has a draft before its last token is known")
        return np.append(np.array(sampled[-1:], np.int32), self.tokens)


def checked_drafts(drafts: Sequence[Draft], slots: Sequence[int], vocab_size: int) -> list[Draft]:
    """Return the drafts of a plan. ``slots``: how many tokens each of their rows has room for.

    Raises:
        InvalidPlanError: a row has two of them or no slots for one, or a draft has no tokens, too many, or impossible
            ones.
    """
    for draft, room in zip(drafts, slots, strict=True):
        if len(draft.tokens) > MAX_SPECULATIVE_TOKENS:
            raise InvalidPlanError(f"row {draft.row}: a draft has at most {MAX_SPECULATIVE_TOKENS} tokens")
        if not len(draft.tokens) or draft.tokens.min() < 0 or draft.tokens.max() >= vocab_size:
            raise InvalidPlanError(f"row {draft.row}: a draft of no tokens, or with one outside the vocabulary")
        if draft.start + 1 + len(draft.tokens) > room:
            raise InvalidPlanError(f"row {draft.row} has no slots for a draft of {len(draft.tokens)} tokens")
    if len({draft.row for draft in drafts}) < len(drafts):
        raise InvalidPlanError("a row has two drafts in one step")
    return list(drafts)


def accept(drafts: Sequence[Draft], sampled: Sequence[int], num_decodes: int) -> list[int]:
    """Accept of each draft what was ``sampled``: all tokens of a step, in the order of ``StepResult.tokens``.

    ``num_decodes``: how many rows sampled one token before them. Returns the indices of the tokens that rows go on
    with, one for each row.
    """
    last, offset = list(range(num_decodes)), num_decodes
    for draft in drafts:
        stop = offset + len(draft.tokens) + 1
        draft.num_accepted = num_accepted(draft.tokens.tolist(), sampled[offset:stop])
        last.append(offset + draft.num_accepted)
        offset = stop
    return [*last, *range(offset, len(sampled))]


def kept_tokens(drafts: Sequence[Draft], num_decodes: int, num_sampled: int) -> list[bool]:
    """Return whether its row keeps each of the ``num_sampled`` tokens of a step: not those behind one that differs from
    its draft."""
    kept = [True] * num_decodes
    for draft in drafts:
        kept += [place <= draft.num_accepted for place in range(len(draft.tokens) + 1)]
    return kept + [True] * (num_sampled - len(kept))
