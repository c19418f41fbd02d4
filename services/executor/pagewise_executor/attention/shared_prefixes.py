"""Finds decodes whose contexts begin with the same blocks, which attention then reads once for all of them.

The block tables of the decodes are a trie, and a prefix is one of its nodes: all decodes below it share the blocks down
to it. The trie is divided into chains. A chain is the path of one decode of a group, its leader. Every other decode of
the group leaves this path where its context ends or its next block differs. Decodes that leave a chain at the same
index with the same block are the group of another chain, in the next round. A round handles all of its chains at once
in a few array operations.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagewise_executor.step_work import Int32s, Int64s

_MIN_QUERIES = 4
_MIN_TOKENS = 64
"""With fewer, sharing saves nothing: merging the parts of the results costs as much."""

_MAX_ROUNDS = 16
"""Decodes that branch more often share only the blocks before the last branch."""
_ROUNDS_OF_LONGEST = 4
"""Rounds whose leaders have the longest contexts, which finds contexts that contain each other in one round. Later
leaders are of middle length: they halve even a group that one decode leaves at every block."""
_FIRST_WINDOW, _WINDOW_GROWTH, _WINDOW_BLOCKS = 16, 4, 1 << 16
"""Columns of the block tables to compare at once: few at first, and then more, while a copy stays in the cache."""


class _Round(NamedTuple):
    """Chains that leave chains of the round before. ``members`` are the decodes of one chain after the other, in
    descending order of ``common``, their number of blocks in common with it. Chain i begins at ``starts[i]``, belongs
    to ``chains`` == i, and leaves its parent where the member ``parents[i]`` of the round before does."""

    members: Int64s
    common: Int64s
    starts: Int64s
    chains: Int64s
    parents: Int64s


def shared_prefixes(tables: Int32s, rows: Int64s, lengths: Int64s, block_size: int) -> tuple[Int64s, Int64s]:
    """Return the prefixes [prefixes, 3] (begin, count, tokens) that decodes share, and their members.

    ``rows``, ``lengths`` [decodes]: row of the block ``tables`` and tokens in the context. The decodes
    members[begin : begin + count] have equal block tables for so many tokens. Each decode is in at most one prefix, and
    a prefix leaves each of its members at least one token. Of all such choices, this one saves the most reads, as far
    as branches are followed (``_MAX_ROUNDS``).
    """
    if len(rows) < _MIN_QUERIES:
        return np.zeros((0, 3), np.int64), np.zeros(0, np.int64)
    # At least the newest token, which no other decode has, comes behind the prefix.
    full = (lengths - 1) // block_size
    members: list[int] = []
    prefixes: list[tuple[int, int, int]] = []
    for group, blocks in _chosen(_rounds(tables, rows, full, block_size), block_size):
        prefixes.append((len(members), len(group), blocks * block_size))
        members += group.tolist()
    return np.array(prefixes, np.int64).reshape(-1, 3), np.array(members, np.int64)


def _rounds(tables: Int32s, rows: Int64s, full: Int64s, block_size: int) -> list[_Round]:
    rounds: list[_Round] = []
    members = np.flatnonzero(full * block_size >= _MIN_TOKENS)
    if len(members) < _MIN_QUERIES:
        return rounds
    first = np.sort(tables[rows[members], 0])
    if not (first[_MIN_QUERIES - 1 :] == first[: 1 - _MIN_QUERIES]).any():
        return rounds  # the cheapest look is enough for a batch that shares nothing
    common = chains = np.zeros(len(members), np.int64)
    while len(rounds) < _MAX_ROUNDS:
        left, starts, sizes = _branches(tables, rows, full, members, common, chains)
        if not len(starts):
            break
        members, equal = members[left], common[left] + 1
        chains = np.repeat(np.arange(len(starts)), sizes)
        leading = starts if len(rounds) < _ROUNDS_OF_LONGEST else starts + sizes // 2
        leaders = members[leading][chains]
        common = _common(tables, rows[members], rows[leaders], equal, np.minimum(full[members], full[leaders]))
        order = np.lexsort((-common, chains))
        members, common = members[order], common[order]
        rounds.append(_Round(members, common, starts, chains, left[starts]))
    return rounds


def _branches(
    tables: Int32s, rows: Int64s, full: Int64s, members: Int64s, common: Int64s, chains: Int64s
) -> tuple[Int64s, Int64s, Int64s]:
    """Return the groups of members that leave their chain with the same block, where they are enough to share.

    These are the places in ``members`` of one group after the other, its longest context first; and where each group
    begins, and its size.
    """
    left = np.flatnonzero(full[members] > common)
    at, column, chain = members[left], common[left], chains[left]
    block = tables[rows[at], column]
    order = np.lexsort((-full[at], block, column, chain))
    keys = np.stack((chain, column, block))[:, order]
    is_first = np.ones(len(left), bool)
    is_first[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
    sizes = np.diff(np.append(np.flatnonzero(is_first), len(left)))
    enough = sizes >= _MIN_QUERIES
    kept = left[order[np.repeat(enough, sizes)]]
    sizes = sizes[enough]
    return kept, np.cumsum(sizes) - sizes, sizes


def _common(tables: Int32s, rows: Int64s, others: Int64s, equal: Int64s, ends: Int64s) -> Int64s:
    """Return in how many blocks [pairs] each row begins like the other one: at least ``equal``, at most ``ends``."""
    common = equal.copy()
    pending = np.flatnonzero(common < ends)
    window = _FIRST_WINDOW
    while len(pending):
        low = int(common[pending].min())
        high = min(low + window, int(ends[pending].max()))
        now = pending[common[pending] < high]
        # Some are known to be equal beyond ``low`` already, and to compare these columns again does no harm.
        columns = tables[:, low:high]
        differs = columns[rows[now]] != columns[others[now]]
        first = differs.argmax(axis=1)
        found = differs[np.arange(len(now)), first]
        common[now] = np.minimum(np.where(found, low + first, high), ends[now])
        is_done = np.zeros(len(common), bool)
        is_done[now] = found
        pending = pending[~is_done[pending] & (common[pending] < ends[pending])]
        window = min(_WINDOW_GROWTH * window, max(_WINDOW_BLOCKS // len(now), _FIRST_WINDOW))
    return common


def _chosen(rounds: list[_Round], block_size: int) -> list[tuple[Int64s, int]]:
    """Choose the prefixes, members and blocks, that save the most.

    Along a chain, either the members up to one of them share the blocks which that member has in common with the chain,
    and only branches that have left before may share more; or no member shares the chain, and all branches may share
    theirs. Of two choices that save as much, the one with more members and fewer blocks is taken.
    """
    cuts: list[Int64s] = []
    saved = np.zeros(0, np.int64)
    for number in reversed(range(len(rounds))):
        members, common, starts, chains, _ = rounds[number]
        branches = np.zeros(len(members), np.int64)
        if number + 1 < len(rounds):
            np.add.at(branches, rounds[number + 1].parents, saved)
        places = np.arange(len(members))
        before = places - starts[chains]
        # Of several that leave at the same place, the last one represents all.
        is_last = np.ones(len(members), bool)
        is_last[:-1] = (common[1:] != common[:-1]) | (chains[1:] != chains[:-1])
        may_share = is_last & (before >= _MIN_QUERIES - 1) & (common * block_size >= _MIN_TOKENS)
        apart = np.add.reduceat(branches, starts)
        running = np.cumsum(branches)
        ends = np.append(starts[1:], len(members)) - 1
        saves = np.where(may_share, before * common + running[ends][chains] - running, -1)
        together = np.maximum.reduceat(saves, starts)
        cut = np.maximum.reduceat(np.where(saves == together[chains], places, -1), starts)
        cuts.append(np.where((together >= apart) & (together > 0), cut, -1))
        saved = np.maximum(together, apart)
    return _selected(rounds, cuts[::-1])


def _selected(rounds: list[_Round], cuts: list[Int64s]) -> list[tuple[Int64s, int]]:
    """Return members and blocks of each cut, except for chains whose members share a part of their parent."""
    selected: list[tuple[Int64s, int]] = []
    is_open: npt.NDArray[np.bool_] = np.ones(0, bool)
    for number, ((members, common, starts, _, parents), cut) in enumerate(zip(rounds, cuts, strict=True)):
        if number:
            above = rounds[number - 1].chains[parents]
            is_open = is_open[above] & (parents > cuts[number - 1][above])
        else:
            is_open = np.ones(len(starts), bool)
        for chain in np.flatnonzero(is_open & (cut >= 0)).tolist():
            end = int(cut[chain])
            selected.append((members[starts[chain] : end + 1], int(common[end])))
    return selected
