"""Block hashes: names of full KV blocks by content, which are the same in every process.

A block's hash covers its parent's hash and its tokens; the first block's parent covers the extra keys of the prefix
(model fingerprint, cache salt, adapter). So equal hashes mean equal KV. The hash is SHA-256, because a tenant who could
make two prefixes collide would be served another tenant's KV.
"""

import hashlib
from typing import NewType

HASH_BYTES = 32
BlockHash = NewType("BlockHash", bytes)
"""``HASH_BYTES`` bytes."""


def root_hash(model_fingerprint: str, *extra_keys: object) -> BlockHash:
    """Return the parent of a prefix's first block. ``extra_keys``: values whose ``repr`` tells them apart."""
    return BlockHash(hashlib.sha256(repr((model_fingerprint, *extra_keys)).encode()).digest())


def block_hash(parent: BlockHash, tokens: bytes) -> BlockHash:
    """Return the hash of the block with ``tokens`` (int32 bytes, a full block) that follows ``parent``."""
    return BlockHash(hashlib.sha256(parent + tokens).digest())
