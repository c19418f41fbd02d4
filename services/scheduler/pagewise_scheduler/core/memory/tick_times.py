"""The times of an eviction policy's ticks: blocks remember the tick of their last use, and reports show its time."""

from bisect import bisect_left

_MOST = 4096


class TickTimes:
    """Samples of an eviction policy's ticks and their times. A full table drops every second of its older samples."""

    def __init__(self) -> None:
        self._ticks: list[int] = []
        self._times: list[float] = []

    def note(self, tick: int, now: float) -> None:
        """The policy has reached a tick by now (seconds)."""
        if self._ticks and tick <= self._ticks[-1]:
            return
        self._ticks.append(tick)
        self._times.append(now)
        if len(self._ticks) > _MOST:
            half = _MOST // 2
            self._ticks[:half], self._times[:half] = self._ticks[:half:2], self._times[:half:2]

    def time_of(self, tick: int, now: float) -> float:
        """The time of the first sample at which a tick had been reached; ``now`` if there is none yet."""
        index = bisect_left(self._ticks, tick)
        return self._times[index] if index < len(self._ticks) else now
