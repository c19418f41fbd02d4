"""How many CPU threads compute a step: all that there are, or one, where more of them hardly make it faster.

A step of few tokens mostly reads weights, for which one core may take all that the memory gives, and threads that meet
behind every layer have to be woken for each. With how many tokens a second thread begins to pay depends on the model,
the machine, and what else runs there. So steps are tried the other way now and then, and are compared with the steps
before and behind them, which have computed the same sequences.
"""

import contextlib
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

_SLOWER = 1.15
"""One thread computes a step if it takes no more than so many times as long as all of them."""
_MOST_TOKENS = 64
"""Of a step that is tried with one thread. Larger ones are bound by computing."""
_KEPT = 7
"""Comparisons of which the median counts: among them may be steps that other processes have disturbed."""
_STEPS_BEFORE_TRIAL = 64
_STEPS_AT_FIRST = 4
"""The same while there are fewer than ``_KEPT`` comparisons."""


@dataclass(slots=True)
class _Size:
    """What is known of steps of similar size: how many times as long they took one thread, and what is usual."""

    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    alone: bool = False
    steps: int = 0

    def tries(self) -> bool:
        """Count a step; return whether it is tried the other way."""
        self.steps += 1
        if self.steps <= (_STEPS_BEFORE_TRIAL if len(self.ratios) == _KEPT else _STEPS_AT_FIRST):
            return False
        self.steps = 0
        return True

    def compare(self, ratio: float) -> None:
        """Take a comparison into account."""
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
        """Compute a step of so many tokens within this context."""
        if self._most == 1:
            yield
            return
        threads, size = self._most, self._sizes[tokens.bit_length()]
        if tokens <= _MOST_TOKENS and size.alone != size.tries():
            threads = 1
        torch.set_num_threads(threads)
        began = self._clock()
        try:
            yield
            seconds = self._clock() - began
        finally:
            if threads != self._most:  # what follows, such as moving blocks, is no part of the choice
                torch.set_num_threads(self._most)
        same, other, before = self._last
        if tokens == same and threads != other:
            size.compare(seconds / before if threads == 1 else before / seconds)
        self._last = tokens, threads, seconds
