"""Chooses the number of CPU threads of a step: all, or one, where more of them hardly make it faster.

A step of few tokens mostly reads weights. One core may use the whole bandwidth of the memory, and more threads have to
be woken for each layer. The number of tokens from which a second thread pays depends on the model, the machine and its
other work. So from time to time one step runs with the other number, and is compared with the steps before and behind
it, which compute the same sequences.
"""

import contextlib
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

_SLOWER = 1.05
"""One thread computes a step if it takes at most so many times as long as all threads."""
_MOST_TOKENS = 64
"""Of a step that runs with one thread as a trial. Larger ones are bound by computing."""
_KEPT = 7
"""Comparisons of which the median counts: among them may be steps that other processes have disturbed."""
_STEPS_BEFORE_TRIAL = 64
_STEPS_AT_FIRST = 4
"""The same while there are fewer than ``_KEPT`` comparisons, or the last one speaks against the choice."""


@dataclass(slots=True)
class _Size:
    """The measurements of steps of similar size: ``ratios`` of the times by one thread and by all, and the choice."""

    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    alone: bool = False
    steps: int = 0

    def tries(self) -> bool:
        """Count a step; return whether it is a trial with the other number of threads."""
        self.steps += 1
        settled = len(self.ratios) == _KEPT and self.alone == (self.ratios[-1] <= _SLOWER)
        if self.steps <= (_STEPS_BEFORE_TRIAL if settled else _STEPS_AT_FIRST):
            return False
        self.steps = 0
        return True

    def compare(self, ratio: float) -> None:
        self.ratios.append(ratio)
        self.alone = statistics.median(self.ratios) <= _SLOWER


class StepThreads:
    """Chooses between one thread and ``most``. ``clock``: seconds.

    It sets the threads of torch, and of the CPU operations, for the thread that it is used on.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._most, self._clock = most, clock
        self._sizes: defaultdict[int, _Size] = defaultdict(_Size)  # by the bits of their number of tokens
        self._last = (0, 0, 0.0)  # tokens, threads and seconds of the last step

    @contextlib.contextmanager
    def step(self, tokens: int) -> Iterator[None]:
        """Compute a step of so many tokens, including tokens of a draft model, within this context."""
        if self._most == 1:
            yield
            return
        size, alone = self._sizes[tokens.bit_length()], False
        if tokens <= _MOST_TOKENS:
            # A trial behind a step of another size, such as that of a prompt, would be compared with none.
            alone = size.alone != (tokens == self._last[0] and size.tries())
        threads = 1 if alone else self._most
        torch.set_num_threads(threads)
        began = self._clock()
        try:
            yield
            seconds = self._clock() - began
        finally:
            if threads != self._most:  # the work behind a step, such as moving blocks, uses all threads
                torch.set_num_threads(self._most)
        same, other, before = self._last
        if tokens == same and threads != other:
            size.compare(seconds / before if threads == 1 else before / seconds)
        self._last = tokens, threads, seconds
