"""The budget of a model's thinking. When it is used up, the tokens that end the thinking are sampled, for any logits.

The forced tokens depend on the output's tokens alone. So a sequence that is preempted, moved or resumed continues with
the same tokens.
"""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

MAX_OPENING = 16
"""Maximum number of tokens that begin thinking."""
MAX_FORCED = 128
"""Maximum number of tokens that are forced when a budget is used up."""
UNLIMITED = 2**31 - 1
"""Number of free tokens of an output without further forced tokens; also the largest budget."""


class ThinkingBudget(Struct, frozen=True, array_like=True, omit_defaults=True):
    """The most tokens that an output may spend on thinking.

    Fields:
        num_tokens: the budget. Delimiters and ``forced`` are not counted.
        end: the token that ends thinking.
        forced: the tokens that are sampled when the budget is used up. One of them is ``end``.
        opening: the tokens that begin thinking.
        opens_within: thinking begins only if ``opening`` begins within this number of first tokens of the output. 0:
            the output begins with thinking, and has no further thinking later.
        other_ends: tokens that end thinking too, because calls begin with them.
    """

    num_tokens: int
    end: int
    forced: Annotated[tuple[int, ...], Meta(min_length=1, max_length=MAX_FORCED)]
    opening: Annotated[tuple[int, ...], Meta(min_length=1, max_length=MAX_OPENING)]
    opens_within: int = 0
    other_ends: Annotated[tuple[int, ...], Meta(max_length=MAX_OPENING)] = ()

    def error(self, vocab_size: int) -> str | None:
        """Return why the values are invalid for a vocabulary of this size (0: unknown); None if they are valid."""
        if not (0 <= self.num_tokens <= UNLIMITED and 0 <= self.opens_within <= UNLIMITED):
            return f"a thinking budget of {self.num_tokens} tokens, which begins within {self.opens_within}"
        if not (0 < len(self.forced) <= MAX_FORCED and 0 < len(self.opening) <= MAX_OPENING):
            return f"a thinking budget with {len(self.forced)} forced tokens and {len(self.opening)} of the opening"
        if len(self.other_ends) > MAX_OPENING:
            return f"a thinking budget with {len(self.other_ends)} other ends"
        if self.end not in self.forced:
            return "a thinking budget whose forced tokens do not end the thinking"
        tokens = self.end, *self.forced, *self.opening, *self.other_ends
        if min(tokens) < 0 or max(tokens) > UNLIMITED or (vocab_size and max(tokens) >= vocab_size):
            return f"a thinking budget with a token outside the vocabulary of {vocab_size}"
        return None


class ThinkingState:
    """Counts the thinking of one output. ``num_tokens``: the number of tokens of the output so far."""

    __slots__ = ("_budget", "_ends", "_inside", "_num_forced", "_num_opened", "_used", "num_tokens")

    def __init__(self, budget: ThinkingBudget) -> None:
        self.num_tokens = 0
        self._budget = budget
        self._ends = frozenset((budget.end, *budget.other_ends))
        self._inside = budget.opens_within == 0
        self._used = 0
        self._num_opened = 0  # tokens of the opening at the end of the output
        self._num_forced = 0  # tokens of ``forced`` that have been sampled

    def extend(self, tokens: Sequence[int]) -> None:
        """Take the next tokens of the output."""
        budget, used = self._budget, self._used + len(tokens)
        if self._inside and not self._num_forced and used <= budget.num_tokens and self._ends.isdisjoint(tokens):
            self._used, self.num_tokens = used, self.num_tokens + len(tokens)
            return
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        """Take the next token of the output. It differs from ``forced`` only if a grammar has refused ``forced``."""
        budget = self._budget
        if (forced := self.forced) is not None:
            self._num_forced = (self._num_forced + 1) % len(budget.forced) if token == forced else 0
        if self._inside:
            if token in self._ends:
                self._inside = False
            else:
                self._used += 1
        elif self._num_opened or self.num_tokens < budget.opens_within:
            self._open(token)
        self.num_tokens += 1

    def _open(self, token: int) -> None:
        opening = self._budget.opening
        if token == opening[self._num_opened]:
            self._num_opened += 1
        else:
            self._num_opened = int(token == opening[0] and self.num_tokens < self._budget.opens_within)
        if self._num_opened == len(opening):
            self._inside, self._num_opened = True, 0

    @property
    def forced(self) -> int | None:
        """The next token of the output; None: it is sampled freely."""
        budget = self._budget
        if self._num_forced or (self._inside and self._used >= budget.num_tokens):
            return budget.forced[self._num_forced]
        return None

    @property
    def num_free(self) -> int:
        """The number of next tokens that are certain to be sampled freely."""
        budget = self._budget
        if self.forced is not None:
            return 0
        left = max(0, budget.num_tokens - self._used)
        if self._inside:
            return left
        if self._num_opened or self.num_tokens < budget.opens_within:
            return min(UNLIMITED, len(budget.opening) - self._num_opened + left)
        return UNLIMITED

    @property
    def over(self) -> bool:
        """Whether no token will be forced any more."""
        return self.num_free == UNLIMITED
