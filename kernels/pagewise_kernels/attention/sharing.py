"""The prefixes that decodes share, as ``plan_decode_kernel`` reads them on the device.

A prefix of many queries is taken apart into stretches of as many of them as fill a tile. All of it is one array of
int32, so that one copy brings it to the device, at the same place in every step, as CUDA graphs need it.
"""

import itertools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch


class Shared(NamedTuple):
    """``num_items`` [1]: shared stretches; ``item_of`` [queries]: the stretch of each query, -1 for none; ``order``
    [queries]: the queries of one stretch after the other; for each stretch, its first entry of ``order``, its number of
    queries, and its tokens, which are whole tiles."""

    num_items: torch.Tensor
    item_of: torch.Tensor
    order: torch.Tensor
    item_firsts: torch.Tensor
    item_sizes: torch.Tensor
    item_tokens: torch.Tensor


def views(table: torch.Tensor, max_queries: int) -> Shared:
    """The parts of a table of ``shared_table``."""
    return Shared(*table.split([1, *[max_queries] * 5]))


def no_shared(max_queries: int) -> npt.NDArray[np.int32]:
    """The table where nothing is shared."""
    table = np.zeros(1 + 5 * max_queries, np.int32)
    table[1 : 1 + max_queries] = -1
    return table


def shared_table(
    prefixes: npt.NDArray[np.int64],
    members: npt.NDArray[np.int64],
    max_queries: int,
    *,
    at_once: int,
    tile: int,
    least: int,
) -> npt.NDArray[np.int32]:
    """The table of prefixes of at least ``least`` tokens: see ``DecodePlan.share``.

    ``at_once``: queries of a stretch at most; ``tile``: of whole such tiles it consists.

    Raises:
        ValueError: a query is in two prefixes, or is none.
    """
    if len(members) != len(np.unique(members)) or (
        len(members) and (members.min() < 0 or members.max() >= max_queries)
    ):
        raise ValueError(f"shared prefixes have different queries below {max_queries}, not {members.tolist()}")
    table = no_shared(max_queries)
    item_of, order, firsts, sizes, tokens = table[1:].reshape(5, max_queries)
    order[: len(members)] = members
    number = 0
    for begin, count, length in prefixes.tolist():
        whole = length // tile * tile
        if whole < least:
            continue
        # Of about equal size: a query that is left over alone had better read it as a part of its own context.
        cuts = begin + np.arange(-(-count // at_once) + 1) * count // -(-count // at_once)
        for first, end in itertools.pairwise(cuts.tolist()):
            if end - first > 1:
                firsts[number], sizes[number], tokens[number] = first, end - first, whole
                item_of[members[first:end]] = number
                number += 1
    table[0] = number
    return table
