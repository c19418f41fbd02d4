"""Which files of a disk cache to delete first, by the budgets of their owners.

The owner of a block is the API key, or the group of keys, in the tags of the prefix's first block. As in control groups
of Linux, blocks of owners above their ``high`` are deleted first, then blocks of owners above their ``low``, and blocks
of owners up to their ``min`` stay.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pagewise_shared.protocol import StoredBudget


class StoredFile(NamedTuple):
    """A block's file. ``own``, ``parent``: content name and short hash of the block, and of the block before it.
    ``used``: the time of its last use in nanoseconds. ``size``: bytes."""

    path: str
    own: str
    parent: str
    used: int
    size: int


class Bounds(NamedTuple):
    """The budget of an owner in bytes. ``high``: None is no bound."""

    min: int = 0
    low: int = 0
    high: int | None = None


_MOST_PROMISED = 0.5
"""The part of the folder that all minima may take together."""


def bounds_of(budgets: Sequence[StoredBudget], most_bytes: int) -> dict[bytes, Bounds]:
    """Return the bounds of each owner in a folder of ``most_bytes``, by the owner's tag. If the minima take more than
    half of the folder together, all are made smaller by the same factor."""

    def size(amount: int, share: float) -> int:
        return amount + int(share * most_bytes)

    promised = sum(size(one.budget.min.bytes, one.budget.min.share) for one in budgets)
    scale = min(1.0, _MOST_PROMISED * most_bytes / promised) if promised else 1.0
    return {
        one.tag: Bounds(
            int(scale * size(one.budget.min.bytes, one.budget.min.share)),
            size(one.budget.low.bytes, one.budget.low.share),
            None if (high := one.budget.high) is None else size(high.bytes, high.share),
        )
        for one in budgets
    }


def least_recently_used(files: Sequence[StoredFile]) -> list[StoredFile]:
    """Return files in the order of eviction: each after all files that follow it in a prefix."""
    by_own = {file.own: file for file in files}
    kept: dict[str, StoredFile] = {}  # in reverse order of eviction
    for file in sorted(files, key=lambda file: file.used, reverse=True):
        path = []
        current: StoredFile | None = file
        while current is not None and current.own not in kept:
            path.append(current)
            kept[current.own] = current  # now, so that names that form a circle end the walk
            current = by_own.get(current.parent)
        for one in reversed(path):
            kept[one.own] = kept.pop(one.own)
    return list(reversed(kept.values()))


def in_order(
    files: Sequence[StoredFile], bounds: Mapping[bytes, Bounds], owner_of: Callable[[str], bytes]
) -> Iterator[StoredFile]:
    """Yield the files in the order in which they may be deleted; the caller deletes each before it asks for the next.

    ``owner_of``: returns the tag of the owner in the file of a prefix's first block, by its path; empty: none is known.
    """
    waiting = least_recently_used(files)
    if not bounds:
        yield from waiting
        return
    owners = _owners(waiting, owner_of)
    used: dict[bytes, int] = {}
    for file in waiting:
        used[owners[file.own]] = used.get(owners[file.own], 0) + file.size
    for urgency in range(3):
        left: list[StoredFile] = []
        for file in waiting:
            owner = owners[file.own]
            least, low, high = bounds.get(owner, Bounds())
            kept = (used[owner] if high is None else high, max(least, low), least)[urgency]
            if used[owner] > kept:
                used[owner] -= file.size
                yield file
            else:
                left.append(file)
        waiting = left


def _owners(files: Sequence[StoredFile], owner_of: Callable[[str], bytes]) -> dict[str, bytes]:
    """Return the owner of each file, by its content name and short hash."""
    by_own = {file.own: file for file in files}
    owners: dict[str, bytes] = {}
    for file in files:
        path = [file]
        while True:
            before = by_own.get(path[-1].parent)
            if path[-1].own in owners or before is None or len(path) > len(files):  # a circle of names
                break
            path.append(before)
        first = path[-1]
        owner = owners[first.own] if first.own in owners else owner_of(first.path)
        for one in path:
            owners[one.own] = owner
    return owners
