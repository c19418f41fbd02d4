"""What waits to run: how much of it there may be, and how fast it goes."""

from collections.abc import Iterator
from math import ceil, exp
from typing import NamedTuple

from pagewise_scheduler.core.requests.timeline import WaitCause
from pagewise_scheduler.core.requests.waiting_queue import queue_time_of
from pagewise_scheduler.server.admission_error import AdmissionError
from pagewise_scheduler.server.client_request import ClientRequest

_SMOOTHING_SECONDS = 10.0
_LEAST_INTERVAL = 0.1
_UNKNOWN_SECONDS = 2.0
_MOST_SECONDS = 120
_RESERVED_PARTS = 16
"""One part in so many of the queue is reserved for each key."""


class Load(NamedTuple):
    """Sequences, and prompt tokens of their requests."""

    sequences: int = 0
    tokens: int = 0

    @staticmethod
    def of(live: ClientRequest) -> "Load":
        """Of one request."""
        return Load(live.params.num_sequences, len(live.prompt_token_ids))

    def plus(self, other: "Load") -> "Load":
        """Both together."""
        return Load(self.sequences + other.sequences, self.tokens + other.tokens)

    def minus(self, other: "Load") -> "Load":
        """What is left without the other."""
        return Load(self.sequences - other.sequences, self.tokens - other.tokens)


class Unplaced:
    """Requests that no executor can take now; each may wait for a bounded time. ``load``: of all of them together."""

    def __init__(self) -> None:
        self.load = Load()
        self._of_key: dict[str, Load] = {}
        self._since: dict[ClientRequest, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    def __iter__(self) -> Iterator[ClientRequest]:
        return iter(self._since)

    def add(self, live: ClientRequest, now: float, cause: WaitCause = "no executor") -> None:
        """Let a request wait from ``now`` (seconds) on."""
        live.timeline.begin(cause, now)
        key, load = live.params.key, Load.of(live)
        self._since[live] = now
        self.load = self.load.plus(load)
        self._of_key[key] = self.of_key(key).plus(load)

    def discard(self, live: ClientRequest, now: float) -> bool:
        """Let a request wait no more; whether it did."""
        since = self._since.pop(live, None)
        if since is None:
            return False
        live.unplaced_seconds += now - since
        live.timeline.end(now)
        self.load = self.load.minus(Load.of(live))
        left = self._of_key.pop(live.params.key).minus(Load.of(live))
        if left != Load():
            self._of_key[live.params.key] = left
        return True

    def of_key(self, key: str) -> Load:
        """Of the requests of one key."""
        return self._of_key.get(key, Load())

    def expired(self, timeout: float, now: float) -> list[ClientRequest]:
        """Those that have waited for ``timeout`` seconds. Executors that come and cannot hold a request do not make it
        wait longer."""
        return [live for live, since in self._since.items() if live.unplaced_seconds + now - since >= timeout]

    def take_all(self, now: float) -> list[ClientRequest]:
        """Let nobody wait any more; returns who did, by priority and arrival as in the queues of the executors."""
        members = sorted(self._since, key=lambda live: queue_time_of(live))
        for live in members:
            self.discard(live, now)
        return members


class _Departures:
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
    """Bounds of what may wait. Whoever is refused is told when there will be room, by how fast the queue has moved.

    Where several keys send requests, one may have as much waiting as there is room left, and no more: alone it fills
    half of the queue, two of them a third each, and there is always room for another (Choudhury and Hahne, "Dynamic
    queue length thresholds for shared-memory packet switches", 1998). A single request may be as large as the queue, so
    a small part is also reserved for each key, which it can fill however much others have waiting. So that it remains
    bounded what waits altogether, that part is only granted up to twice the queue and the largest request.
    """

    def __init__(self, max_waiting: int, max_waiting_tokens: int) -> None:
        self._most = Load(max_waiting, max_waiting_tokens)
        self._sequences, self._tokens = _Departures(), _Departures()
        self._observed: float | None = None
        self._keys: set[str] = set()
        self._largest = Load()

    def admit(self, new: Load, waiting: Load, now: float, *, key: str = "", of_key: Load = Load()) -> None:  # noqa: B008
        """Count a request that wants to come in beside what waits, ``of_key`` of it from the same key. One with
        more prompt tokens than may wait can come in when nothing does; one that is larger than the room that is left
        for its key, when nothing of that does.

        Raises:
            AdmissionError: too much waits; ``reason`` says of what. Or it has more sequences than may ever wait.
        """
        if new.sequences > self._most.sequences:
            raise AdmissionError(
                "invalid",
                f"the request asks for {new.sequences} outputs (its prompts times n), and at most "
                f"{self._most.sequences} sequences may wait (--max-waiting): divide it",
            )
        self._keys.add(key)
        # After a restart, what others had waiting comes again before any of their new requests.
        several_keys = len(self._keys) > 1 or waiting != of_key
        if several_keys and self._fits_reserved(of_key.plus(new)) and self._fits_twice(waiting.plus(new)):
            self.count(new)
            return
        most, over = self._most, waiting.plus(new).minus(self._most)
        of_key = of_key if several_keys else Load()  # with one key, the queue is its share
        share = over.plus(of_key)
        for reason, departures, excess, applies, text in (
            ("max_waiting", self._sequences, over.sequences, True,
             f"{waiting.sequences} sequences are waiting already, at most {most.sequences} may"),
            ("max_waiting_tokens", self._tokens, over.tokens, waiting.tokens,
             f"prompts of {waiting.tokens} tokens are waiting already, at most {most.tokens} may"),
            ("max_waiting_share", self._sequences, share.sequences, of_key.sequences,
             f"{of_key.sequences} sequences of this API key are waiting already, more than there is room left"),
            ("max_waiting_tokens_share", self._tokens, share.tokens, of_key.tokens,
             f"prompts of {of_key.tokens} tokens of this API key wait already, more than there is room left"),
        ):  # fmt: skip
            if excess > 0 and applies:
                self.observe(waiting, now)
                seconds = ceil(departures.seconds_for(excess))
                raise AdmissionError("overloaded", text, reason, max(1, min(_MOST_SECONDS, seconds)))
        self.count(new)

    def _fits_reserved(self, of_key: Load) -> bool:
        """Whether the part of the queue that is reserved for a key has room for this load of it."""
        most = self._most
        return of_key.sequences <= most.sequences // _RESERVED_PARTS and of_key.tokens <= most.tokens // _RESERVED_PARTS

    def _fits_twice(self, waiting: Load) -> bool:
        """Whether twice the queue, and the largest request so far, has room for this load of all keys."""
        most = self._most.plus(self._most).plus(self._largest)
        return waiting.sequences <= most.sequences and waiting.tokens <= most.tokens

    def count(self, new: Load) -> None:
        """Count a request that comes in whatever waits."""
        self._sequences.arrived += new.sequences
        self._tokens.arrived += new.tokens
        self._largest = Load(max(self._largest.sequences, new.sequences), max(self._largest.tokens, new.tokens))

    def observe(self, waiting: Load, now: float) -> None:
        """Tell what waits, every second or so. ``now``: seconds."""
        if self._observed is not None:
            seconds = now - self._observed
            if seconds < _LEAST_INTERVAL:
                return
            self._sequences.observe(waiting.sequences, seconds)
            self._tokens.observe(waiting.tokens, seconds)
        self._observed = now
