"""The names of blocks in tiers that outlive executors, and the header that is stored with a block there."""

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

import xxhash
from pagewise_shared.block_hash import (
    HASH_BYTES,
    MAX_SALT_TAGS,
    SALT_TAG_BYTES,
    BlockHash,
    BlockName,
    block_hash,
)

from pagewise_executor.tiers.tier import Rows

_HEADER = struct.Struct(f"<8sQQ{HASH_BYTES}s{HASH_BYTES}s")
LAYOUT = 2
"""The version of the data that is stored for a block: header, content, and tags of the salt. It is a part of the names
of contents (``make_tiers``), so that an executor of another version finds no blocks instead of corrupt ones."""
_MAGIC = b"pagewis%d" % LAYOUT
HEADER_BYTES = _HEADER.size
SALTS_BYTES = MAX_SALT_TAGS * SALT_TAG_BYTES
"""The most bytes of the ``salt_tags`` that are stored with the first block of a prefix."""

_LOOKED_AT = 32

SCRATCH = BlockHash(hashlib.sha256(b"scratch").digest())
"""The parent of the blocks with which the speed of copies is measured."""
_SCRATCH = SCRATCH.hex()[:16]


def content_name(fingerprint: str, digest: str) -> str:
    """Return the name of a model and a block format, for a file's name or a key."""
    return f"{quote(fingerprint, safe='')}.{digest}"


def fingerprint_of(content: str) -> str:
    """Return the model's fingerprint from a ``content_name``."""
    return unquote(content.rpartition(".")[0])


def short_hash(hash_of_block: BlockHash) -> str:
    """Return the first 16 hexadecimal digits of a hash, which identify a block where there is little room."""
    return hash_of_block.hex()[:16]


def descendants(parents: Mapping[str, str], roots: Iterable[str]) -> list[str]:
    """Return all blocks below ``roots``. ``parents``: the parent of each block; all by their short hashes."""
    children: dict[str, list[str]] = {}
    for own, parent in parents.items():
        children.setdefault(parent, []).append(own)
    found = [own for root in roots for own in children.pop(root, ())]
    for own in found:  # it grows
        found += children.pop(own, ())
    return found


def of_salt(parents: Mapping[str, str], tags_of: Callable[[Sequence[str]], Iterable[bytes]], tag: bytes) -> list[str]:
    """Return the blocks of the prefixes whose salt has a tag (``salt_tag``), or is not known; without a tag all.

    A salt is not known of blocks whose beginning is gone, and of blocks from before tags were stored. ``parents``: see
    ``descendants``. ``tags_of``: returns the stored ``salt_tags`` of each of some blocks; empty: none are stored.
    """
    if not tag:
        return [own for own, parent in parents.items() if not parent.endswith(_SCRATCH)]
    owns = [own for own, parent in parents.items() if parent not in parents and not parent.endswith(_SCRATCH)]
    chosen = [own for own, tags in zip(owns, tags_of(owns), strict=True) if _fits(tags, tag)]
    return chosen + descendants(parents, chosen)


def _fits(tags: bytes, wanted: bytes) -> bool:
    starts = range(0, len(tags), SALT_TAG_BYTES)
    return not any(tags) or any(tags[start : start + SALT_TAG_BYTES] == wanted for start in starts)


def chain(root: BlockHash, tokens: bytes, block_size: int) -> list[BlockName]:
    """Return the names of the full blocks of ``tokens`` (int32 bytes)."""
    names: list[BlockName] = []
    parent, size = root, 4 * block_size
    for start in range(0, len(tokens) - size + 1, size):
        names.append(BlockName(block_hash(parent, tokens[start : start + size]), parent))
        parent = names[-1].hash
    return names


def num_leading(names: Sequence[BlockName], contains: Callable[[Sequence[BlockName]], list[bool]]) -> int:
    """Return how many of a prefix's first blocks a tier contains.

    A tier evicts the end of a prefix before its beginning. So this looks for the end by bisection, several blocks at
    a time: four rounds of at most 32 blocks for a prefix of a million. If the middle of a prefix is missing all the
    same, the answer may be too small or too great; blocks that a later load does not find are computed.
    """
    begin, end = 0, len(names)  # blocks before ``begin`` are there, blocks from ``end`` on are not
    while begin < end:
        step = -(-(end - begin) // _LOOKED_AT)
        indices = [*range(begin + step - 1, end - 1, step), end - 1]
        there = contains([names[index] for index in indices])
        if all(there):
            return end
        first_missing = there.index(False)
        end = indices[first_missing]
        begin = indices[first_missing - 1] + 1 if first_missing else begin
    return begin


def checksum(content: Any) -> int:
    """Return the xxh3_64 of a buffer of bytes."""
    return int(xxhash.xxh3_64_intdigest(content))


def header(name: BlockName, row: Rows) -> bytes:
    """Return the header that is stored before the content of a block."""
    return _HEADER.pack(_MAGIC, len(row), checksum(row), name.hash, name.parent)


def stored_bytes(stored: bytes) -> int:
    """Return the number of bytes of content behind a header, from the header."""
    return int(_HEADER.unpack(stored)[1])


def is_sound(stored: bytes, name: BlockName, row: Rows) -> bool:
    """Whether this header was stored with this content under this name."""
    return stored == header(name, row)
