"""Who may join the fleet, how often, and with what: everything an executor says of itself has a bound."""

import math
from collections.abc import Iterable

import msgspec
from pagewise_shared.curve import Keys
from pagewise_shared.protocol import Hello

from pagewise_scheduler.core.recovery.cost_model import Costs

MAX_EXECUTORS = 1024
"""Executors in a fleet."""
MAX_FLEET_BLOCKS = 1 << 25
"""Blocks of all executors, on devices and hosts: each costs the scheduler some 60 bytes."""
MAX_TEXT = 256
"""Characters of a name."""

_MAX_BLOCK_SIZE = 1 << 16
_MAX_INT32 = (1 << 31) - 1
_MAX_INT64 = (1 << 63) - 1

_AGAIN_SECONDS = 1.0
_BURST, _PER_SECOND = 256.0, 32.0
_FETCH_BYTES_PER_SECOND = 1e9
"""What fetching from a peer is taken to reach until it has been tried."""


class Entry:
    """Decides about Hellos. ``keys``: the allow-list, None where connections have no keys."""

    def __init__(self, keys: Keys | None) -> None:
        self._keys = keys
        self._allowance: dict[str, tuple[float, float]] = {}

    def in_time(self, key: str, joined: float | None, now: float) -> bool:
        """Whether a Hello may be looked at now, or comes too often.

        An executor that waited for long has queued several: those that come right after a Welcome are void. Apart from
        that each ``key`` has an allowance, large enough for a fleet that comes back all at once.
        """
        if joined is not None and now - joined < _AGAIN_SECONDS:
            return False
        left, since = self._allowance.get(key, (_BURST, now))
        left = min(_BURST, left + (now - since) * _PER_SECOND)
        self._allowance[key] = max(0.0, left - 1.0), now
        return left >= 1.0

    def revoked(self, keys: Iterable[str]) -> set[str]:
        """Those of ``keys`` that are not on the allow-list any more."""
        return set() if self._keys is None else set(keys) - self._keys.allowed().keys()

    def refusal(self, hello: Hello, key: str, others: list[tuple[Hello, str]]) -> str | None:
        """Why the owner of ``key`` may not join as it says beside ``others`` (their Hellos and keys); None: it may."""
        if (unusable := _unusable(hello)) is not None:
            return unusable
        if (forged := self._forged(hello, key, others)) is not None:
            return forged
        if len(others) >= MAX_EXECUTORS:
            return f"there are {MAX_EXECUTORS} executors already"
        blocks = sum(each.num_blocks + each.num_host_blocks for each in (hello, *(other for other, _ in others)))
        if blocks > MAX_FLEET_BLOCKS:
            return f"the fleet would have {blocks} blocks, the most is {MAX_FLEET_BLOCKS}"
        return None

    def _forged(self, hello: Hello, key: str, others: list[tuple[Hello, str]]) -> str | None:
        """Whether it takes the name of an executor with another key."""
        if self._keys is None:
            return None
        allowed = self._keys.allowed()
        if (owner := allowed.get(key)) is None:
            return "its key was revoked"
        if hello.executor_id != owner and hello.executor_id in allowed.values():
            return f"the name {hello.executor_id} belongs to the key {hello.executor_id}, and its key is {owner}"
        if any(other.executor_id == hello.executor_id and other_key != key for other, other_key in others):
            return f"an executor {hello.executor_id} with another key is in already"
        return None


def _unusable(hello: Hello) -> str | None:
    """What is wrong with the values of a Hello."""
    for name in ("executor_id", "model_fingerprint", "device", "dtype", "block_endpoint", "block_format"):
        text = getattr(hello, name)
        if len(text) > MAX_TEXT or not text.isprintable():
            return f"its {name} is longer than {MAX_TEXT} characters, or has some that cannot be printed"
    if (
        min(hello.num_blocks, hello.block_size, hello.max_model_len, hello.vocab_size) < 1
        or min(hello.num_host_blocks, hello.bytes_per_block, hello.max_num_seqs, hello.max_num_batched_tokens) < 0
    ):
        return "it offers no blocks, or a block, model length or vocabulary of no tokens"
    for name, most in (
        ("block_size", _MAX_BLOCK_SIZE),
        ("num_blocks", MAX_FLEET_BLOCKS),
        ("num_host_blocks", MAX_FLEET_BLOCKS),
        ("max_model_len", _MAX_INT32),
        ("vocab_size", _MAX_INT32),
        ("max_num_seqs", _MAX_INT32),
        ("max_num_batched_tokens", _MAX_INT32),
        ("bytes_per_block", _MAX_INT64),
    ):
        if getattr(hello, name) > most:
            return f"its {name} is {getattr(hello, name)}, the most is {most}"
    costs = () if hello.costs is None else msgspec.structs.astuple(hello.costs)
    if not all(math.isfinite(cost) and cost >= 0 for cost in costs):
        return "its measured costs are no times"
    return None


def costs_of(hello: Hello) -> Costs | None:
    """What the executor has measured, in seconds."""
    if hello.costs is None:
        return None
    measured = {name: value * 1e-6 for name, value in msgspec.structs.asdict(hello.costs).items()}
    return Costs(**measured, fetch_block=hello.bytes_per_block / _FETCH_BYTES_PER_SECOND)
