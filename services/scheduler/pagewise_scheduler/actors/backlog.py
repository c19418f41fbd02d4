"""What waits to run: how much of it there may be, and how fast it goes."""

from asyncio import TimerHandle
from collections.abc import Iterable
from math import ceil, exp
from typing import NamedTuple

from pagewise_scheduler.actors.live_request import LiveRequest
from pagewise_scheduler.core.scheduling.waiting_queue import queue_time_of
from pagewise_scheduler.generation import AdmissionError

_SMOOTHING_SECONDS = 10.0
_LEAST_INTERVAL = 0.1
_UNKNOWN_SECONDS = 2.0
_MOST_SECONDS = 120


class Load(NamedTuple):
    """Sequences, and prompt tokens of their requests."""

    sequences: int = 0
    tokens: int = 0

    @staticmethod
    def of(live: LiveRequest) -> "Load":
        """Of one request."""
        return Load(live.request.num_sequences, len(live.request.prompt_token_ids))

    def plus(self, other: "Load") -> "Load":
        """Both together."""
        return Load(self.sequences + other.sequences, self.tokens + other.tokens)

    def minus(self, other: "Load") -> "Load":
        """What is left without the other."""
        return Load(self.sequences - other.sequences, self.tokens - other.tokens)


class Homeless:
    """Requests that no engine can take now. ``load``: of all of them together."""

    def __init__(self) -> None:
        self.load = Load()
        self._members: dict[LiveRequest, TimerHandle] = {}

    def add(self, live: LiveRequest, expiry: TimerHandle) -> None:
        """Let a request wait; ``expiry`` is cancelled when it waits no more."""
        self._members[live] = expiry
        self.load = self.load.plus(Load.of(live))

    def discard(self, live: LiveRequest) -> bool:
        """Let a request wait no more; whether it did."""
        if live not in self._members:
            return False
        self._members.pop(live).cancel()
        self.load = self.load.minus(Load.of(live))
        return True

    def take_all(self) -> Iterable[LiveRequest]:
        """Let nobody wait any more; returns who did, by priority and arrival as in the queues of the engines."""
        members, self._members, self.load = self._members, {}, Load()
        for expiry in members.values():
            expiry.cancel()
        return sorted(members, key=lambda live: queue_time_of(live.request))


class _Drain:
    """How fast one measure of a queue gets less, from what came in and what is there: whoever is not there any more
    has gone. ``promised``: what was told to come back, and will find those before it there."""

    def __init__(self) -> None:
        self.arrived = 0
        self._gone = 0
        self._rate: float | None = None
        self._promised = 0.0

    def observe(self, waiting: int, seconds: float) -> None:
        gone = self.arrived - waiting
        since, self._gone = max(0, gone - self._gone), gone
        rate = since / seconds
        weight = 1 - exp(-seconds / _SMOOTHING_SECONDS)
        self._rate = rate if self._rate is None else self._rate + weight * (rate - self._rate)
        self._promised = max(0.0, self._promised - since)

    def seconds_for(self, amount: int) -> float:
        """Until so much more has gone, behind what was promised to others; promises it."""
        if self._rate is None:
            return _UNKNOWN_SECONDS
        # No more than is told to anybody, or a flood of retries would have to be worked off.
        self._promised = min(self._promised + amount, max(amount, self._rate * _MOST_SECONDS))
        return self._promised / self._rate if self._rate > 0 else _MOST_SECONDS


class Backlog:
    """Bounds of what may wait. Whoever is refused is told when there will be room, by how fast the queue has moved."""

    def __init__(self, max_waiting: int, max_waiting_tokens: int) -> None:
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._sequences, self._tokens = _Drain(), _Drain()
        self._observed: float | None = None

    def admit(self, new: Load, waiting: Load, now: float) -> None:
        """Count a request that wants to come in beside what waits. One that is larger than all that may wait can come
        in when nothing does.

        Raises:
            AdmissionError: too much waits; ``reason`` says of what.
        """
        over = waiting.sequences + new.sequences - self._max_waiting
        if over > 0:
            self.observe(waiting, now)
            text = f"{waiting.sequences} sequences are waiting already, at most {self._max_waiting} may"
            raise AdmissionError("overloaded", text, "max_waiting", _whole(self._sequences.seconds_for(over)))
        over = waiting.tokens + new.tokens - self._max_waiting_tokens
        if over > 0 and waiting.tokens:
            self.observe(waiting, now)
            text = f"prompts of {waiting.tokens} tokens are waiting already, at most {self._max_waiting_tokens} may"
            raise AdmissionError("overloaded", text, "max_waiting_tokens", _whole(self._tokens.seconds_for(over)))
        self._sequences.arrived += new.sequences
        self._tokens.arrived += new.tokens

    def observe(self, waiting: Load, now: float) -> None:
        """Tell what waits, every second or so. ``now``: seconds."""
        if self._observed is not None:
            seconds = now - self._observed
            if seconds < _LEAST_INTERVAL:
                return
            self._sequences.observe(waiting.sequences, seconds)
            self._tokens.observe(waiting.tokens, seconds)
        self._observed = now


def _whole(seconds: float) -> int:
    return max(1, min(_MOST_SECONDS, ceil(seconds)))
