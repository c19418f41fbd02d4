"""Detects that another process has failed, from the gaps between its heartbeats."""

from collections import deque

_WINDOW = 240
"""Number of heartbeats whose gaps count: the heartbeats of the last minute."""
_LEAST_GAPS = 8
"""Gaps to measure before the time-out follows them."""
_FACTOR = 3.0


class FailureDetector:
    """Suspects a process that has been silent for much longer than the gaps between its heartbeats.

    This is an accrual failure detector (Hayashibara et al., "The phi accrual failure detector", 2004): the time-out
    follows the spread of the measured gaps. The usual ones fit a normal distribution to it. A process that is starved
    of its processor, collects garbage or holds Python's lock makes rare and long pauses, which a mean and a standard
    deviation hardly show. So here the longest gap of the last ``_WINDOW`` measures the spread, and the time-out is
    ``_FACTOR`` times that. If long gaps become rarer exponentially, the longest of n is exceeded by one in n, and three
    times the longest by one in n cubed: phi, the negative decimal logarithm of that, is 7 for n = 240.

    ``least``, ``most``: bounds of the time-out in seconds. It is ``most`` until some gaps are measured. Times are in
    seconds of the caller's clock, which never runs backwards.
    """

    __slots__ = ("_beat", "_count", "_heard", "_longest", "least", "most")

    def __init__(self, now: float, *, least: float, most: float) -> None:
        self.least, self.most = least, most
        self._heard = now
        self._beat: float | None = None
        self._count = 0
        # A monotonic queue for the maximum of a sliding window: number and length of each gap that no later gap
        # exceeds, in descending order of the lengths.
        self._longest: deque[tuple[int, float]] = deque()

    def heard(self, now: float) -> None:
        """Note a sign of life that is no heartbeat."""
        self._heard = now

    def beat(self, now: float) -> None:
        """Note a heartbeat, or the answer to one, and measure the gap before it."""
        self._heard = now
        if self._beat is not None:
            gap = now - self._beat
            self._count += 1
            while self._longest and self._longest[-1][1] <= gap:
                self._longest.pop()
            self._longest.append((self._count, gap))
            if self._longest[0][0] <= self._count - _WINDOW:
                self._longest.popleft()
        self._beat = now

    def stood_still(self, seconds: float, now: float) -> None:
        """Subtract time before ``now`` in which the caller itself was not running: it is no silence of the process."""
        self._heard = min(now, self._heard + seconds)
        if self._beat is not None:
            self._beat = min(now, self._beat + seconds)

    def silence(self, now: float) -> float:
        """Return the seconds since the last sign of life."""
        return now - self._heard

    @property
    def longest_gap(self) -> float | None:
        """The longest recent gap between two heartbeats in seconds; None if too few have been measured."""
        return self._longest[0][1] if self._count >= _LEAST_GAPS else None

    @property
    def timeout(self) -> float:
        """Seconds of silence after which the process is suspected."""
        if (gap := self.longest_gap) is None:
            return self.most
        return min(self.most, max(self.least, _FACTOR * gap))

    def suspects(self, now: float) -> bool:
        """Whether the process has been silent for too long."""
        return self.silence(now) > self.timeout
