"""Which factors of LongRoPE a token has, as its position tells the model."""

from typing import NamedTuple

from pagewise_executor.input_batch import InputBatch, Int64s


class RopeLengths(NamedTuple):
    """``short_len``: the most tokens of a sequence with the short factors; ``shift``: more than any position."""

    short_len: int
    shift: int


def rope_positions(lengths: RopeLengths | None, batch: InputBatch, rows: Int64s, positions: Int64s) -> Int64s:
    """Return positions [tokens] of ``rows`` [tokens] as ``LongRope`` takes them: the same array if none changes."""
    if lengths is None:
        return positions
    shifted = (batch.limits[rows] > lengths.short_len) & (positions < lengths.short_len)
    return positions + lengths.shift * shifted if shifted.any() else positions
