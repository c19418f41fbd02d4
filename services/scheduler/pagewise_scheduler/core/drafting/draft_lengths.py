"""How long drafts are: as long as the expected tokens per second grow, by measured acceptance and measured times.

A draft of k tokens gives one token, and one more for each of its tokens that is right. A token can be right only if
the tokens before it are, so each next one is expected to give less. It costs a drafted and a verified token, and every
further token of the longest draft costs a pass of the draft model. So the tokens that are expected to give the most
join the step first, from whichever sequences, and the best of these steps is taken. With many sequences a step takes
as long as its tokens, so drafts become shorter, and none pays in the end.
"""

from collections.abc import Mapping
from operator import itemgetter

from pagewise_scheduler.core.drafting.step_times import StepTimes
from pagewise_scheduler.core.requests.request import RequestSequence
from pagewise_scheduler.core.tiers.cost_model import Costs

_FIRST = 0.7
"""The share of drafted tokens that is expected to be right in a trial, if the tokens before them are."""
_AGAIN = 0.5
"""The share that is expected of the first token of a sequence in a new trial."""
_FOLLOWS, _FOLLOWS_ALL = 0.2, 0.02
"""The weight of a measurement in the share of its sequence, and in the share of all sequences."""
_EXPLORES = 24
"""Of so many steps with drafts one has fewer of them, so that the costs of steps with fewer are known too."""
_MARGIN = 1.03
"""Drafts are to give so many times the tokens per second: the best of several noisy predictions is too good."""
_GRACE = 4
"""Steps without a draft in which the draft model still takes the tokens of a sequence."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 32, 1024
"""Steps for which a sequence is left alone."""


class Acceptance:
    """The expected share of right tokens at each place of a draft, if the tokens before it are right.

    ``shares``: of the places. ``paused_until``: the step before which the sequence is left alone; None: the draft model
    takes its tokens.
    """

    def __init__(self, shares: list[float]) -> None:
        self.shares = shares
        self.paused_until: int | None = None
        self._measured = [0] * len(shares)
        self._idle, self._pause, self._wrong = 0, _SHORTEST_PAUSE, False

    def measure(self, drafted: int, accepted: int) -> None:
        """So many of ``drafted`` tokens were right."""
        self._wrong = not accepted
        for place in range(min(drafted, accepted + 1, len(self.shares))):
            self._measured[place] += 1
            weight = max(_FOLLOWS, 1 / (1 + self._measured[place]))
            self.shares[place] += weight * ((place < accepted) - self.shares[place])

    def chosen(self) -> None:
        """A step drafts for the sequence."""
        self.paused_until, self._idle = None, 0

    def passed_over(self, step: int) -> None:
        """``step`` does not draft for the sequence, though it could."""
        self._idle += 1
        if self.paused_until is None and self._idle > _GRACE:
            self.pause(step)

    def pause(self, step: int) -> None:
        """Leave the sequence alone from ``step`` on: twice as long as before if its last draft was wrong."""
        self._pause = min(_LONGEST_PAUSE, 2 * self._pause) if self._wrong else _SHORTEST_PAUSE
        self.paused_until = step + self._pause

    def is_due(self, step: int) -> bool:
        """Whether the sequence may be drafted for in ``step``; if it was left alone, a new trial begins."""
        if self.paused_until is None:
            return True
        if step < self.paused_until:
            return False
        self.shares[0] = max(self.shares[0], _AGAIN)
        return True


class DraftLengths:
    """The lengths of drafts of up to ``most`` tokens."""

    def __init__(self, most: int, costs: Costs) -> None:
        self.most, self.times = most, StepTimes(costs)
        self._all = [_FIRST] * most
        self._num_chosen = 0

    def new(self) -> Acceptance:
        """Return the acceptance that is expected of a new sequence."""
        return Acceptance(list(self._all))

    def hope(self) -> None:
        """A trial begins: expect as much of drafts as before any was measured, or more."""
        self._all = [max(share, _FIRST) for share in self._all]
        self.times.hope()

    def measure(self, acceptance: Acceptance, drafted: int, accepted: int) -> None:
        """So many of ``drafted`` tokens of a sequence were right."""
        acceptance.measure(drafted, accepted)
        for place in range(min(drafted, accepted + 1, self.most)):
            self._all[place] += _FOLLOWS_ALL * ((place < accepted) - self._all[place])

    def pays(self, num_running: int, prompt: int, output: float) -> bool:
        """Whether drafts are expected to pay for new sequences, where so many run and all are like them.

        ``prompt``: tokens that the draft model takes before it drafts. ``output``: expected tokens of the output.
        """
        gain = tokens = 1.0
        each = least = self.times.plain_seconds(num_running) / _MARGIN
        step, token, each_pass, drafted = self.times.drafting_costs(num_running)
        for passes, share in enumerate(self._all, 1):
            gain *= share
            tokens += gain
            least = min(least, (step + passes * (each_pass + num_running * (token + drafted))) / tokens)
        return output * (each - least) > num_running * prompt * self.times.prompt_token

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
        best = _MARGIN * num_running / self.times.plain_seconds(num_running)
        seconds, verified, each_pass, drafted = self.times.drafting_costs(num_running)
        seconds += drafted * len(candidates)
        tokens, passes, taken, used = float(num_running), 0, 0, set[RequestSequence]()
        for number, (gain, place, sequence) in enumerate(gains[:most], 1):
            tokens += gain
            seconds += verified
            if place == passes:
                passes += 1
                seconds += each_pass
            if sequence in used:  # the first token of a draft comes from the pass that takes the known tokens
                seconds += drafted
            used.add(sequence)
            rate = tokens / seconds
            if rate > best:
                best, taken = rate, number
        if taken:
            self._num_chosen += 1
            turn, rest = divmod(self._num_chosen, _EXPLORES)
            taken = taken if rest else 1 + turn % taken
        lengths: dict[RequestSequence, int] = {}
        for _, _, sequence in gains[:taken]:
            lengths[sequence] = lengths.get(sequence, 0) + 1
        return lengths
