"""Whether the draft model of an executor is used: while it saves time, and now and then for a trial.

Times are counted in steps without drafts. A step with drafts saves the steps that its further tokens would have taken,
less the time by which it is longer. It has to pay back the time of the prompts that the draft model has taken. When
drafts have cost some steps more than they have saved, the draft model rests: for these steps times a factor, so drafts
that do not pay cost about the reciprocal of that factor. The factor doubles from trial to trial, up to a limit, until
drafts pay.
"""

_ALLOWED = 24.0
"""The draft model rests when it has cost so many steps. The first steps of a trial are slow, and tell little. At most
so many saved steps count, so that a change is noticed soon."""
_LEAST, _MOST = 64.0, 512.0
"""The factor."""


class DraftTrials:
    """``resting``: the draft model is not to be used."""

    def __init__(self) -> None:
        self.resting = False
        self._saved = self._debt = 0.0
        self._factor = _LEAST
        self._pause, self._rested = _LEAST * _ALLOWED, 0

    def took_prompt(self, steps: float) -> None:
        """The draft model takes a prompt, in the time of so many steps."""
        self._debt += steps

    def ended(self, num_taken: int) -> None:
        """One of ``num_taken`` sequences whose prompts were taken gets no further drafts."""
        share = self._debt / num_taken
        self._debt -= share
        self._saved -= share
        self._judge()

    def saved(self, steps: float) -> None:
        """A step with drafts has saved the time of so many steps, or cost it."""
        paid = max(0.0, min(self._debt, steps))
        self._debt -= paid
        self._saved += steps - paid
        self._judge()

    def _judge(self) -> None:
        if self._saved >= _ALLOWED:
            self._saved, self._factor = _ALLOWED, _LEAST
        elif self._saved < -_ALLOWED and not self.resting:
            self.resting, self._rested = True, 0
            self._pause = self._factor * (self._debt - self._saved)
            self._saved = self._debt = 0.0
            self._factor = min(_MOST, 2 * self._factor)

    def used(self) -> None:
        """A step makes or verifies drafts."""
        self._rested = 0

    def rested(self) -> bool:
        """A step has no drafts. Return whether a trial is due, which begins with this."""
        self._rested += 1
        if self._rested < self._pause:
            return False
        self.resting, self._rested = False, 0
        return True
