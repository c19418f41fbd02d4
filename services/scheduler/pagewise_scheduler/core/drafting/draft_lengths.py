"""How long drafts are: as long as the expected tokens per second grow, by measured acceptance and measured times.

A draft of k tokens gives one token, and one more for each of its tokens that is right. A token can be right only if
the tokens before it are, so each next one is expected to give less. It costs a drafted and a verified token, and every
further token of the longest draft costs a pass of the draft model. So the tokens that are expected to give the most
join the step first, from whichever sequences, and the best of these steps is taken. With many sequences a step takes
as long as its tokens, so drafts become shorter, and none pays in the end.
"""

from collections.abc import Mapping
from operator import itemgetter
from typing import NamedTuple

from pagewise_scheduler.core.requests.request import RequestSequence
from pagewise_scheduler.core.tiers.cost_model import Costs, OnlineLine

_FIRST = 0.5
"""The share of drafted tokens that is expected to be right until any was measured, if the tokens before them are."""
_FOLLOWS, _FOLLOWS_ALL = 0.2, 0.02
"""The weight of a measurement in the share of its sequence, and in the share of all sequences."""
_RECOVERS, _EXPECTED = 0.002, 0.5
"""Each step without a draft moves the share of a sequence by this factor towards this value, so that drafts resume."""
_EXPLORES = 24
"""Of so many steps with drafts one has fewer of them, so that the costs of steps with fewer are known too."""
_SCALES = 1.0, 16.0, 8.0, 32.0
"""The scales of the costs of a step, its tokens, passes and drafted tokens. The smaller a scale, the more its cost
changes with an error. Errors are mostly attributed to the step, because most steps use the draft model alike."""
_PASS, _DRAFT_TOKEN = 0.15, 0.3
"""Costs of a pass of the draft model before any is measured, as a share of a step, and of a token there, of a token."""


class StepSize(NamedTuple):
    """The work of a step without chunks: ``tokens`` that it computes, ``passes`` of the draft model behind it, and
    ``drafted`` tokens that these compute."""

    tokens: int
    passes: int
    drafted: int


class StepTimes:
    """The seconds from one plan to the next by the size of the step between, scheduler and sockets included.

    ``planned`` and ``returned`` tell when. A time counts where as many steps were in flight at both plans, and one has
    come back between: then it is that step's. So it is longer where plans wait for results.
    """

    def __init__(self, costs: Costs) -> None:
        constants = costs.step, costs.token, _PASS * costs.step, _DRAFT_TOKEN * costs.token
        self._line = OnlineLine(constants, _SCALES)
        self._returned: list[StepSize | None] = []
        self._last: tuple[float, int] | None = None

    def planned(self, now: float, in_flight: int) -> None:
        """A step is planned at ``now``, in seconds, while ``in_flight`` others are in flight."""
        if self._last is not None and len(self._returned) == 1 and self._returned[0] is not None:
            before, depth = self._last
            if depth == in_flight and now > before:
                self._line.observe(now - before, 1, *self._returned[0])
        self._returned.clear()
        self._last = now, in_flight

    def returned(self, size: StepSize | None) -> None:
        """A step of this size has come back; None: it had chunks."""
        self._returned.append(size)

    def clear(self) -> None:
        """No step is in flight any more."""
        self._returned.clear()
        self._last = None

    @property
    def drafted_token(self) -> float:
        """Seconds that a token takes in the draft model."""
        return self._line.constants[-1]

    def seconds(self, size: StepSize) -> float:
        """Seconds of such a step."""
        return max(1e-9, self._line.predict(1, *size))


class Acceptance:
    """The expected share of right tokens at each place of a draft, if the tokens before it are right.

    ``shares``: of the places. ``idle``: steps since the last draft.
    """

    def __init__(self, shares: list[float]) -> None:
        self.shares = shares
        self._measured = [0] * len(shares)
        self.idle = 0

    def measure(self, drafted: int, accepted: int) -> None:
        """So many of ``drafted`` tokens were right."""
        for place in range(min(drafted, accepted + 1, len(self.shares))):
            self._measured[place] += 1
            weight = max(_FOLLOWS, 1 / (1 + self._measured[place]))
            self.shares[place] += weight * ((place < accepted) - self.shares[place])

    def rest(self) -> None:
        """A step has no draft."""
        self.idle += 1
        self.shares[0] += _RECOVERS * (_EXPECTED - self.shares[0])


class DraftLengths:
    """The lengths of drafts of up to ``most`` tokens."""

    def __init__(self, most: int, costs: Costs) -> None:
        self.most, self.times = most, StepTimes(costs)
        self._all = [_FIRST] * most
        self._num_chosen = 0

    def new(self) -> Acceptance:
        """Return the acceptance that is expected of a new sequence. Each call moves this expectation a little towards
        ``_EXPECTED``, so that a model whose drafts were wrong is used again."""
        self._all = [share + _FOLLOWS_ALL * (_EXPECTED - share) for share in self._all]
        return Acceptance(list(self._all))

    def measure(self, acceptance: Acceptance, drafted: int, accepted: int) -> None:
        """So many of ``drafted`` tokens of a sequence were right."""
        acceptance.measure(drafted, accepted)
        for place in range(min(drafted, accepted + 1, self.most)):
            self._all[place] += _FOLLOWS_ALL * ((place < accepted) - self._all[place])

    def pays(self, num_running: int, prompt: int, output: int) -> bool:
        """Whether drafts are expected to pay for new sequences, where so many run and all are like them.

        ``prompt``: tokens that the draft model takes before it drafts. ``output``: tokens of the output, at most.
        """
        times, gain, tokens = self.times, 1.0, 1.0
        each = least = times.seconds(StepSize(num_running, 0, 0))
        for passes, share in enumerate(self._all, 1):
            gain *= share
            tokens += gain
            size = StepSize((1 + passes) * num_running, passes, passes * num_running)
            least = min(least, times.seconds(size) / tokens)
        return output * (each - least) > num_running * prompt * times.drafted_token

    def choose(
        self, candidates: Mapping[RequestSequence, tuple[Acceptance, int]], num_running: int, most: int
    ) -> dict[RequestSequence, int]:
        """Return the number of tokens to draft for each sequence, without sequences for which it is 0.

        ``candidates``: the acceptance of each sequence, and the most tokens that it could take. ``num_running``:
        sequences that decode, these included. ``most``: most tokens of all drafts together.
        """
        gains: list[tuple[float, int, RequestSequence]] = []
        for sequence, (acceptance, limit) in candidates.items():
            gain = 1.0
            for place, share in enumerate(acceptance.shares[:limit]):
                gain *= share
                gains.append((gain, place, sequence))
        gains.sort(key=itemgetter(0), reverse=True)
        times, rows = self.times, len(candidates)
        best = num_running / times.seconds(StepSize(num_running, 0, 0))
        tokens, passes, taken, drafted, used = float(num_running), 0, 0, rows, set[RequestSequence]()
        for number, (gain, place, sequence) in enumerate(gains[:most], 1):
            tokens += gain
            passes = max(passes, place + 1)
            drafted += sequence in used  # its first token comes from the pass that takes the known tokens
            used.add(sequence)
            rate = tokens / times.seconds(StepSize(num_running + number, passes, drafted))
            if rate > best:
                best, taken = rate, number
        if taken:
            self._num_chosen += 1
            turn, rest = divmod(self._num_chosen, _EXPLORES)
            taken = taken if rest else turn % taken
        lengths: dict[RequestSequence, int] = {}
        for _, _, sequence in gains[:taken]:
            lengths[sequence] = lengths.get(sequence, 0) + 1
        return lengths
