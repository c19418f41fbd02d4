"""The KV pool of a model with several groups of layers: pages in one piece of memory, which all groups share."""

import functools

import torch

from pagewise_executor.kv.kv_pool import KVPool, Layout
from pagewise_executor.kv.layer_groups import PageLayout


class PagePool(KVPool):
    """``num_pages`` pages of ``page_layout``, and before them the null page, which holds zeros and is never written.

    Its blocks are the pages: copies move whole pages. ``slots``: a pool over the same memory for each slot of each
    group, whose layers lie in one page, one after the other. ``layers``: of all slots, in the order of the model's
    layers with K and V of their own. ``slot_of``: the slot of each of them.

    Raises:
        ModelError: the device has no room for it.
    """

    def __init__(
        self, page_layout: PageLayout, num_pages: int, block_size: int, dtype: torch.dtype, device: torch.device, *,
        layout: Layout, triton: bool,
    ) -> None:  # fmt: skip
        places = [
            (group.shape, group.layers[first : first + group.layers_per_page])
            for group in page_layout.groups
            for first in range(0, len(group.layers), group.layers_per_page)
        ]
        make = functools.partial(
            KVPool, num_blocks=1 + num_pages, block_size=block_size, dtype=dtype, device=device, layout=layout,
            triton=triton, block_bytes=page_layout.page_bytes,
        )  # fmt: skip
        shape, held = places[0]
        super().__init__(
            [shape] * len(held), 1 + num_pages, block_size, dtype, device, layout=layout, triton=triton,
            block_bytes=page_layout.page_bytes,
        )  # fmt: skip
        memory = self.regions[0].view(-1)
        self.slots = [make([shape] * len(held), memory=memory) for shape, held in places]
        found = {
            number: (layer, slot)
            for slot, ((_, held), pool) in enumerate(zip(places, self.slots, strict=True))
            for number, layer in zip(held, pool.layers, strict=True)
        }
        self.layers = [found[number][0] for number in sorted(found)]
        self.slot_of = [found[number][1] for number in sorted(found)]
        self.keys, self.values = [one.keys for one in self.layers], [one.values for one in self.layers]
        self.scales = [one.scales for one in self.layers]
