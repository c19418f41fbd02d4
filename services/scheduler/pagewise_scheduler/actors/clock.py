"""The clock of every time in the scheduler."""

from time import monotonic

clock = monotonic
"""Now, in seconds of the monotonic clock."""
