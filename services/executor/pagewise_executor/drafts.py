"""Drafts of a step: tokens that may follow the tokens of a row, and how many of them were accepted."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from pagewise_shared.config.speculative import MAX_SPECULATIVE_TOKENS
from pagewise_shared.sampling import num_accepted

from pagewise_executor.plan_checks import InvalidPlanError

_Int32s = npt.NDArray[np.int32]


class KnownTokens(Protocol):
    """The tokens of a row: ``tokens`` when it joined, and ``sampled`` since, as far as they have reached the host."""

    tokens: _Int32s
    sampled: "array[int]"


@dataclass(slots=True)
class Draft:
    """Tokens [n] that may follow in a row that decodes, at positions from ``start`` + 1 on.

    ``last``: the token before them, which the row sampled last. ``num_accepted``: how many of them were sampled too;
    known once the step has sampled.
    """

    row: int
    start: int
    tokens: _Int32s
    last: int = 0
    num_accepted: int = 0

    @property
    def computed_tokens(self) -> _Int32s:
        """The tokens that verify it [1 + n]: the last sampled one, and its own."""
        return np.append(np.array([self.last], np.int32), self.tokens)

    def follow(self, held: KnownTokens) -> None:
        """Take the token before the draft from its row.

        Raises:
            InvalidPlanError: the result of the step before is not back.
        """
        if not held.sampled or len(held.tokens) + len(held.sampled) != self.start + 1:
            raise InvalidPlanError(f"row {self.row} has a draft before its last token is known")
        self.last = held.sampled[-1]


def checked_drafts(
    drafts: Sequence[Draft], rows: Mapping[int, KnownTokens], slots: Sequence[int], vocab_size: int
) -> list[Draft]:
    """Return the drafts of a plan. ``rows``: by their numbers. ``slots``: how many tokens each of the drafts' rows has
    room for.

    Raises:
        InvalidPlanError: a row has two of them, no slots for one, or a last token that is not known yet, or a draft has
            no tokens, too many, or impossible ones.
    """
    for draft, room in zip(drafts, slots, strict=True):
        if len(draft.tokens) > MAX_SPECULATIVE_TOKENS:
            raise InvalidPlanError(f"row {draft.row}: a draft has at most {MAX_SPECULATIVE_TOKENS} tokens")
        if not len(draft.tokens) or draft.tokens.min() < 0 or draft.tokens.max() >= vocab_size:
            raise InvalidPlanError(f"row {draft.row}: a draft of no tokens, or with one outside the vocabulary")
        if draft.start + 1 + len(draft.tokens) > room:
            raise InvalidPlanError(f"row {draft.row} has no slots for a draft of {len(draft.tokens)} tokens")
        draft.follow(rows[draft.row])
    if len({draft.row for draft in drafts}) < len(drafts):
        raise InvalidPlanError("a row has two drafts in one step")
    return list(drafts)


def accept(drafts: Sequence[Draft], sampled: Sequence[int], num_decodes: int) -> list[int]:
    """Accept the tokens of each draft that were ``sampled``: all tokens of a step, in the order of
    ``StepResult.tokens``.

    ``num_decodes``: the number of tokens before the drafts', one per row. Returns by row the index of the token with
    which it goes on.
    """
    last, offset = list(range(num_decodes)), num_decodes
    for draft in drafts:
        stop = offset + len(draft.tokens) + 1
        draft.num_accepted = num_accepted(draft.tokens.tolist(), sampled[offset:stop])
        last.append(offset + draft.num_accepted)
        offset = stop
    return [*last, *range(offset, len(sampled))]


def kept_tokens(drafts: Sequence[Draft], num_decodes: int, num_sampled: int) -> list[bool]:
    """Return whether the row keeps each of the ``num_sampled`` tokens of a step. It drops the tokens behind one that
    differs from the draft."""
    kept = [True] * num_decodes
    for draft in drafts:
        kept += [index <= draft.num_accepted for index in range(len(draft.tokens) + 1)]
    return kept + [True] * (num_sampled - len(kept))
