"""Groups of layers that see the same tokens, and the pages of which the blocks of all groups are made.

A block of a group holds ``block_size`` tokens of all its layers. Blocks of several groups have unequal sizes, and yet
memory that one group frees must be of use to another. So all blocks consist of pages of one size. A page holds K and V
of a number of layers of one group; the pages of a block may lie anywhere. vLLM makes all blocks as large as the largest
and wastes the rest, and SGLang gives each group a fixed share.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pagewise_executor.kv.kv_pool import KVShape, bytes_per_block

_MOST_WASTE = 0.02
"""The share of a block's pages that may hold nothing, if smaller pages would hold more."""


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


@dataclass(slots=True, frozen=True)
class PageLayout:
    """The groups of a model, of which the first sees all tokens, and the size of a page in bytes.

    ``waste``: the largest share of a block's pages that holds nothing, over all groups.
    """

    groups: tuple[Group, ...]
    page_bytes: int
    waste: float


def page_layout(
    layers: Sequence[KVLayerKind], block_size: int, dtype: torch.dtype, max_model_len: int
) -> PageLayout | None:
    """Return the groups of a model's layers and the pages of their blocks; None: one group is enough.

    Of the pages that waste at most 2% of any block, the largest is chosen, because a block of fewer pages needs fewer
    tables; if all waste more, the page that wastes least. Windows of ``max_model_len`` tokens and more see all tokens.
    If no layer does, the layers with the largest window count as such. Layers that see the same tokens and have unequal
    shapes cannot be grouped: the model then has one group.
    """
    kinds = [one if one.window < max_model_len else KVLayerKind(one.shape) for one in layers]
    windows = {(one.window, one.chunked) for one in kinds}
    if windows and (0, False) not in windows:
        largest = max(windows)
        kinds = [KVLayerKind(one.shape) if (one.window, one.chunked) == largest else one for one in kinds]
    members: dict[tuple[int, bool], list[int]] = {(0, False): []}
    for index, one in enumerate(kinds):
        members.setdefault((one.window, one.chunked), []).append(index)
    if len(members) == 1 or any(len({kinds[index].shape for index in held}) > 1 for held in members.values()):
        return None
    sizes = {key: bytes_per_block([kinds[held[0]].shape], block_size, dtype) for key, held in members.items()}
    pages = {count * sizes[key] for key, held in members.items() for count in range(1, len(held) + 1)}
    layouts = []
    for page in sorted(one for one in pages if one >= max(sizes.values())):
        groups = tuple(
            Group(tuple(held), kinds[held[0]].shape, *key, min(len(held), page // sizes[key]))
            for key, held in members.items()
        )
        waste = max(
            1 - len(one.layers) * size / (one.pages_per_block * page)
            for one, size in zip(groups, sizes.values(), strict=True)
        )
        layouts.append(PageLayout(groups, page, waste))
    return max(layouts, key=lambda one: (-max(one.waste, _MOST_WASTE), one.page_bytes))
