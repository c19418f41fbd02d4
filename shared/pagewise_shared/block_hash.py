"""Block hashes: names of full KV blocks by content, which are the same in every process.

A block's hash covers its parent's hash and its tokens; the root, the first block's parent, covers the model
fingerprint, the cache salt and the adapter. So equal hashes mean equal KV. The hash is SHA-256: a tenant who could make
two prefixes collide would get another tenant's KV.
"""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple, NewType

HASH_BYTES = 32
BlockHash = NewType("BlockHash", bytes)
"""``HASH_BYTES`` bytes."""


def root_hash(model_fingerprint: str, *extra_keys: object) -> BlockHash:
    """Return the parent of a prefix's first block. ``extra_keys``: values that differ by their ``repr``."""
    return BlockHash(hashlib.sha256(repr((model_fingerprint, *extra_keys)).encode()).digest())


_ADAPTER = "adapter:"


def adapter_salt(content: bytes, cache_salt: str | None) -> str:
    """Return the cache salt that separates the KV of an adapter from the KV of the model and of other adapters.

    It contains the request's own salt. ``content``: the hash of the adapter's files, not its name, so that a name that
    is used again never finds the KV of other weights.
    """
    return f"{_ADAPTER}{content.hex()}" if cache_salt is None else f"{_ADAPTER}{content.hex()}/{cache_salt}"


def is_adapter_salt(cache_salt: str | None) -> bool:
    """Whether the salt was made by ``adapter_salt``."""
    return cache_salt is not None and cache_salt.startswith(_ADAPTER)


_LONG_ROPE = "long-rope:"
ONE_ROPE = 2**31
"""The ``short_rope_len`` of models whose RoPE does not depend on the sequence length: longer than any sequence."""


def rope_salt(cache_salt: str | None, num_tokens: int, short_rope_len: int) -> str | None:
    """Return the cache salt of a sequence of ``num_tokens`` tokens.

    LongRoPE rotates all keys of a sequence by short factors up to ``short_rope_len`` tokens (prompt and output), and by
    long factors beyond. So each text has KV of two kinds, which must not be mixed.
    """
    if num_tokens <= short_rope_len:
        return cache_salt
    return _LONG_ROPE if cache_salt is None else f"{_LONG_ROPE}/{cache_salt}"


def without_rope(salt: str | None) -> str | None:
    """Return the cache salt that ``rope_salt`` was given."""
    if salt is None or not salt.startswith(_LONG_ROPE):
        return salt
    return salt.removeprefix(f"{_LONG_ROPE}/") if salt != _LONG_ROPE else None


def client_salt(salt: str | None) -> str | None:
    """Return the cache salt of a request, which ``adapter_salt`` and ``rope_salt`` may have extended."""
    salt = without_rope(salt)
    return salt.partition("/")[2] or None if salt is not None and is_adapter_salt(salt) else salt


def is_below(salt: str | None, wanted: str) -> bool:
    """Whether a cache salt is ``wanted``, or begins with ``wanted`` and a slash. An empty ``wanted`` fits all salts."""
    own = client_salt(salt)
    return not wanted or (own is not None and (own == wanted or own.startswith(f"{wanted}/")))


SALT_TAG_BYTES = 16
MAX_SALT_TAGS = 32


def salt_tag(wanted: str) -> bytes:
    """Return the tag of a cache salt and of all salts below it (``is_below``), by which a tier without ids finds their
    blocks: a hash, so that the tier does not show the salt."""
    return hashlib.sha256(f"cache salt {wanted}".encode()).digest()[:SALT_TAG_BYTES]


def salt_tags(salt: str | None) -> bytes:
    """Return the tags under which the blocks of a cache salt are found, one after the other: of "", of the first part
    of the salt, and so on to the whole salt. A salt of more parts than there are tags has none for its last but one."""
    own = client_salt(salt)
    parts = own.split("/") if own is not None else []
    wanted = ["", *("/".join(parts[:count]) for count in range(1, len(parts) + 1))]
    if len(wanted) > MAX_SALT_TAGS:
        wanted[MAX_SALT_TAGS - 1 : -1] = []
    return b"".join(map(salt_tag, wanted))


def is_own_salt(cache_salt: str | None) -> bool:
    """Whether the salt has a form that only Pagewise itself makes; a request must not have it."""
    return is_adapter_salt(cache_salt) or without_rope(cache_salt) != cache_salt


def is_private(cache_salt: str | None) -> bool:
    """Whether KV under this salt belongs to some clients only."""
    return cache_salt is not None and not (is_adapter_salt(cache_salt) and "/" not in cache_salt)


def block_hash(parent: BlockHash, tokens: bytes) -> BlockHash:
    """Return the hash of the block with ``tokens`` (int32 bytes, a full block) that follows ``parent``."""
    return BlockHash(hashlib.sha256(parent + tokens).digest())


class BlockName(NamedTuple):
    """The name of a block in storage: its hash, and the hash of its parent, which is the root for a first block."""

    hash: BlockHash
    parent: BlockHash


def pack_names(names: Iterable[BlockName]) -> bytes:
    """Pack names for the wire: 64 bytes each."""
    return b"".join(part for name in names for part in name)


def unpack_names(packed: bytes) -> list[BlockName]:
    """Unpack the names of ``pack_names``.

    Raises:
        ValueError: the length is no multiple of 64.
    """
    if len(packed) % (2 * HASH_BYTES):
        raise ValueError(f"{len(packed)} bytes are not names of {2 * HASH_BYTES} bytes")
    hashes = [BlockHash(packed[start : start + HASH_BYTES]) for start in range(0, len(packed), HASH_BYTES)]
    return [BlockName(*pair) for pair in zip(hashes[::2], hashes[1::2], strict=True)]
