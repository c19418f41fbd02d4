"""Finds decodes whose contexts begin with the same blocks, which attention then reads once for all of them."""

import numpy as np

from pagewise_executor.input_batch import Int32s, Int64s

_MIN_QUERIES = 4
_MIN_TOKENS = 64
"""With fewer, sharing saves nothing: merging the parts of the results costs as much."""


def shared_prefixes(tables: Int32s, rows: Int64s, lengths: Int64s, block_size: int) -> tuple[Int64s, Int64s]:
    """Return the prefixes [prefixes, 3] (begin, count, tokens) that decodes share, and their members.

    ``rows``, ``lengths`` [decodes]: row of the block ``tables`` and tokens in the context. The decodes
    members[begin : begin + count] have equal block tables for so many tokens. Each decode is in at most one prefix, and
    a prefix leaves each of its members at least one token.
    """
    members: list[int] = []
    prefixes: list[tuple[int, int, int]] = []
    # At least the newest token, which nobody else has, comes behind the prefix.
    full = (lengths - 1) // block_size
    candidates = np.flatnonzero(full * block_size >= _MIN_TOKENS)
    if len(candidates) >= _MIN_QUERIES:
        _, found = _best(tables[rows], full, candidates, 0, block_size)
        for group, blocks in found:
            prefixes.append((len(members), len(group), blocks * block_size))
            members += group.tolist()
    return np.array(prefixes, np.int64).reshape(-1, 3), np.array(members, np.int64)


def _best(
    tables: Int32s, full: Int64s, members: Int64s, column: int, block_size: int
) -> tuple[int, list[tuple[Int64s, int]]]:
    """Choose prefixes of ``members``, whose first ``column`` blocks are equal, that save the most.

    Either all of them share what they have in common, or they part where their tables do, and each branch shares more.
    Returns the number of blocks that need not be read, and the prefixes: members and blocks.
    """
    if len(members) < _MIN_QUERIES:
        return 0, []
    own = tables[members]
    least = int(full[members].min())
    differs = np.flatnonzero((own[:, column:least] != own[0, column:least]).any(axis=0))
    common = column + int(differs[0]) if len(differs) else least
    enough = common * block_size >= _MIN_TOKENS
    together = ((len(members) - 1) * common, [(members, common)]) if enough else (0, [])
    longer = members[full[members] > common]
    if len(longer) < _MIN_QUERIES:
        return together
    branches = tables[longer, common]
    apart, parts = 0, []
    for block in np.unique(branches):
        saved, found = _best(tables, full, longer[branches == block], common + 1, block_size)
        apart += saved
        parts += found
    return (apart, parts) if apart > together[0] else together
