"""Counts the tokens of texts that prompts repeat outside of prefixes, for the metric ``repeated_tokens``."""

import asyncio
import logging
from collections import deque
from collections.abc import Generator
from time import monotonic

from pagewise_gateway.metrics import Metrics
from pagewise_gateway.repeats import RepeatFinder, Repeats

log = logging.getLogger(__name__)

REMEMBERED_KEYS = 1 << 21
"""Keys that a gateway remembers: 16 MiB, for about eleven million tokens of different texts."""
SHORTEST_PROMPT = 256
"""Shorter prompts are left out: they have little to save, and take almost as long."""
WAIT_SECONDS = 0.25
"""Prompts wait so long for others, because several in a row take less time than one by one between other work."""
TURN_SECONDS = 0.0005
BATCH_SECONDS = 0.05
PAUSE = 19
"""After turns of ``BATCH_SECONDS`` together, or less if no prompt waits any more, comes a pause of so many times their
length, so that the search takes at most 5% of the event loop's time."""
MOST_WAITING_TOKENS = 1 << 22
"""Tokens of prompts that may wait for the search: 16 MiB. Further prompts are left out and counted."""


class RepeatWatch:
    """Searches prompts one by one between other work of the event loop, for about ``TURN_SECONDS`` at a time."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._finder = RepeatFinder(REMEMBERED_KEYS)
        self._waiting: deque[tuple[memoryview[int], str | None]] = deque()
        self._waiting_tokens = 0
        self._busy = 0.0  # seconds of the turns since the last pause
        self._pause_ends = 0.0  # by the event loop's clock
        self._logged = False
        self._current: Generator[None, None, Repeats] | None = None

    def prompt(self, tokens: "memoryview[int]", salt: str | None) -> None:
        """Search a prompt (int32) whose KV has been computed. Only prompts with the same salt are compared."""
        if len(tokens) < SHORTEST_PROMPT:
            return
        if self._waiting_tokens + len(tokens) > MOST_WAITING_TOKENS:
            self._metrics.unsearched_tokens.inc(len(tokens))
            if not self._logged:
                self._logged = True
                log.info("some prompts come too fast to look for repeated text in all of them: see unsearched_tokens")
            return
        idle = not self._waiting
        self._waiting.append((tokens, salt))
        self._waiting_tokens += len(tokens)
        if idle:
            loop = asyncio.get_running_loop()
            loop.call_at(max(loop.time() + WAIT_SECONDS, self._pause_ends), self._turn)

    def _turn(self) -> None:
        began = monotonic()
        self._step()
        while self._waiting and monotonic() - began < TURN_SECONDS:
            self._step()
        self._busy += monotonic() - began
        loop = asyncio.get_running_loop()
        if self._waiting and self._busy < BATCH_SECONDS:
            loop.call_soon(self._turn)
            return
        self._pause_ends, self._busy = loop.time() + PAUSE * self._busy, 0.0
        if self._waiting:
            loop.call_at(self._pause_ends, self._turn)

    def _step(self) -> None:
        if self._current is None:
            tokens, salt = self._waiting[0]
            self._current = self._finder.examining(tokens, salt)
        try:
            next(self._current)
        except StopIteration as end:
            repeats: Repeats = end.value
            self._metrics.repeated_tokens.inc(repeats.repeated)
            self._waiting_tokens -= repeats.num_tokens
            self._waiting.popleft()
            self._current = None
