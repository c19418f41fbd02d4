"""The limits of new requests: the length of the queues, and the limits of API keys."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, exp
from typing import Literal

from pagewise_shared.protocol import KeyLimits

from pagewise_scheduler.core.requests.timeline import WaitCause
from pagewise_scheduler.core.requests.waiting_queue import KeyLoads, QueueLoad, queue_time_of
from pagewise_scheduler.metrics import Metrics
from pagewise_scheduler.server.client_request import ClientRequest

_MOST_RETRY_SECONDS = 120
_RATE_SMOOTHING_SECONDS = 10.0
_LEAST_INTERVAL = 0.1
_UNKNOWN_SECONDS = 2.0
_RESERVED_PARTS = 16
"""The reserved part of the queue for each key is one in this number."""
_DURATION_SMOOTHING = 0.2
_MOST_KEYS = 10_000
"""Keys to remember; beyond this number, idle keys are forgotten."""
_NO_LOAD = QueueLoad()


class AdmissionError(Exception):
    """A request is refused; ``kind`` determines the HTTP status.

    Kinds: "never_fits" (longer than any executor allows: 400), "invalid" (it can never run, for another reason: 400),
    "overloaded" (a queue or a limit is full: 429), "unavailable" (there is no executor: 503).
    ``reason``: a word for metrics. ``retry_after``: seconds after which there should be room; 0: unknown.
    """

    def __init__(
        self,
        kind: Literal["never_fits", "invalid", "overloaded", "unavailable"],
        message: str,
        reason: str = "",
        retry_after: int = 0,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.reason = reason
        self.retry_after = retry_after


def _retry_after(seconds: float) -> int:
    return max(1, min(_MOST_RETRY_SECONDS, ceil(seconds)))


# ---- queues ------------------------------------------------------------------------------------------


class Unplaced:
    """The queue of requests that no executor can take now. ``loads``: of all of them together, and of each key."""

    def __init__(self) -> None:
        self.loads = KeyLoads()
        self._since: dict[ClientRequest, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    def __iter__(self) -> Iterator[ClientRequest]:
        return iter(self._since)

    def add(self, live: ClientRequest, now: float, cause: WaitCause = "no executor") -> None:
        """Add a request at ``now`` (seconds)."""
        live.timeline.begin(cause, now)
        self._since[live] = now
        self.loads.add(live.params.key, _load_of(live))

    def discard(self, live: ClientRequest, now: float) -> bool:
        """Remove a request; return whether it was in the queue."""
        since = self._since.pop(live, None)
        if since is None:
            return False
        live.unplaced_seconds += now - since
        live.timeline.end(now)
        self.loads.remove(live.params.key, _load_of(live))
        return True

    def expired(self, timeout: float, now: float) -> list[ClientRequest]:
        """Return the requests that no executor could take for ``timeout`` seconds, over all their stays here."""
        return [live for live, since in self._since.items() if live.unplaced_seconds + now - since >= timeout]

    def take_all(self, now: float) -> list[ClientRequest]:
        """Remove all requests; return them by priority and arrival, as in the queues of the executors."""
        members = sorted(self._since, key=lambda live: queue_time_of(live))
        for live in members:
            self.discard(live, now)
        return members


def _load_of(live: ClientRequest) -> QueueLoad:
    return QueueLoad(live.params.num_sequences, len(live.prompt_token_ids))


class _DepartureRate:
    """Measures how fast one number of a queue (sequences or tokens) departs: the arrivals that do not wait any more.

    ``_promised``: the amount that refused clients have been promised room for, and that departs first.
    """

    def __init__(self) -> None:
        self.arrived = 0
        self._departed = 0
        self._rate: float | None = None
        self._promised = 0.0

    def observe(self, waiting: int, seconds: float) -> None:
        departed = self.arrived - waiting
        since, self._departed = max(0, departed - self._departed), departed
        rate = since / seconds
        weight = 1 - exp(-seconds / _RATE_SMOOTHING_SECONDS)
        self._rate = rate if self._rate is None else self._rate + weight * (rate - self._rate)
        self._promised = max(0.0, self._promised - since)

    def seconds_for(self, amount: int) -> float:
        """Return the time until ``amount`` has departed behind all earlier promises, and promise it."""
        if self._rate is None:
            return _UNKNOWN_SECONDS
        # Promises are capped at the longest Retry-After. Otherwise a flood of retries would have to be worked off.
        self._promised = min(self._promised + amount, max(amount, self._rate * _MOST_RETRY_SECONDS))
        return self._promised / self._rate if self._rate > 0 else _MOST_RETRY_SECONDS


class Backlog:
    """Bounds the load that waits, here and at executors. Retry-After follows from how fast the queue has moved.

    If several keys send requests, each key may have as much waiting as there is room left: one key fills half of the
    queue, two keys a third each, and there is always room for another (Choudhury and Hahne, "Dynamic queue length
    thresholds for shared-memory packet switches", 1998). A single request may be as large as the queue, so a small part
    is also reserved for each key, for any number of waiting requests of other keys. To bound the total, that part is
    granted only up to twice the queue and the largest request.
    """

    def __init__(self, max_waiting: int, max_waiting_tokens: int) -> None:
        self._most = QueueLoad(max_waiting, max_waiting_tokens)
        self._reserved = QueueLoad(max_waiting // _RESERVED_PARTS, max_waiting_tokens // _RESERVED_PARTS)
        self._sequences, self._tokens = _DepartureRate(), _DepartureRate()
        self._observed: float | None = None
        self._keys: set[str] = set()
        self._largest = QueueLoad()

    def admit(
        self, new: QueueLoad, waiting: QueueLoad, now: float, *, key: str = "", of_key: QueueLoad = _NO_LOAD
    ) -> None:
        """Count a new request beside the load that waits, of which ``of_key`` belongs to the same key.

        A request with more prompt tokens than the bound is admitted if nothing waits; a request that is larger than its
        key's share is admitted if nothing of the key waits.

        Raises:
            AdmissionError: too much waits, and ``reason`` names the bound; or it has more sequences than the bound.
        """
        if new.sequences > self._most.sequences:
            raise AdmissionError(
                "invalid",
                f"the request asks for {new.sequences} outputs (its prompts times n), and at most "
                f"{self._most.sequences} sequences may wait (--max-waiting): divide it",
            )
        self._keys.add(key)
        # After a restart, the requests that other keys had waiting come before any of their new requests.
        several_keys = len(self._keys) > 1 or waiting != of_key
        total = self._most.plus(self._most).plus(self._largest)
        if several_keys and of_key.plus(new).fits(self._reserved) and waiting.plus(new).fits(total):
            self.count(new)
            return
        most, over = self._most, waiting.plus(new).minus(self._most)
        of_key = of_key if several_keys else _NO_LOAD  # the share of a single key is the whole queue
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
                raise AdmissionError("overloaded", text, reason, _retry_after(departures.seconds_for(excess)))
        self.count(new)

    def count(self, new: QueueLoad) -> None:
        """Count a request that is admitted regardless of the bounds."""
        self._sequences.arrived += new.sequences
        self._tokens.arrived += new.tokens
        self._largest = QueueLoad(max(self._largest.sequences, new.sequences), max(self._largest.tokens, new.tokens))

    def observe(self, waiting: QueueLoad, now: float) -> None:
        """Measure the departures, every second or so. ``waiting``: the load that waits at ``now`` (seconds)."""
        if self._observed is not None:
            seconds = now - self._observed
            if seconds < _LEAST_INTERVAL:
                return
            self._sequences.observe(waiting.sequences, seconds)
            self._tokens.observe(waiting.tokens, seconds)
        self._observed = now


# ---- API keys ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Bucket:
    """A token bucket that holds a minute's worth. ``level`` may be below 0, because outputs are charged at the end."""

    per_minute: int
    level: float
    updated: float

    def refill(self, now: float) -> None:
        self.level = min(self.per_minute, self.level + (now - self.updated) * self.per_minute / 60)
        self.updated = now

    def seconds_until(self, wanted: float, now: float) -> float:
        self.refill(now)
        return max(0.0, (wanted - self.level) * 60 / self.per_minute)


class KeyUsage:
    """The usage of all API keys with one name. Without keys, the name is ""."""

    def __init__(self, name: str, metrics: Metrics) -> None:
        self.name = name
        self._metrics = metrics
        self._running = 0
        self._seconds = 1.0
        self._limits = KeyLimits()
        self._requests: _Bucket | None = None
        self._tokens: _Bucket | None = None

    def limit(self, limits: KeyLimits, now: float) -> None:
        """Set the limits; the usage so far counts against them."""
        if limits != self._limits:
            self._limits = limits
            self._requests = _bucket(self._requests, limits.requests_per_minute, now)
            self._tokens = _bucket(self._tokens, limits.tokens_per_minute, now)

    def begin(self, now: float) -> None:
        """Count a request that begins.

        Raises:
            AdmissionError: it exceeds one of the limits, which the text names.
        """
        limits = self._limits
        if limits.concurrent is not None and self._running >= limits.concurrent:
            text = f"{self._running} requests are running, the limit of concurrent requests is {limits.concurrent}"
            raise self._refusal("key_concurrent", text, self._seconds / limits.concurrent)
        if self._requests is not None and (seconds := self._requests.seconds_until(1, now)):
            text = f"the limit of {limits.requests_per_minute} requests per minute is used up"
            raise self._refusal("key_requests_per_minute", text, seconds)
        self.check_tokens(now)
        if self._requests is not None:
            self._requests.level -= 1
        self._running += 1
        if self.name:
            self._metrics.key_requests(self.name).inc()

    def check_tokens(self, now: float) -> None:
        """Check that the key has tokens left: when a request begins, and again when its prompts are submitted.

        Raises:
            AdmissionError: the tokens of this minute are used up.
        """
        if self._tokens is not None and (seconds := self._tokens.seconds_until(1, now)):
            text = f"the limit of {self._limits.tokens_per_minute} tokens per minute is used up"
            raise self._refusal("key_tokens_per_minute", text, seconds)

    def resume(self) -> None:
        """Count a request that began under another scheduler, regardless of the limits."""
        self._running += 1

    def cancel(self, *, charged: bool) -> None:
        """Stop counting a request that began and was then refused.

        ``charged``: it still counts as one of the minute, because its body has been read and tokenized.
        """
        self._running -= 1
        if self._requests is not None and not charged:
            self._requests.level += 1

    def end(self, seconds: float) -> None:
        """Count the end of a request that took ``seconds``."""
        self._running -= 1
        self._seconds += _DURATION_SMOOTHING * (seconds - self._seconds)

    def use(self, kind: Literal["prompt", "generation"], tokens: int) -> None:
        """Charge tokens of a request."""
        if self._tokens is not None:
            self._tokens.level -= tokens
        if self.name:
            self._metrics.key_tokens(self.name, kind).inc(tokens)

    def is_idle(self, now: float) -> bool:
        """Whether nothing runs and both buckets are full, so that forgetting the usage changes nothing."""
        buckets = (self._requests, self._tokens)
        full = all(one is None or not one.seconds_until(one.per_minute, now) for one in buckets)
        return full and not self._running

    def _refusal(self, reason: str, text: str, seconds: float) -> AdmissionError:
        self._metrics.requests_refused(reason).inc()
        return AdmissionError("overloaded", f"API key {self.name}: {text}", reason, _retry_after(seconds))


class KeyUsages:
    """The usage of every key by its name."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._usages: dict[str, KeyUsage] = {}

    def of(self, name: str, limits: KeyLimits, now: float) -> KeyUsage:
        """Return the usage of a key, under the limits that its gateway has read last."""
        usage = self._usages.get(name)
        if usage is None:
            if len(self._usages) >= _MOST_KEYS:
                self._usages = {key: usage for key, usage in self._usages.items() if not usage.is_idle(now)}
            usage = self._usages[name] = KeyUsage(name, self._metrics)
        usage.limit(limits, now)
        return usage


def _bucket(before: _Bucket | None, per_minute: int | None, now: float) -> _Bucket | None:
    if per_minute is None:
        return None
    used = 0.0
    if before is not None:
        before.refill(now)
        used = before.per_minute - before.level
    return _Bucket(per_minute, per_minute - used, now)
