"""The contents of the pages of a model with several groups of layers, for inventories. This module does not import
torch.

A page has a *label*: the hash of its block, which equals the hash of the first group's block of the same tokens, and
its slot. A label identifies the content of a page, whichever block has the page at the time. So an inventory is made of
labels alone, also for pages that another process has left in host memory.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import numpy as np
from pagewise_shared.block_hash import HASH_BYTES, BlockHash, block_hash
from pagewise_shared.protocol import Inventory, NamedBlocks, named_blocks, pack_int32s

from pagewise_executor.page_map import NULL_PAGE
from pagewise_executor.step_work import Int32s, Int64s, SequenceState

_SLOT_BYTES = 8
LABEL_BYTES = HASH_BYTES + _SLOT_BYTES


class PageLabels:
    """The labels of the pages of the device, numbered below ``num_pages``, as far as their content is known.

    Pages are noted with the row, the slot and the index of the block when they enter a table. They are labelled when
    the row leaves, so that steps take no longer, or when a page is copied before. By then the row has passed most
    blocks of its windows, of which the scheduler may have kept some, in snapshots. So a page that has left the table
    stays noted until it enters another one or is overwritten. Blocks of states are in no table. Their pages are noted
    when they are written no more, with the index of the block at whose end the states are.
    """

    def __init__(self, num_pages: int, block_size: int) -> None:
        self._block_size = block_size
        self._hashes = np.full(num_pages, None, object)
        self._rows: Int32s = np.full(num_pages, -1, np.int32)
        self._slots, self._indices = np.zeros(num_pages, np.int32), np.zeros(num_pages, np.int32)
        self._labelled_slots = np.zeros(num_pages, np.int32)
        self._tables: Int32s = np.zeros((0, 0, 0), np.int32)

    def attach(self, tables: Int32s) -> None:
        """Label the pages of another batch from now on. ``tables`` [slots, num_rows, max_blocks]: of all slots."""
        self._tables = tables

    def clear(self) -> None:
        """Forget everything."""
        self._hashes[:] = None
        self._rows[:] = -1

    def known(self) -> dict[int, bytes]:
        """Return all known labels by page."""
        return {page: label for page, label in enumerate(self.of(range(len(self._hashes)))) if label is not None}

    def of(self, pages: Iterable[int]) -> list[bytes | None]:
        """Return the label of each of ``pages``; None where the content is not known."""
        slots = self._labelled_slots
        return [
            None if (found := self._hashes[page]) is None else found + int(slots[page]).to_bytes(_SLOT_BYTES, "little")
            for page in pages
        ]

    def rows_of(self, pages: Int32s) -> list[int]:
        """Return the rows that may know the content of the pages without a label among ``pages`` [n]."""
        rows = {int(self._rows[page]) for page in pages.tolist() if self._hashes[page] is None}
        return [row for row in rows if row >= 0]

    def note(self, rows: Int64s, slot: int, indices: Int64s, pages: Int32s) -> None:
        """Note ``pages`` [slots, n] that enter tables, at ``indices`` [n] of ``rows`` [n]. ``slot``: of the first."""
        self._rows[pages], self._indices[pages] = rows, indices
        self._slots[pages] = np.arange(slot, slot + len(pages))[:, None]

    def forget(self, pages: Int32s) -> None:
        """Forget the content of ``pages`` [n], which are about to be overwritten, for the tables in which they are."""
        self._hashes[pages] = None
        tabled = pages[self._slots[pages] < len(self._tables)]
        places = self._slots[tabled], self._rows[tabled], self._indices[tabled]
        self._rows[tabled[self._tables[places] != tabled]] = -1
        self._rows[pages[self._slots[pages] >= len(self._tables)]] = -1

    def label(self, row: int, sequence: SequenceState, num_computed: int, pages: Int32s) -> None:
        """Label the pages of a row. ``pages`` [n]: the first page of each of its blocks in the first group, which hold
        its first ``num_computed`` tokens."""
        if not sequence.root:
            return
        num_known = min(num_computed, len(sequence.tokens) + len(sequence.sampled)) // self._block_size
        hashes = np.empty(num_known, object)
        hashes[:] = self._chain(sequence, pages[:num_known])
        noted = np.flatnonzero(self._rows == row)
        noted = noted[self._indices[noted] < num_known]
        self._hashes[noted] = hashes[self._indices[noted]]
        self._labelled_slots[noted] = self._slots[noted]

    def left(self, row: int) -> None:
        """A row has left."""
        self._rows[self._rows == row] = -1

    def _chain(self, sequence: SequenceState, pages: Int32s) -> list[BlockHash]:
        """Return the hashes of the first full blocks of a sequence, whose first pages are ``pages`` [n]."""
        hashes: list[BlockHash] = []
        parent, size = BlockHash(sequence.root), 4 * self._block_size
        first, content = 0, b""
        for index, found in enumerate(self._hashes[pages]):
            if found is None:
                if not content:
                    first, content = index, sequence.known_tokens(index * self._block_size)
                offset = (index - first) * size
                found = block_hash(parent, content[offset : offset + size])
            hashes.append(found)
            parent = found
        return hashes


class KeptBlocks:
    """The blocks that an executor offers in an inventory, and their pages. ``pages_per_block``: of each group."""

    def __init__(self, pages_per_block: Sequence[int]) -> None:
        self._pages_per_block = pages_per_block
        self._places = [(group, index) for group, each in enumerate(pages_per_block) for index in range(each)]
        self._held: dict[int, list[dict[BlockHash, list[int]]]] = {}
        self._offered = Inventory()

    def offer(self, labels: Mapping[int, Mapping[int, bytes]], most: int) -> Inventory | None:
        """Return the inventory of the blocks of which a tier has all pages, at most ``most``; None: there are none.

        Windows and states come first in each tier: they are few, and without them the first group's blocks would be of
        no use.
        ``labels``: of each tier, by page. The ids of the blocks of each tier and group are 0, 1, 2 and so on.
        """
        self._held = {tier: self._whole(of_tier) for tier, of_tier in labels.items()}
        found = []
        for tier, groups in self._held.items():
            for group, held in reversed([*enumerate(groups)]):
                if hashes := list(islice(held, most)):
                    found.append(NamedBlocks(tier, pack_int32s(range(len(hashes))), b"".join(hashes), group))
                    most -= len(hashes)
        self._offered = Inventory(tuple(found))
        return self._offered if found else None

    def _whole(self, labels: Mapping[int, bytes]) -> list[dict[BlockHash, list[int]]]:
        """Return the pages of each block that is whole, by group and hash. Of equal pages it takes the last one."""
        found: list[dict[BlockHash, list[int]]] = [{} for _ in self._pages_per_block]
        for page, label in labels.items():
            group, index = self._places[int.from_bytes(label[HASH_BYTES:], "little")]
            pages = found[group].setdefault(BlockHash(label[:HASH_BYTES]), [NULL_PAGE] * self._pages_per_block[group])
            pages[index] = page
        return [{name: pages for name, pages in held.items() if NULL_PAGE not in pages} for held in found]

    def agree(self, inventory: Inventory | None) -> None:
        """Offer these blocks instead, which all ranks of the executor hold."""
        self._offered = inventory or Inventory()

    def clear(self) -> None:
        """Forget the blocks: the inventory was answered."""
        self._held, self._offered = {}, Inventory()

    def pages(self, tier: int) -> list[Int32s]:
        """Return the pages of the offered blocks of a tier, in the order of their ids: [n, pages per block] of each
        group."""
        found = []
        for group, each in enumerate(self._pages_per_block):
            ids = named_blocks(self._offered, group).get(tier, {})
            pages = [self._held[tier][group][name] for name in sorted(ids, key=ids.__getitem__)]
            found.append(np.array(pages, np.int32).reshape(-1, each))
        return found
