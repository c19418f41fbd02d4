"""Names and contents of blocks for the tests of tiers whose blocks have no ids."""

import hashlib

import numpy as np
from pagewise_executor.tiers.tier import Rows
from pagewise_shared.block_hash import BlockHash, BlockName

BLOCK_BYTES = 5000
"""Not a multiple of a page."""


def name_of(text: str, parent: BlockName | None = None) -> BlockName:
    digest = BlockHash(hashlib.sha256(text.encode()).digest())
    return BlockName(digest, parent.hash if parent is not None else BlockHash(hashlib.sha256(b"root").digest()))


def prefix(text: str, length: int) -> list[BlockName]:
    names: list[BlockName] = []
    for number in range(length):
        names.append(name_of(f"{text} {number}", names[-1] if names else None))
    return names


def content(names: list[BlockName]) -> Rows:
    """The content of these blocks, which their names determine."""
    rows = [np.random.default_rng(list(name.hash)).integers(0, 256, BLOCK_BYTES, np.uint8) for name in names]
    return np.stack(rows)


def empty(count: int) -> Rows:
    return np.zeros((count, BLOCK_BYTES), np.uint8)
