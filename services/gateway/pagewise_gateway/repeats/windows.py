"""Hashes of all windows of 16 tokens of a prompt, and a sample of them that does not depend on where a text stands.

The hash is Rabin and Karp's polynomial modulo 2^64. Four doublings compute it at every offset: a window of 2k tokens is
two windows of k. The sample is that of winnowing (Schleimer, Wilkerson and Aiken, SIGMOD 2003): of each ``WINDOW``
windows that follow one another, the one with the smallest hash. So windows in the sample are at most ``WINDOW`` tokens
apart, which leaves no gaps between them, and two prompts that contain the same ``SURELY_FOUND`` tokens share one in any
case. About 2 of ``WINDOW`` + 1 windows are in it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
Positions = NDArray[np.intp]

WINDOW = 16
"""Tokens of a window."""
SURELY_FOUND = 2 * WINDOW - 1
"""A text of so many tokens has ``WINDOW`` windows, one of which is in the sample."""

_DOUBLINGS = 4
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_HALF, _SHIFT = np.uint64(32), np.uint64(29)

_NONE = np.empty(0, np.intp)

assert 1 << _DOUBLINGS == WINDOW


def powers_of(base: int) -> tuple[np.uint64, ...]:
    """Return what ``window_hashes`` multiplies by. ``base``: an odd number below 2^64."""
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
    # A window is in the sample if it is the smallest of one of the groups that it belongs to.
    smallest = np.zeros(len(keys) + WINDOW - 1, np.uint32)
    smallest[WINDOW - 1 : len(keys)] = _of_groups(np.minimum, order)
    return np.flatnonzero(_of_groups(np.maximum, smallest) == order)


def _of_groups(extreme: Callable[[Any, Any], Any], values: "NDArray[np.uint32]") -> "NDArray[np.uint32]":
    """Return the extreme of each ``WINDOW`` values that follow one another."""
    for doubling in range(_DOUBLINGS):
        step = 1 << doubling
        values = extreme(values[:-step], values[step:])
    return values
