"""What the holders of API keys may do, over all gateways together: requests at once, requests and tokens per minute."""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from pagewise_shared.protocol import KeyLimits

from pagewise_scheduler.actors.admission_error import AdmissionError
from pagewise_scheduler.metrics import Metrics

_MOST_RETRY_SECONDS = 120
_SMOOTHING = 0.2
_MOST_KEYS = 10_000
"""Keys that are remembered; beyond that, those are forgotten that owe nothing and run nothing."""


@dataclass(slots=True)
class _Bucket:
    """So much a minute, at most a minute's worth at once. ``level`` may fall below 0: then it is owed."""

    per_minute: int
    level: float
    updated: float

    def refill(self, now: float) -> None:
        """Bring the level up to date."""
        self.level = min(self.per_minute, self.level + (now - self.updated) * self.per_minute / 60)
        self.updated = now

    def seconds_until(self, wanted: float, now: float) -> float:
        """Until the level is at least ``wanted``, 0 if it is."""
        self.refill(now)
        return max(0.0, (wanted - self.level) * 60 / self.per_minute)


class KeyUsage:
    """What the holders of the keys of one name have used. Without keys there is one of them, with the name ""."""

    def __init__(self, name: str, metrics: Metrics) -> None:
        self.name = name
        self._metrics = metrics
        self._running = 0
        self._seconds = 1.0
        self._limits = KeyLimits()
        self._requests: _Bucket | None = None
        self._tokens: _Bucket | None = None

    def limit(self, limits: KeyLimits, now: float) -> None:
        """Set what they may do from now on; what has been used stays used."""
        if limits != self._limits:
            self._limits = limits
            self._requests = _bucket(self._requests, limits.requests_per_minute, now)
            self._tokens = _bucket(self._tokens, limits.tokens_per_minute, now)

    def begin(self, now: float) -> None:
        """Count a request that begins.

        Raises:
            AdmissionError: it is over one of the limits; the text says which.
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
        """Check that the key has tokens left. A request that was counted earlier is checked again when it is submitted.

        Raises:
            AdmissionError: the tokens of this minute are used up.
        """
        if self._tokens is not None and (seconds := self._tokens.seconds_until(1, now)):
            text = f"the limit of {self._limits.tokens_per_minute} tokens per minute is used up"
            raise self._refusal("key_tokens_per_minute", text, seconds)

    def resume(self) -> None:
        """Count a request that began under another scheduler: it goes on whatever the limits are."""
        self._running += 1

    def cancel(self, *, charged: bool) -> None:
        """Stop counting a request that had begun and is not accepted after all.

        ``charged``: it still counts as one of the minute, because its body has been read and tokenized.
        """
        self._running -= 1
        if self._requests is not None and not charged:
            self._requests.level += 1

    def end(self, seconds: float) -> None:
        """A request that took so many seconds has ended."""
        self._running -= 1
        self._seconds += _SMOOTHING * (seconds - self._seconds)

    def use(self, kind: Literal["prompt", "generation"], tokens: int) -> None:
        """Count tokens of a request."""
        if self._tokens is not None:
            self._tokens.level -= tokens
        if self.name:
            self._metrics.key_tokens(self.name, kind).inc(tokens)

    def is_idle(self, now: float) -> bool:
        """Whether forgetting it would change nothing."""
        full = all(
            bucket is None or not bucket.seconds_until(bucket.per_minute, now)
            for bucket in (self._requests, self._tokens)
        )
        return full and not self._running

    def _refusal(self, reason: str, text: str, seconds: float) -> AdmissionError:
        self._metrics.requests_refused(reason).inc()
        seconds_shown = max(1, min(_MOST_RETRY_SECONDS, ceil(seconds)))
        return AdmissionError("overloaded", f"API key {self.name}: {text}", reason, seconds_shown)


class KeyUsages:
    """The usage of every key by its name."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._usages: dict[str, KeyUsage] = {}

    def of(self, name: str, limits: KeyLimits, now: float) -> KeyUsage:
        """The usage of a key. ``limits``: those that hold now, as the gateway has read them."""
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
