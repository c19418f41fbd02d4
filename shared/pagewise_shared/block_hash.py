"""Block hashes: names of full KV blocks by content, which are the same in every process.

A block's hash covers its parent's hash and its tokens; the first block's parent covers the extra keys of the prefix
(model fingerprint, cache salt, adapter). So equal hashes mean equal KV. The hash is SHA-256, because a tenant who could
make two prefixes collide would be served another tenant's KV.
"""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple, NewType

HASH_BYTES = 32
BlockHash = NewType("BlockHash", bytes)
"""``HASH_BYTES`` bytes."""


def root_hash(model_fingerprint: str, *extra_keys: object) -> BlockHash:
    """Return the parent of a prefix's first block. ``extra_keys``: values whose ``repr`` tells them apart."""
    return BlockHash(hashlib.sha256(repr((model_fingerprint, *extra_keys)).encode()).digest())


_ADAPTER = "adapter:"


def adapter_salt(content: bytes, cache_salt: str | None) -> str:
    """Return what separates the KV of an adapter from that of the model and of other adapters.

    It takes the place of the cache salt, and holds it. ``content``: the hash of the adapter's files, never its name,
    so that KV of other weights is never found under a name that was used before.
    """
    return f"{_ADAPTER}{content.hex()}" if cache_salt is None else f"{_ADAPTER}{content.hex()}/{cache_salt}"


def is_adapter_salt(cache_salt: str | None) -> bool:
    """Whether it was made by ``adapter_salt``; no gateway may send such a one as a request's own."""
    return cache_salt is not None and cache_salt.startswith(_ADAPTER)


def is_private(cache_salt: str | None) -> bool:
    """Whether KV under this salt belongs to some clients only, and not to all."""
    return cache_salt is not None and not (is_adapter_salt(cache_salt) and "/" not in cache_salt)


def block_hash(parent: BlockHash, tokens: bytes) -> BlockHash:
    """Return the hash of the block with ``tokens`` (int32 bytes, a full block) that follows ``parent``."""
    return BlockHash(hashlib.sha256(parent + tokens).digest())


class BlockName(NamedTuple):
    """What a block is called in storage: its hash, and that of the block before it; of a first block, the root."""

    hash: BlockHash
    parent: BlockHash


def pack_names(names: Iterable[BlockName]) -> bytes:
    """Return names one after the other, as they travel: 64 bytes each."""
    return b"".join(part for name in names for part in name)


def unpack_names(packed: bytes) -> list[BlockName]:
    """Return the names that were packed.

    Raises:
        ValueError: these are not whole names.
    """
    if len(packed) % (2 * HASH_BYTES):
        raise ValueError(f"{len(packed)} bytes are not names of {2 * HASH_BYTES} bytes")
    hashes = [BlockHash(packed[start : start + HASH_BYTES]) for start in range(0, len(packed), HASH_BYTES)]
    return [BlockName(*pair) for pair in zip(hashes[::2], hashes[1::2], strict=True)]
