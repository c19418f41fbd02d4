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
    """Whether it was made by ``adapter_salt``."""
    return cache_salt is not None and cache_salt.startswith(_ADAPTER)


_LONG_ROPE = "long-rope:"
ONE_ROPE = 2**31
"""The ``short_rope_len`` of models whose RoPE does not depend on the length of the sequence: no sequence is longer."""


def rope_salt(cache_salt: str | None, num_tokens: int, short_rope_len: int) -> str | None:
    """Return the salt under which the KV of a sequence is cached that now has ``num_tokens`` tokens.

    LongRoPE rotates all keys of a sequence by its short factors up to ``short_rope_len`` tokens (prompt and output),
    and all of them by its long factors beyond. So each text has KV of two kinds, which are never mixed.
    """
    if num_tokens <= short_rope_len:
        return cache_salt
    return _LONG_ROPE if cache_salt is None else f"{_LONG_ROPE}/{cache_salt}"


def without_rope(salt: str | None) -> str | None:
    """Return the cache salt from which ``rope_salt`` made this one."""
    if salt is None or not salt.startswith(_LONG_ROPE):
        return salt
    return salt.removeprefix(f"{_LONG_ROPE}/") if salt != _LONG_ROPE else None


def is_own_salt(cache_salt: str | None) -> bool:
    """Whether Pagewise makes salts of this kind itself; no gateway may send such a one as a request's own."""
    return is_adapter_salt(cache_salt) or without_rope(cache_salt) != cache_salt


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
