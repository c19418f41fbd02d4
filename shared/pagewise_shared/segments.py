"""Segments: ranges of a prompt (documents, tools, examples) whose KV does not depend on their position.

The tokens of a segment attend to the segment itself and to the *root*: the beginning of the prompt, by default
everything before the first segment, or nothing. Their K and V are computed at a canonical position, right behind the
root, and then moved to the segment's position: K is rotated by the distance, V is copied. This holds whether the KV is
found or computed, so the output does not depend on the cache. The first ``boundary`` tokens of each segment are not
moved but computed in place, and attend to everything before them, as in EPIC (arXiv 2410.15332).

Tokens carry the segments of their prompt: bits above the token id mark the first token of each segment, the tokens that
are moved, and the end of the root. So block hashes and prefix trees distinguish prompts with equal tokens and different
segments, because their KV differs.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

MOVED = 1 << 28
"""Marks a token whose K and V are moved."""
_FIRST = 1 << 29
_FIRST_WITHOUT_ROOT = 1 << 30
_BEHIND_ROOT = _FIRST | _FIRST_WITHOUT_ROOT
"""Marks the first token behind a root that ends before the first segment."""
TOKEN_ID = MOVED - 1
"""The bits of the token id: larger vocabularies cannot have segments."""

MAX_SEGMENTS = 1024
"""Segments of one prompt."""
MAX_MOVED_TOKENS = 1 << 18
"""Tokens that a step moves for one sequence."""


ALL_BEFORE = -1
"""The size of the root if it is everything before the first segment."""


class Segment(NamedTuple):
    """One segment of a prompt; its fields are indices of tokens.

    ``start`` to ``stop``: its position. ``moved``: its first token whose K and V are moved; ``stop`` if there is none.
    ``root``: the number of the prompt's first tokens that precede it at its canonical position.
    """

    start: int
    moved: int
    stop: int
    root: int

    @property
    def num_original_tokens(self) -> int:
        """The tokens of the root and the segment."""
        return self.root + self.stop - self.start

    @property
    def distance(self) -> int:
        """The distance of its K and V from the canonical position."""
        return self.start - self.root


def make_segments(
    num_tokens: int, ranges: Iterable[tuple[int, int]], *, root: int = ALL_BEFORE, boundary: int = 0
) -> tuple[Segment, ...]:
    """Return the segments of a prompt of ``num_tokens`` tokens. ``ranges``: start and stop of each. ``root``: its
    tokens.

    Raises:
        ValueError: segments are empty, overlap, are out of order, outside the prompt or too many; or no token follows
            the last one, or the first one begins in the root.
    """
    made: list[Segment] = []
    before = -1
    for start, stop in ranges:
        if not 0 <= start < stop <= num_tokens:
            raise ValueError(f"the segment of tokens {start} to {stop} is empty, or outside the {num_tokens} tokens")
        if start < before:
            raise ValueError(f"the segment of tokens {start} to {stop} begins before the end of the one before it")
        before = stop
        if not made and root > start:
            raise ValueError(f"the first segment begins at token {start}, in the root of {root} tokens")
        root = start if root < 0 else root
        made.append(Segment(start, min(stop, start + boundary), stop, root))
    if before == num_tokens:
        raise ValueError("the last segment ends the prompt: at least one token has to follow it")
    if len(made) > MAX_SEGMENTS:
        raise ValueError(f"{len(made)} segments are too many: at most {MAX_SEGMENTS}")
    if boundary < 0:
        raise ValueError(f"the boundary is {boundary} tokens")
    return tuple(made)


def mark_segments(tokens: "array[int]", segments: Sequence[Segment]) -> None:
    """Mark the segments in the tokens (int32) of a prompt, in place."""
    for segment in segments:
        moved = slice(segment.moved, segment.stop)
        tokens[moved] = _each(int.__or__, tokens[moved], MOVED)
        tokens[segment.start] |= _FIRST if segment.root else _FIRST_WITHOUT_ROOT
    if segments and 0 < segments[0].root < segments[0].start:
        tokens[segments[0].root] |= _BEHIND_ROOT


def original_tokens(tokens: "array[int]", segment: Segment, block_size: int, first: int = 0) -> "array[int]":
    """Return the tokens of a segment at its canonical position: the root, the segment, and zeros that fill the last
    block.

    ``tokens``: of its prompt, marked. ``first``: the first token to return, which begins a block and is in the root or
    at its end.
    """
    own = tokens[first : segment.root] + _each(int.__and__, tokens[segment.start : segment.stop], TOKEN_ID)
    own.extend([0] * (-len(own) % block_size))
    return own


def find_segments(tokens: "array[int]") -> tuple[Segment, ...]:
    """Return the segments that are marked in the beginning of a prompt, which may end in the middle of one."""
    found: list[Segment] = []
    whole = [*tokens, 0]  # the last one ends a segment that the tokens end with
    first = next((index for index, token in enumerate(whole) if token & _BEHIND_ROOT), len(tokens))
    # The first mark belongs to the end of the root, or to the first segment.
    root = 0 if whole[first] & _BEHIND_ROOT == _FIRST_WITHOUT_ROOT else first
    start = moved = -1
    for index, token in enumerate(whole[first:], first):
        mark = token & _BEHIND_ROOT
        if moved >= 0 and (mark or not token & MOVED):
            found.append(Segment(start, moved, index, root))
            moved = -1
        if mark in (_FIRST, _FIRST_WITHOUT_ROOT):
            start = index
        if token & MOVED and moved < 0:
            moved = index
    return tuple(found)


def num_computed(segments: Sequence[Segment], start: int, stop: int) -> int:
    """Return how many of the tokens from ``start`` to ``stop`` are computed; the others are moved."""
    return stop - start - sum(max(0, min(one.stop, stop) - max(one.moved, start)) for one in segments)


def furthest(segments: Sequence[Segment], start: int, stop: int, budget: int) -> int:
    """Return the end of a chunk from ``start`` of at most ``budget`` computed and ``MAX_MOVED_TOKENS`` moved tokens.

    ``stop``: the last end, which is in no segment. A chunk ends behind a computed token: moved tokens come with the
    computed tokens after them.
    """
    at, moved = start, 0
    for segment in segments:
        if segment.stop <= at:
            continue
        if segment.moved >= stop:
            break
        before = max(0, segment.moved - at)
        if budget <= before:
            return at + budget
        budget -= before
        begin = max(at, segment.moved)
        moved += segment.stop - begin
        if moved > MAX_MOVED_TOKENS:  # rare: the rest of this segment comes next
            return max(begin, segment.stop - (moved - MAX_MOVED_TOKENS))
        at = segment.stop
    return min(stop, at + budget)


def _each(operation: Callable[[int, int], int], tokens: "array[int]", value: int) -> "array[int]":
    """Return the tokens (int32), each after an operation on its bits.

    All together are one large integer, because a loop over the tokens of a long prompt would take the scheduler's time.
    """
    together = int.from_bytes(tokens.tobytes(), "little")
    values = int.from_bytes(value.to_bytes(4, "little") * len(tokens), "little")
    return array("i", operation(together, values).to_bytes(4 * len(tokens), "little"))
