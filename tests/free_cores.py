"""The share of this machine that other processes leave, for bounds in seconds."""

import contextlib

import psutil


class FreeCores:
    """How much of this machine was free for the tests since this object was made.

    A bound in seconds means seconds of a machine that has nothing else to do. Where other processes take half of it,
    everything takes twice as long.
    """

    def __init__(self) -> None:
        self._began = self._times()

    def share(self) -> float:
        """The share of all cores, from 0.1 to 1, that no processes have used but this one and its children."""
        total, idle, own = (now - before for now, before in zip(self._times(), self._began, strict=True))
        return max(0.1, min(1.0, (idle + own) / total)) if total else 1.0

    @staticmethod
    def _times() -> tuple[float, float, float]:
        """Seconds of all cores: in total, of idle ones, and of this process and its descendants."""
        cpu, own = psutil.cpu_times(), 0.0
        this = psutil.Process()
        for process in (this, *this.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                own += sum(process.cpu_times()[:4])  # with the times of children that have ended
        # The time of guests is part of the users'.
        return sum(cpu) - getattr(cpu, "guest", 0.0) - getattr(cpu, "guest_nice", 0.0), cpu.idle + cpu.iowait, own
