"""The clock of every time in the scheduler."""

from time import monotonic


def clock() -> float:
    """Now, in seconds of the monotonic clock."""
    return monotonic()
