"""Groups of layers that see the same tokens, and the pages of which the blocks of all groups are made.

A block of a group holds ``block_size`` tokens of all its layers. Blocks of several groups have unequal sizes, and yet
memory that one group frees must be of use to another. So all blocks consist of pages of one size. A page holds K and V
of a number of layers of one group; the pages of a block may lie anywhere. vLLM makes all blocks as large as the largest
and wastes the rest, and SGLang gives each group a fixed share.

Recurrent layers keep no K and V but states, of one size for any number of tokens. A block of the group of states holds
the states of all recurrent layers behind one token, one after the other, in as many pages as that takes.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pagewise_executor.kv.kv_pool import KVShape, bytes_per_block

_MOST_WASTE = 0.02
"""The share of a block's pages that may hold nothing, if smaller pages would hold more."""
_BLOCKS_BEHIND = 3
"""Blocks that a table keeps beside its window: two for a snapshot at the last full block, and the block that a step
begins to fill while steps in flight still read the first."""
_STATE_BLOCKS = 4
"""Blocks of states that a sequence holds: the one that it writes, the one behind its last full block, and two that
steps in flight leave or that become snapshots."""
_MARGIN = 64
"""Tokens before the window at the end of a prompt that its snapshot has too."""


class KVLayerKind(NamedTuple):
    """A layer with K and V of its own: their shape, and the tokens that a query sees, itself included.

    ``window``: 0 if it sees all tokens. ``chunked``: see ``LayerGroup``.
    """

    shape: KVShape
    window: int = 0
    chunked: bool = False


@dataclass(slots=True, frozen=True)
class Group:
    """A group of layers.

    ``layers``: their indices among the layers of the pool, in order. ``layers_per_page``: of them, so many lie in each
    page of a block, one after the other; in the last page there may be fewer.
    """

    layers: tuple[int, ...]
    shape: KVShape
    window: int
    chunked: bool
    layers_per_page: int

    @property
    def pages_per_block(self) -> int:
        """Pages that a block takes."""
        return -(-len(self.layers) // self.layers_per_page)


class StateGroup(NamedTuple):
    """The group of states of ``num_layers`` recurrent layers, of ``num_bytes`` bytes in all.

    ``pages_per_block``: pages that a block takes.
    """

    num_layers: int
    num_bytes: int
    pages_per_block: int


@dataclass(slots=True, frozen=True)
class PageLayout:
    """The groups of a model, of which the first sees all tokens, and the size of a page in bytes.

    ``waste``: the largest share of a block's pages that holds nothing, over all groups. ``block_size``: in tokens.
    ``states``: the group behind the others, of recurrent layers; None: the model has none.

    The scheduler counts pages by the same rules. ``in_flight``: most tokens that steps in flight compute at the same
    time, because a table holds the windows of all of them.
    """

    groups: tuple[Group, ...]
    page_bytes: int
    waste: float
    block_size: int
    states: StateGroup | None = None

    def pages_for(self, num_tokens: int, in_flight: int = 0) -> int:
        """Pages that a sequence of ``num_tokens`` tokens holds while it decodes; with ``in_flight``, most pages that
        it holds while its prompt is computed."""
        blocks = -(-num_tokens // self.block_size)
        pages = min(blocks, _STATE_BLOCKS) * self.states.pages_per_block if self.states is not None else 0
        for group in self.groups:
            seen = -(-(group.window - 1 + in_flight) // self.block_size) + _BLOCKS_BEHIND
            seen += -(-_MARGIN // self.block_size) if in_flight else 0
            pages += group.pages_per_block * (min(blocks, seen) if group.window else blocks)
        return pages

    def pages_for_all(self, num_sequences: int, num_tokens: int, in_flight: int) -> int:
        """Pages for ``num_sequences`` sequences of ``num_tokens`` tokens. Steps share the tokens in flight, so it is
        enough if one of the sequences computes its prompt and the others decode."""
        return (num_sequences - 1) * self.pages_for(num_tokens) + self.pages_for(num_tokens, in_flight)

    def sequences_that_fit(self, num_pages: int, num_tokens: int, in_flight: int) -> float:
        """The number of sequences of ``num_tokens`` tokens for which ``num_pages`` pages suffice, as ``pages_for_all``
        counts; a fraction if not one fits."""
        most = self.pages_for(num_tokens, in_flight)
        return 1 + (num_pages - most) / self.pages_for(num_tokens) if num_pages >= most else num_pages / most

    def longest_sequence(self, num_pages: int, in_flight: int) -> int:
        """The most tokens of a sequence that has ``num_pages`` pages to itself."""
        blocks = range(1, num_pages // self.groups[0].pages_per_block + 1)
        size = self.block_size
        return size * bisect_right(blocks, num_pages, key=lambda count: self.pages_for(count * size, in_flight))


def page_layout(
    layers: Sequence[KVLayerKind],
    block_size: int,
    dtype: torch.dtype,
    max_model_len: int,
    states: Sequence[int] = (),
) -> PageLayout | None:
    """Return the groups of a model's layers and the pages of their blocks; None: one group is enough.

    Of the pages that waste at most 2% of any block, the largest is chosen, because a block of fewer pages needs fewer
    tables; if all waste more, the page that wastes least. Windows of ``max_model_len`` tokens and more see all tokens.
    If no layer does, the layers with the largest window count as such. Layers that see the same tokens and have unequal
    shapes cannot be grouped: the model then has one group. ``states``: the bytes of the states of each recurrent layer.
    """
    kinds = [one if one.window < max_model_len else KVLayerKind(one.shape) for one in layers]
    windows = {(one.window, one.chunked) for one in kinds}
    if windows and (0, False) not in windows:
        largest = max(windows)
        kinds = [KVLayerKind(one.shape) if (one.window, one.chunked) == largest else one for one in kinds]
    members: dict[tuple[int, bool], list[int]] = {(0, False): []}
    for index, one in enumerate(kinds):
        members.setdefault((one.window, one.chunked), []).append(index)
    unequal = any(len({kinds[index].shape for index in held}) > 1 for held in members.values())
    if unequal or (len(members) == 1 and not states):
        return None
    sizes = {key: bytes_per_block([kinds[held[0]].shape], block_size, dtype) for key, held in members.items()}
    pages = {count * sizes[key] for key, held in members.items() for count in range(1, len(held) + 1)}
    layouts = []
    for page in sorted(one for one in pages if one >= max(sizes.values())):
        groups = tuple(
            Group(tuple(held), kinds[held[0]].shape, *key, min(len(held), page // sizes[key]))
            for key, held in members.items()
        )
        used = [len(one.layers) * size for one, size in zip(groups, sizes.values(), strict=True)]
        taken = list(zip(used, (one.pages_per_block for one in groups), strict=True))
        recurrent = StateGroup(len(states), sum(states), -(-sum(states) // page)) if states else None
        if recurrent is not None:
            taken.append((recurrent.num_bytes, recurrent.pages_per_block))
        waste = max(1 - size / (count * page) for size, count in taken)
        layouts.append(PageLayout(groups, page, waste, block_size, recurrent))
    return max(layouts, key=lambda one: (-max(one.waste, _MOST_WASTE), one.page_bytes))


def single_group(shapes: Sequence[KVShape], block_size: int, dtype: torch.dtype) -> PageLayout:
    """Return the layout of a model with one group, as ``page_layout`` would describe it: a page is a block of all
    layers. (Its layers may have unequal shapes.)"""
    whole = Group(tuple(range(len(shapes))), shapes[0], 0, False, len(shapes))
    return PageLayout((whole,), bytes_per_block(shapes, block_size, dtype), 0.0, block_size)
