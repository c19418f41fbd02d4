"""The seconds from one plan to the next, by the size of the step between, with drafts and without.

A step without drafts is planned while another is in flight, and a step with drafts is not. So these have lines of their
own, which have the scheduler and the sockets in them as far as the executor waits for them. The time of a token is not
the same in small steps and in large ones. So both have lines for each magnitude of the running sequences.
"""

from typing import NamedTuple

from pagewise_scheduler.core.tiers.cost_model import Costs, OnlineLine

_PLAIN_SCALES = 1.0, 16.0
_SCALES = 1.0, 16.0, 8.0, 32.0
"""The scales of the costs of a step, its tokens, passes and drafted tokens. The smaller a scale, the more its cost
changes with an error. Errors are mostly attributed to the step, because most steps use the draft model alike."""
_PASS, _DRAFT_TOKEN = 0.15, 0.3
"""Costs of a pass of the draft model before any is measured, as a share of a step, and of a token there, of a token."""
_SURE, _EACH = 64, 4
"""After so many times of a kind, one of so many is learned: learning takes longer than the others' bookkeeping."""
_STALE_FIRST, _STALE, _PLAIN = 32, 256, 16
"""After so many steps with drafts, first and in the end, so many have none, so that their time stays known; and so many
before the first."""
_KNOWN = 16
"""Fewer steps with drafts do not tell what such steps cost: the first ones are slow."""
_COLD = 2
"""The first steps without drafts behind others are slow, too, and do not count."""
_PROMPT_SCALES = 1.0, 256.0, 512.0
"""The same of chunks. The draft model mostly takes all of their tokens. So an error goes to the model's cost of a token
and to the draft model's as these are to each other, or else the latter would seem to cost nothing."""


class StepSize(NamedTuple):
    """The work of a step without chunks: ``rows`` that decode, ``verified`` tokens of their drafts, ``passes`` of the
    draft model behind it, and ``drafted`` tokens that these compute."""

    rows: int
    verified: int
    passes: int
    drafted: int

    @property
    def is_plain(self) -> bool:
        """Whether it has no drafts, and makes none."""
        return not self.verified and not self.passes


class ChunkSize(NamedTuple):
    """The work of a step with chunks: ``tokens``, of which the draft model takes ``taken``."""

    tokens: int
    taken: int


class Measured(NamedTuple):
    """A step took so many ``seconds``."""

    size: StepSize
    seconds: float


class _Line(OnlineLine):
    """A line that learns some of many times."""

    num = 0

    def learn(self, seconds: float, *features: float) -> None:
        """It took so long."""
        self.num += 1
        if self.num < _SURE or not self.num % _EACH:
            self.observe(seconds, *features)


class _Times:
    """The times where about as many sequences run. ``step``, ``token``: costs without drafts, until they are measured.

    ``plain_left``: steps that are to have no drafts now.
    """

    def __init__(self, step: float, token: float) -> None:
        self.plain = _Line((step, token), _PLAIN_SCALES)
        self._drafting: _Line | None = None
        self.plain_left, self._since_plain, self._cold = _PLAIN, 0, _COLD
        self._stale = _STALE_FIRST

    @property
    def drafting(self) -> OnlineLine:
        """The line of steps with drafts; until there were some, it follows from the one of steps without."""
        if self._drafting is not None and self._drafting.num >= _KNOWN:
            return self._drafting
        return self._expected()

    def _expected(self) -> _Line:
        step, token = self.plain.constants
        return _Line((step, token, _PASS * step, _DRAFT_TOKEN * token), _SCALES)

    def observe(self, size: StepSize, seconds: float) -> None:
        """A step took so long."""
        if size.is_plain:
            self._since_plain = 0
            if self._cold:
                self._cold -= 1
            else:
                self.plain.learn(seconds, 1, size.rows)
            return
        self._cold = _COLD
        self._drafting = self._drafting or self._expected()
        self._drafting.learn(seconds, 1, size.rows + size.verified, size.passes, size.drafted)
        self._since_plain += 1
        if self._since_plain == self._stale:
            self.plain_left, self._stale = _PLAIN, min(_STALE, 2 * self._stale)
            step, token = self.plain.constants
            self.plain = _Line((step, token), _PLAIN_SCALES)  # which follows new times sooner

    def hope(self) -> None:
        """Forget the times of steps with drafts: they may have been measured at a bad moment."""
        self._drafting = None


class StepTimes:
    """Learns the times of the steps of one executor. ``planned`` and ``returned`` tell when.

    A time counts where as many steps were in flight at both plans, and one has come back between: then it is that
    step's.
    """

    def __init__(self, costs: Costs) -> None:
        self._first = costs.step, costs.token
        self._times: dict[int, _Times] = {}
        token = costs.token
        self._prompts = OnlineLine((costs.step, token, _DRAFT_TOKEN * token), _PROMPT_SCALES)
        self._returned: list[StepSize | ChunkSize | None] = []
        self._last: tuple[float, int] | None = None

    def _at(self, rows: int) -> _Times:
        found = self._times.get(magnitude := rows.bit_length())
        if found is None:
            near = min(self._times, key=lambda one: abs(one - magnitude), default=None)
            step, token = self._first if near is None else self._times[near].plain.constants
            found = self._times[magnitude] = _Times(step, token)
        return found

    def planned(self, now: float, in_flight: int) -> Measured | None:
        """A step is planned at ``now``, in seconds, while ``in_flight`` others are in flight. Return the time that the
        one before took, if it counts."""
        found, last = None, self._last
        self._last = now, in_flight
        if last is not None and len(self._returned) == 1 and last[1] == in_flight and now > last[0]:
            size, seconds = self._returned[0], now - last[0]
            if isinstance(size, ChunkSize):
                self._prompts.observe(seconds, 1, *size)
            elif size is not None and (in_flight > 0) == size.is_plain:
                self._at(size.rows).observe(size, seconds)
                found = Measured(size, seconds)
        self._returned.clear()
        return found

    def returned(self, size: StepSize | ChunkSize | None) -> None:
        """A step of this size has come back; None: it has computed nothing."""
        self._returned.append(size)

    def clear(self) -> None:
        """No step is in flight any more."""
        self._returned.clear()
        self._last = None

    def hope(self) -> None:
        """Forget the times of steps with drafts: they may have been measured at a bad moment."""
        for one in self._times.values():
            one.hope()

    def wants_plain(self, num_running: int) -> bool:
        """Return whether the step that is planned is to have no drafts, so that the time of such steps is known."""
        times = self._at(num_running)
        if not times.plain_left:
            return False
        times.plain_left -= 1
        return True

    @property
    def prompt_token(self) -> float:
        """Seconds that the draft model takes for a token of a prompt."""
        return self._prompts.constants[-1]

    def plain_seconds(self, num_running: int) -> float:
        """Seconds of a step without drafts."""
        return max(1e-9, self._at(num_running).plain.predict(1, num_running))

    def drafting_costs(self, num_running: int) -> tuple[float, float, float, float]:
        """Seconds of a step with drafts where so many sequences run, and of each verified token, pass of the draft
        model, and token there more."""
        step, token, each_pass, drafted = self._at(num_running).drafting.constants
        return max(1e-9, step + token * num_running), token, each_pass, drafted
