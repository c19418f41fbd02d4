"""Block hashes: what a full block of KV is called wherever it lies, the same in every process.

A block's hash chains over its parent's hash, its tokens, and the extra keys of the prefix's beginning (model
fingerprint, cache salt, adapter), so equal hashes mean equal KV. SHA-256, because a tenant who could make two prefixes
collide would be served another's KV.
"""

import hashlib
from typing import NewType

HASH_BYTES = 32
BlockHash = NewType("BlockHash", bytes)
"""``HASH_BYTES`` bytes."""


def root_hash(model_fingerprint: str, *extra_keys: object) -> BlockHash:
    """What the first block of a prefix has for a parent. ``extra_keys``: values whose ``repr`` tells them apart."""
    return BlockHash(hashlib.sha256(repr((model_fingerprint, *extra_keys)).encode()).digest())


def block_hash(parent: BlockHash, tokens: bytes) -> BlockHash:
    """Hash of the block of ``tokens`` (int32 bytes, a full block) that comes after ``parent``."""
    return BlockHash(hashlib.sha256(parent + tokens).digest())
