"""Finds the parts of a prompt that earlier prompts contain: as a prefix, and elsewhere.

All windows of 16 tokens are hashed, and a sample of them is remembered that is the same for a text at any offset. The
hash is Rabin and Karp's polynomial modulo 2^64. Four doublings compute it at every offset: a window of 2k tokens is two
windows of k. The sample is that of winnowing (Schleimer, Wilkerson and Aiken, SIGMOD 2003): of each ``WINDOW``
consecutive windows, the one with the smallest hash. So windows in the sample are at most ``WINDOW`` tokens apart, which
leaves no gaps between them, and two prompts with the same ``SURELY_FOUND`` tokens always share one. About 2 of
``WINDOW`` + 1 windows are in the sample.
"""

import asyncio
import logging
import secrets
from array import array
from collections import deque
from collections.abc import Callable, Generator
from hashlib import blake2b
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagewise_gateway.metrics import Metrics

log = logging.getLogger(__name__)

Hashes = NDArray[np.uint64]
Positions = NDArray[np.intp]

WINDOW = 16
"""Tokens of a window."""
SURELY_FOUND = 2 * WINDOW - 1
"""A text of so many tokens has ``WINDOW`` windows, one of which is in the sample."""

PIECE = 8192
"""Tokens that are hashed at once: it takes about half a millisecond, and the arrays stay in the processor's caches."""

_DOUBLINGS = 4
_MODULUS = 1 << 64
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_HALF, _SHIFT = np.uint64(32), np.uint64(29)

_WAYS = 4
_SPREAD, _TWO_BITS = np.uint64(0xD6E8FEB86659FD93), np.uint64(62)

_NONE = np.empty(0, np.intp)

assert 1 << _DOUBLINGS == WINDOW


def powers_of(base: int) -> tuple[np.uint64, ...]:
    """Return the factors of ``window_hashes``. ``base``: an odd number below 2^64."""
    return tuple(np.uint64(pow(base, 1 << doubling, 1 << 64)) for doubling in range(_DOUBLINGS))


def window_hashes(tokens: "NDArray[np.int32]", powers: tuple[np.uint64, ...]) -> Hashes:
    """Return the polynomial hash of each window. ``tokens``: ``WINDOW`` at least; n tokens have n - 15 windows."""
    hashes = tokens.astype(np.uint64)
    for doubling, power in enumerate(powers):
        step = 1 << doubling
        left = hashes[:-step] * power
        left += hashes[step:]
        hashes = left
    return hashes


def mixed(hashes: Hashes, domain: np.uint64) -> Hashes:
    """Return hashes whose bits all depend on all bits of the given ones and of ``domain``."""
    keys = hashes + domain
    keys ^= keys >> _HALF
    keys *= _MULTIPLIER
    keys ^= keys >> _SHIFT
    return keys


def sampled(keys: Hashes) -> Positions:
    """Return the positions of the windows in the sample. ``keys``: of all windows of a text, in order."""
    if len(keys) < WINDOW:
        return _NONE
    order = (keys >> _HALF).astype(np.uint32)
    # A window is in the sample if it is the smallest of one of its groups.
    smallest = np.zeros(len(keys) + WINDOW - 1, np.uint32)
    smallest[WINDOW - 1 : len(keys)] = _of_groups(np.minimum, order)
    return np.flatnonzero(_of_groups(np.maximum, smallest) == order)


def _of_groups(extreme: Callable[[Any, Any], Any], values: "NDArray[np.uint32]") -> "NDArray[np.uint32]":
    """Return the extreme of each ``WINDOW`` consecutive values."""
    for doubling in range(_DOUBLINGS):
        step = 1 << doubling
        values = extreme(values[:-step], values[step:])
    return values


class SeenKeys:
    """A set that forgets: a table of buckets of four keys each, as in a set-associative cache.

    A key that comes into a full bucket replaces one of the four. So a table of n slots forgets a key after about n
    other new keys.

    Fields:
        num_slots: its capacity in keys. num_bytes: its memory, however many keys there are.
        forgotten: keys that others have replaced.
    """

    def __init__(self, num_slots: int) -> None:
        """``num_slots``: a power of two, at least 4."""
        assert num_slots >= _WAYS
        assert num_slots.bit_count() == 1
        self.num_slots = num_slots
        self.forgotten = 0
        self._buckets = np.zeros((num_slots // _WAYS, _WAYS), np.uint64)  # 0: an empty slot
        self._slots = self._buckets.reshape(-1)
        self.num_bytes = self._buckets.nbytes
        self._mask = np.uint64(num_slots // _WAYS - 1)

    def find(self, keys: Hashes) -> Positions:
        """Return the slot of each key, -1 where it is not known."""
        bucket = (keys & self._mask).astype(np.intp)
        equal = self._buckets[bucket] == keys[:, None]
        return np.where(equal.any(axis=1), bucket * _WAYS + equal.argmax(axis=1), -1)

    def add(self, keys: Hashes) -> Positions:
        """Add keys that are not known. Returns the slot of each."""
        bucket = (keys & self._mask).astype(np.intp)
        empty = self._buckets[bucket] == 0
        free = empty.any(axis=1)
        way = empty.argmax(axis=1)
        if (replaced := len(keys) - int(np.count_nonzero(free))) > 0:
            self.forgotten += replaced
            # The sample prefers small hashes, whose highest bits are 0: multiplying mixes other bits into them.
            way = np.where(free, way, ((keys * _SPREAD) >> _TWO_BITS).astype(np.intp))
        slots: Positions = bucket * _WAYS + way
        self._slots[slots] = keys
        lost = np.flatnonzero(self._slots[slots] != keys)  # another one of these keys has taken the same slot
        if len(lost):
            slots[lost] = self.add(keys[lost])
        return slots


class Repeats(NamedTuple):
    """The parts of one prompt that earlier prompts contain.

    Fields:
        num_tokens: of the prompt.
        prefix: tokens of the longest prefix, in whole blocks of ``WINDOW`` tokens, that an earlier prompt begins with.
        repeated: tokens after the prefix in windows that an earlier prompt contains, at any offset. It is a lower
            bound: of a repeated text, up to ``WINDOW`` - 1 tokens at either end are not counted, and texts of fewer
            than ``SURELY_FOUND`` tokens may be overlooked.
        found, found_slots: positions of these windows, and their slots in ``RepeatFinder.seen``.
        added, added_slots: the same for windows that were new.
    """

    num_tokens: int
    prefix: int
    repeated: int
    found: Positions
    found_slots: Positions
    added: Positions
    added_slots: Positions

    @property
    def new(self) -> int:
        """All other tokens."""
        return self.num_tokens - self.prefix - self.repeated


class RepeatFinder:
    """Remembers windows and prefixes of prompts, in a fixed amount of memory, and finds them in later ones.

    Prompts with different cache salts have nothing in common here. Hashes are keyed with a secret of this object, so
    that a client cannot construct prompts whose hashes collide.

    Fields:
        seen: hashes of windows in the sample, and of prefixes of whole blocks: about 3 for 16 tokens that are new.
    """

    def __init__(self, num_slots: int) -> None:
        """``num_slots``: keys to remember, a power of two; 8 bytes each."""
        self.seen = SeenKeys(num_slots)
        self._secret = secrets.token_bytes(32)
        base, self._block_base = (secrets.randbits(64) | 1 for _ in range(2))
        self._powers = powers_of(base)
        self._block_powers: Hashes = np.cumprod(np.full(PIECE // WINDOW, self._block_base, np.uint64), dtype=np.uint64)

    def examine(self, tokens: "array[int]", salt: str | None) -> Repeats:
        """Return the parts of a prompt that earlier prompts with this salt contain, and remember the prompt."""
        steps = self.examining(tokens, salt)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                repeats: Repeats = end.value
                return repeats

    def examining(self, tokens: "array[int] | memoryview[int]", salt: str | None) -> Generator[None, None, Repeats]:
        """Do the same in steps of at most ``PIECE`` tokens. A prompt has to be finished before the next one begins."""
        salted, prefixes = self._salted(salt)
        pieces: list[_Piece] = []
        num_windows = len(tokens) - WINDOW + 1
        for start in range(0, num_windows, PIECE):
            if start:
                yield
            pieces.append(self._piece(tokens, start, min(num_windows, start + PIECE), salted, prefixes))
        prefix = max((piece.prefix for piece in pieces), default=0)
        # Keys are added only now, because a prompt that repeats itself repeats no earlier one. The last one of equal
        # windows gets the slot, so windows are added from the end.
        added, added_slots = [], []
        for piece in reversed(pieces):
            if len(pieces) > 1:
                yield
            new = np.flatnonzero(piece.slots < 0)[::-1]
            slots = self.seen.add(piece.keys[new])
            windows = new < len(piece.at)
            added.append(piece.at[new[windows]])
            added_slots.append(slots[windows])
        behind = [(piece.slots[: len(piece.at)] >= 0) & (piece.at >= prefix) for piece in pieces]
        found = _joined([piece.at[chosen] for piece, chosen in zip(pieces, behind, strict=True)])
        slots = _joined([piece.slots[: len(piece.at)][chosen] for piece, chosen in zip(pieces, behind, strict=True)])
        repeated = int(np.minimum(found[1:] - found[:-1], WINDOW).sum()) + WINDOW if len(found) else 0
        return Repeats(len(tokens), prefix, repeated, found, slots, _joined(added), _joined(added_slots))

    def _piece(
        self,
        tokens: "array[int] | memoryview[int]",
        start: int,
        stop: int,
        salted: np.uint64,
        prefixes: "_Prefixes",
    ) -> "_Piece":
        """Look up the windows that begin at ``start`` to ``stop``, and the prefixes that end with their blocks."""
        # Whether a window is in the sample depends on its neighbours, so pieces overlap.
        first, last = max(0, start - WINDOW + 1), min(len(tokens) - WINDOW + 1, stop + WINDOW - 1)
        hashes = window_hashes(np.frombuffer(tokens, np.int32)[first : last + WINDOW - 1], self._powers)
        windows = mixed(hashes, salted)
        at = sampled(windows)
        if first < start or stop < last:
            at = at[(at >= start - first) & (at < stop - first)]
        blocks = prefixes.keys(hashes[start - first : stop - first : WINDOW], self._block_powers)
        keys = np.concatenate((windows[at], blocks))
        slots = self.seen.find(keys)
        known = np.flatnonzero(slots[len(at) :] >= 0)
        prefix = start + (int(known[-1]) + 1) * WINDOW if len(known) else 0
        return _Piece(at + first, keys, slots, prefix)

    def _salted(self, salt: str | None) -> "tuple[np.uint64, _Prefixes]":
        # Windows of different salts have different keys, and so have prefixes.
        name = b"" if salt is None else b"=" + salt.encode()
        digest = blake2b(name, digest_size=16, key=self._secret).digest()
        windows, prefixes = np.frombuffer(digest, np.uint64)
        return windows, _Prefixes(self._block_base, prefixes)


class _Piece(NamedTuple):
    """A part of a prompt. ``keys``: of the windows in the sample, which begin ``at``, then of the prefixes."""

    at: Positions
    keys: Hashes
    slots: Positions
    prefix: int


class _Prefixes:
    """Computes hashes of all prefixes of whole blocks from the hashes of the blocks, in order."""

    def __init__(self, base: int, domain: np.uint64) -> None:
        self._base, self._domain = base, domain
        self._sum, self._power = 0, 1

    def keys(self, blocks: Hashes, powers: Hashes) -> Hashes:
        """Return the key of the prefix that ends with each of the next blocks. ``powers``: of the base, from 1."""
        terms = mixed(blocks, self._domain) * powers[: len(blocks)]
        terms *= np.uint64(self._power)
        sums = np.cumsum(terms)
        sums += np.uint64(self._sum)
        self._sum = int(sums[-1])
        self._power = self._power * pow(self._base, len(blocks), _MODULUS) % _MODULUS
        return mixed(sums, self._domain)


def _joined(arrays: list[Positions]) -> Positions:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays) if arrays else np.empty(0, np.intp)


# ---- the search in a gateway, for the metric repeated_tokens --------------------------------------------

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
