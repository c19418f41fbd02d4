"""Drafts: tokens that a sequence may go on with, which one step verifies."""

from collections.abc import Sequence


def num_accepted(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """Return how many tokens of a draft [n] are accepted: those before the first that differs from what was drawn.

    ``drawn`` [n + 1]: the tokens that were drawn in the place of the draft's tokens, each behind those before it, and
    the one behind the whole draft. The executor and the scheduler both compute this, each from what it has.
    """
    return next((index for index, token in enumerate(draft) if token != drawn[index]), len(draft))
