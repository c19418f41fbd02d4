"""Beam search: which hypotheses live on, which have ended, and when no better one can come.

Source: transformers' beam search (``GenerationMixin._beam_search``), whose scores and rules these are, so that both
find the same sequences. The blocks of hypotheses are shared like those of any fork.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice, takewhile

from pagewise_shared.sampling import BeamParams

_FORBIDDEN = float("-inf")
"""The log-probability of a token that the grammar does not allow."""


@dataclass(slots=True, frozen=True)
class Continuation:
    """A living hypothesis: number ``parent`` of those before, and one more ``token``. ``score``: log-probability."""

    parent: int
    token: int
    score: float


@dataclass(slots=True, frozen=True)
class Ended:
    """A hypothesis that has ended, with its final score."""

    tokens: Sequence[int]
    score: float


@dataclass(slots=True)
class BeamSearch:
    """The search of one request. ``scores``: of the living hypotheses, in their order."""

    params: BeamParams
    end_tokens: frozenset[int]
    max_tokens: int
    scores: list[float] = field(default_factory=lambda: [0.0])
    ended: list[Ended] = field(default_factory=list)

    def advance(
        self, histories: Sequence[Sequence[int]], candidates: Sequence[Iterable[tuple[int, float]]]
    ) -> list[Continuation] | None:
        """The hypotheses that go on, best first; None: the search is over and ``ended`` holds its results.

        ``histories``: output tokens of the living hypotheses. ``candidates``: for each the likeliest next tokens with
        their log-probabilities, best first. Those that the grammar does not allow are never taken, so that there may
        be fewer hypotheses than ``width``.
        """
        params, width = self.params, self.params.width
        keep = params.num_candidates(len(self.end_tokens))
        # Merged, not sorted, so that few of all continuations are looked at. Of equal ones, that of the earlier
        # hypothesis comes first.
        of_each = (self._continuations(parent, best_first) for parent, best_first in enumerate(candidates))
        ranked = list(islice(merge(*of_each, key=lambda one: -one.score), keep))
        length = len(histories[0]) + 1
        if len(self.ended) < width or params.early_stopping is not True:
            ending = [one for one in ranked[:width] if self._ends(one, length)]
            self._end([(histories[one.parent], one) for one in ending], length)
        living = [one for one in ranked if not self._ends(one, length)][:width]
        self.scores = [one.score for one in living]
        return living if living and self._can_improve(length) else None

    def _ends(self, one: Continuation, length: int) -> bool:
        return one.token in self.end_tokens or length >= self.max_tokens

    def _end(self, ending: Iterable[tuple[Sequence[int], Continuation]], length: int) -> None:
        """Keep these hypotheses of ``length`` tokens, each behind its history, if they are among the best."""
        penalty = length**self.params.length_penalty
        self.ended += [Ended([*history, one.token], one.score / penalty) for history, one in ending]
        self.ended.sort(key=lambda ended: -ended.score)
        del self.ended[self.params.width :]

    def _continuations(self, parent: int, best_first: Iterable[tuple[int, float]]) -> Iterator[Continuation]:
        score = self.scores[parent]
        allowed = takewhile(lambda one: one[1] > _FORBIDDEN, best_first)
        return (Continuation(parent, token, score + logprob) for token, logprob in allowed)

    def _can_improve(self, length: int) -> bool:
        if len(self.ended) < self.params.width:
            return True
        if self.params.early_stopping is True:
            return False
        hopeful = self.params.early_stopping == "never" and self.params.length_penalty > 0
        best = self.scores[0] / (self.max_tokens if hopeful else length) ** self.params.length_penalty
        return bool(best > self.ended[-1].score)

    def results(self, count: int) -> list[Ended]:
        """The best ``count`` hypotheses that have ended."""
        return self.ended[:count]
